"""The time of a stage's step on a named Mac, by figures that others published (`bench/macs.toml`).

A decode step takes `o + bytes / v`: an overhead for each layer, and the bytes that it reads over the memory's
bandwidth. Rows are a staircase: a 4-bit product of 10 to 32 rows takes 3.95 times as long as of one. Long
chunks take as long as their floating point operations. Nothing of this was measured by us on a Mac.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sealring.mesh.errors import NotFound

FILE = Path(__file__).parents[1] / "macs.toml"

MARKS = {
    "S": "read in source or a project's own document",
    "I": "claimed, unchecked",
    "J": "judgement or arithmetic",
}

_STAIRS_BITS = 4.5
"""Bits of the weights by which the staircase was measured."""

_TILE = 32
"""Rows of a tile of the matrix kernel."""

_STAIRS_END = 64
"""Rows up to which there are points; above, products take as long as their operations."""


@dataclass(frozen=True)
class Machine:
    """A Mac. `gb_s` and `layer_us` are by the model's kind; `fill` tokens are added to a long chunk's. `ssd`
    has GB/s to `read` and `write`."""

    name: str
    memory_gb: float
    gb_s: Mapping[str, float]
    layer_us: Mapping[str, float]
    tflops: float
    stairs: tuple[tuple[float, float], ...]
    ssd: Mapping[str, float]
    fill: int = 0

    def bandwidth(self, kind: str) -> float:
        """Bytes a second."""
        return 1e9 * self.gb_s.get(kind, self.gb_s["dense"])

    def stair(self, rows: int) -> float:
        """The cost of a 4-bit product of `rows` rows, relative to one row."""
        if rows > _STAIRS_END:
            return self.stairs[-1][1] * -(-rows // _TILE) * _TILE / _STAIRS_END
        low, least = self.stairs[0]
        for high, most in self.stairs:
            if rows <= high:
                return most if high == low else least + (most - least) * (rows - low) / (high - low)
            low, least = high, most
        return least


@dataclass(frozen=True)
class Model:
    """A model. Parameters are in billions; `active` are all that one token reads, with the output head."""

    layers: int
    active: float
    head: float
    bits: float
    hidden: int
    kv_bytes: int
    kind: str = "dense"
    experts: int = 0
    chosen: int = 0
    expert_share: float = 0.0
    state_bytes: float = 0.0
    """A row's states, in the mean of all layers."""

    def bytes_of(self, billions: float) -> float:
        return billions * 1e9 * self.bits / 8


@dataclass(frozen=True)
class StageTime:
    """Times of one stage on one Mac: `share` of the layers, 0 to 1, and the output head if it is the last."""

    machine: Machine
    model: Model
    share: float
    last: bool

    def step(self, rows: int, tokens: int, context: int) -> float:
        """Seconds for `rows` rows of `tokens` tokens each, behind `context` tokens that are in the caches."""
        machine, model = self.machine, self.model
        layers, speed = model.layers * self.share, machine.bandwidth(model.kind)
        seconds = layers * machine.layer_us.get(model.kind, machine.layer_us["dense"]) / 1e6
        seconds += self._products((model.active - model.head) * self.share, rows * tokens)
        if self.last:
            seconds += self._product(model.head, rows)
        seconds += rows * (context + tokens) * model.kv_bytes * layers / speed
        if tokens > 1:
            looked_at = rows * tokens * (context + tokens / 2)
            seconds += 4 * model.hidden * looked_at * layers / (machine.tflops * 1e12)
        return seconds

    def _products(self, billions: float, rows: int) -> float:
        """Seconds of the layers' products; the experts' part reads every expert that some row has chosen."""
        model = self.model
        if not model.experts:
            return self._product(billions, rows)
        chosen = billions * model.expert_share
        read = model.experts / model.chosen * (1 - (1 - model.chosen / model.experts) ** rows)
        gathered = model.bytes_of(chosen) * read / self.machine.bandwidth(model.kind)
        return self._product(billions - chosen, rows) + max(gathered, self._operations(chosen, rows))

    def _product(self, billions: float, rows: int) -> float:
        model, machine = self.model, self.machine
        reading = model.bytes_of(billions) / machine.bandwidth(model.kind)
        stair = reading * _STAIRS_BITS / model.bits * machine.stair(min(rows, _STAIRS_END))
        long = self._operations(billions, rows) if rows > _STAIRS_END else 0.0
        return max(reading, stair, long)

    def _operations(self, billions: float, rows: int) -> float:
        return 2e9 * billions * (rows + self.machine.fill * (rows > 1)) / (self.machine.tflops * 1e12)


@dataclass(frozen=True)
class Link:
    """A link between two Macs, with what a record needs on both ends."""

    seconds: float
    bytes_per_second: float
    wakeups: float = 0.0
    """Seconds in which the threads on a record's way are woken."""


@dataclass(frozen=True)
class Figures:
    """The rows of the data file."""

    machines: Mapping[str, Machine]
    models: Mapping[str, Model]
    links: Mapping[str, Link]
    completion: float
    """Seconds between a GPU's end of a step and the thread that waits for it."""
    seals: float
    """Bytes a second that a processor seals or opens."""
    published: tuple[Mapping[str, Any], ...]
    targets: Mapping[str, Mapping[str, str]]
    """Targets by name, each with `arguments` of `bench macs` and the figure that is `wanted`."""
    sources: Mapping[str, str]
    """The mark and source of each entry, by `machines.NAME` and so on."""


@cache
def figures(file: Path = FILE) -> Figures:
    """Reads the data file. Raises KeyError, TypeError or ValueError on a row that is not whole."""
    data = tomllib.loads(file.read_text())
    sources = {"host": _source(data["host"])}
    for table in ("stairs", "ssds", "machines", "models", "links"):
        sources |= {f"{table}.{name}": _source(row) for name, row in data[table].items()}
    published = tuple(one | {"source": _source(dict(one))} for one in data["published"])
    stairs = {name: tuple(map(tuple, row["points"])) for name, row in data["stairs"].items()}
    host = data["host"]
    wakeups = host["wakeups"] * host["wakeup_us"] / 1e6
    return Figures(
        {
            name: Machine(**row | {"stairs": stairs[row["stairs"]], "ssd": data["ssds"][row["ssd"]]["gb_s"]})
            for name, row in data["machines"].items()
        },
        {name: Model(**row) for name, row in data["models"].items()},
        {name: Link(row["ms"] / 1e3, row["gb_s"] * 1e9, wakeups) for name, row in data["links"].items()},
        host["completion_us"] / 1e6,
        host["seal_gb_s"] * 1e9,
        published,
        data["targets"],
        sources,
    )


def _source(row: dict[str, Any]) -> str:
    """Takes mark and source out of a row."""
    mark, source = row.pop("mark"), row.pop("source")
    if mark not in MARKS or not source:
        raise ValueError(f"a row has no source or an unknown mark: {mark}")
    return f"[{mark}] {source}"


def cluster(text: str) -> list[str]:
    """The machines of "2xm4max" or "m3ultra+m5max", by name. Raises NotFound (MAC_NOT_FOUND)."""
    found: list[str] = []
    for part in text.split("+"):
        match = re.fullmatch(r"(?:([1-9][0-9]?)x)?([a-z0-9]+)", part)
        if match is None or match[2] not in figures().machines:
            raise NotFound(
                f"no Mac is called {part[:32]}",
                hint=f"write 2xm4max or m3ultra+m5max; there are: {', '.join(figures().machines)}",
                reason="MAC_NOT_FOUND",
            )
        found += [match[2]] * int(match[1] or 1)
    return found
