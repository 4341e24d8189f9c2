"""How fast a ring would be as a pipeline, or as a tensor ring, whose ranks compute parts of all layers.

Seconds of a decode step of `b` rows, on `k` machines:

    compute(m, b) = L*f + R/s * t(b) + b*K/v                    of one machine
    sums(b)       = 2*L * (F + 2*(k - 1) * (l + b*A/(k*w)))     two sums a layer, each round the tensor ring

    hop(b)        = H + l + b*A * (1/w + 1/SEALED)              a sealed record from stage to stage
    stage(b)      = compute; a tensor ring: the largest, + sums
    round(b)      = sum of the stages + k*hop                   a tensor ring: (k - 1) hops, of tokens alone

    one request:  1 / round(1)
    B rows:       in n lanes of b = B/n: B / max(n * largest stage(b), B*A * max(1/w, 1/SEALED), round(b)),
                  with the n that is fastest of the number of stages and of those whose lanes have a size that
                  was timed

- of the model: `L` layers of a machine; `R` bytes that it reads a step; `K` bytes of one row's caches at
  half of the context; `A` bytes of state that a row hands on. `R` is the machine's part of the layers. At the
  tail it includes the output head, which every rank of a tensor ring has whole. All are measured on the
  files, without loading them.
- of a machine (`Rate`): `s` bytes of weights a second and `t`, times as long that a step of more rows takes,
  both timed by the engine when it loaded a stage; `f` seconds a layer whatever it reads and `v` bytes of
  caches a second, which a file for `--simulate` may give. Where nobody does, `f` is in `s` (so that cutting
  layers looks better than it is) and caches are read as fast as weights: assumed.
- of a link (`Link`): `l` seconds that a small message takes one way and `w` bytes a second; the slowest of
  those of a tensor ring. Nodes measure them, or a file for `--simulate` gives them; assumed (`ASSUMED`) where
  neither has.
- of a machine's platform: `F`, what a sum costs besides (`FENCE`), and `H`, what a hop does (`HOP`).
- assumed besides: lanes are alike; a lane's rows are as long as another's; nothing else runs. Prompts are not
  in it: tokens a second are of rows that decode. A stage's reading and computing do not overlap.

How far off it is: docs/decisions/0034-shapes-by-one-cost-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.demand import Demand, read_bytes
from sealring.coordinator.planning.links import HOP, HOP_ON_METAL, Network
from sealring.coordinator.planning.speeds import Rate
from sealring.mesh.roster.model import PIPELINE, TENSOR
from sealring.v1 import model_pb2

FENCE = 150e-6
"""Seconds besides of a sum on a Mac's GPU: CPU and GPU wait for each other by MLX's default fence, which
takes 150 to 180 us (mlx issue 4438). The fast one (`MLX_METAL_FAST_SYNCH`) takes 4 to 17 and can hang the
GPU (mlx issue 3830), so no release sets it."""

SEALED = 1.9e9
"""Bytes a second sealed and opened, by one core: 1 MiB in 0.54 ms (`docs/performance/2026-11-21.md`)."""


_FEW = 8
"""Requests at once of a small office; the table of shapes has a column for them."""


@dataclass(frozen=True)
class Shape:
    """Machines by rank, and the `layers` of each. In a tensor ring every rank has a part of all layers."""

    strategy: str
    machines: tuple[Candidate, ...]
    layers: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Machines among which each layer is cut."""
        return len(self.machines) if self.strategy == TENSOR else 1

    @property
    def stages(self) -> int:
        """Machines, or rings of ranks, that work at the same time on different rows."""
        return len(self.machines) // self.ranks


@dataclass(frozen=True)
class Model:
    """A model at one context length. `parts` are the profiles of one rank's part, by number of ranks."""

    parts: Mapping[int, model_pb2.ModelProfile]
    context: int
    kv_bits: int = 0
    prefill_chunk: int = 0
    speculate: bool = False

    def demand(self, ranks: int, context: int = 0) -> Demand:
        sizes = context or self.context, self.kv_bits, self.prefill_chunk
        return Demand.of(self.parts[ranks], *sizes, speculate=self.speculate, whole=ranks > 1)

    @property
    def state(self) -> int:
        """Bytes that a row hands on from layer to layer."""
        return self.parts[1].handoff_bytes_per_token


@dataclass(frozen=True)
class Estimate:
    """A shape's figures: `rows` at once, of the whole context, and `memory` bytes of each machine, in order:
    weights, and caches and logits of all rows.

    `one_request`, `eight` (requests, or `rows` where these are fewer) and `full_batch` are in tokens a
    second, 0 where a machine's speed is not known or nothing takes time. `lanes` are those of a full batch,
    and `step` the seconds of a step of one row: computing, sums, hops.
    """

    shape: Shape
    rows: int
    memory: tuple[int, ...]
    one_request: float = 0.0
    eight: float = 0.0
    full_batch: float = 0.0
    lanes: int = 0
    step: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _Part:
    """What one machine has: bytes of weights and of one row's cache at the whole context, bytes
    that a step reads, and of one row's cache that it reads, and bytes of one row's logits."""

    weights: int
    row: int
    read: int
    cache: int
    logits: int


def estimate(model: Model, shape: Shape, network: Network, most_rows: int) -> Estimate | None:
    """Speeds of a shape with `most_rows` rows at most; None if it does not hold one row."""
    parts = _parts(model, shape)
    rows = min(
        (machine.room - part.weights) // max(1, part.row + part.logits)
        for machine, part in zip(shape.machines, parts, strict=True)
    )
    rows = min(most_rows, rows)
    if rows < 1:
        return None
    memory = tuple(part.weights + rows * (part.row + part.logits) for part in parts)
    if any(machine.rate is None for machine in shape.machines):
        return Estimate(shape, rows, memory)
    compute, sums, hops = _step(model, shape, parts, network, 1)
    one = sum(compute) + sums + sum(hops)
    if not one:  # one machine that reads nothing
        return Estimate(shape, rows, memory)
    eight, _ = _together(model, shape, parts, network, min(_FEW, rows))
    full, lanes = _together(model, shape, parts, network, rows)
    return Estimate(shape, rows, memory, 1 / one, eight, full, lanes, (sum(compute), sums, sum(hops)))


def _together(
    model: Model, shape: Shape, parts: Sequence[_Part], network: Network, rows: int
) -> tuple[float, int]:
    """Tokens a second of `rows` rows, in the number of lanes that makes most; and that number."""
    pairs = pairwise(shape.machines) if shape.strategy == PIPELINE else ()
    wires = [network.between(one.id, other.id) for one, other in pairs]
    carried = max(
        (rows * model.state * max(1 / wire.bytes_per_second, 1 / SEALED) for wire in wires), default=0.0
    )
    timed = {size for machine in shape.machines if machine.rate for size, _ in machine.rate.rows}
    counts = {min(shape.stages, rows), *(-(-rows // size) for size in timed if size <= rows)}

    def rate(lanes: int) -> float:
        compute, sums, hops = _step(model, shape, parts, network, rows / lanes)
        return rows / max(lanes * (max(compute) + sums), carried, sum(compute) + sums + sum(hops))

    return max((rate(count), -abs(count - shape.stages), count) for count in counts)[::2]


def _parts(model: Model, shape: Shape) -> list[_Part]:
    found, first = [], 0
    demand = model.demand(shape.ranks)
    half = model.demand(shape.ranks, max(1, model.context // 2))
    for rank, layers in enumerate(shape.layers[: shape.stages]):
        end = first + layers
        residents = sum(one.bytes for one in demand.residents_at(rank, shape.stages))
        found.append(
            _Part(
                demand.weight_bytes(first, end, rank, shape.stages) + residents,
                demand.row_bytes(first, end),
                read_bytes(model.parts[shape.ranks], first, end),
                half.row_bytes(first, end),
                demand.row_logits(rank, shape.stages),
            )
        )
        first = end
    return found * shape.ranks


def _step(
    model: Model, shape: Shape, parts: Sequence[_Part], network: Network, rows: float
) -> tuple[list[float], float, list[float]]:
    """Seconds of a step of `rows` rows: computing of each stage, sums, and each hop."""
    compute = [
        _compute(machine.rate, layers, part, rows)
        for machine, layers, part in zip(shape.machines, shape.layers, parts, strict=True)
        if machine.rate
    ]
    if shape.strategy == TENSOR:
        compute = [max(compute)]
    return compute, _sums(model, shape, network, rows), _hops(model, shape, network, rows)


def _compute(rate: Rate, layers: int, part: _Part, rows: float) -> float:
    reading = part.read / rate.bytes_per_second * rate.times(rows)
    caches = rows * part.cache / (rate.kv_bytes_per_second or rate.bytes_per_second)
    return layers * rate.layer_seconds + reading + caches


def _sums(model: Model, shape: Shape, network: Network, rows: float) -> float:
    if shape.ranks == 1:
        return 0.0
    link = network.slowest(combinations(shape.machines, 2))
    piece = rows * model.state / shape.ranks
    fence = FENCE if any(map(_metal, shape.machines)) else 0.0
    return (
        2 * shape.layers[0] * (fence + 2 * (shape.ranks - 1) * (link.latency + piece / link.bytes_per_second))
    )


def _hops(model: Model, shape: Shape, network: Network, rows: float) -> list[float]:
    if shape.stages == 1:
        link = network.slowest(combinations(shape.machines, 2))
        return [hop(*shape.machines) + link.latency] * (len(shape.machines) - 1)
    hops = []
    for one, other in pairwise(shape.machines):
        link = network.between(one.id, other.id)
        own = hop(one, other) + link.latency
        hops.append(own + rows * model.state * (1 / link.bytes_per_second + 1 / SEALED))
    last = shape.machines[-1], shape.machines[0]
    return [*hops, hop(*last) + network.between(last[0].id, last[1].id).latency]  # tokens, the closing edge


def hop(*machines: Candidate) -> float:
    """Seconds of a hop between these machines, without the link."""
    return HOP_ON_METAL if any(map(_metal, machines)) else HOP


def _metal(machine: Candidate) -> bool:
    return machine.rate is not None and machine.rate.metal
