"""Clusters of paced Macs: the product's processes on this machine, with engines that take another's time."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.models import SHAPES, random_model
from bench.paced.figures import figures
from bench.paced.network import WITHOUT, Network, network
from bench.paced.node import PACE, Pace
from sealring.cli.local.cluster import LocalCluster
from sealring.cli.terminal.host import Host

NAME = "bench"
CONTEXT = 65_536
TINY = dataclasses.replace(SHAPES["4x64"], context=CONTEXT, heads=1, kv_heads=1, vocabulary=0)
"""The model that is computed, with an embedding for each token of its tokenizer. One head: attention over
long contexts is most of what it costs."""
_MEMORY = 4 << 30
"""Bytes of each node, as far as plans go: long answers of many rows are planned for at once."""
_UNLIMITED = {"key_requests_per_second": 1e6, "peer_requests_per_second": 1e6}


class PacedHost(Host):
    """This machine, with `bench.paced.node` as the program of every component."""

    components = (sys.executable, "-P", str(Path(__file__).with_name("node.py")))


class MacCluster(LocalCluster):
    """A local cluster whose n-th node is paced as the n-th machine."""

    def __init__(
        self, folder: Path, machines: Sequence[str], pace: Pace, model: Path | None, network: Network | None
    ) -> None:
        settings: dict[str, dict[str, Any]] = {
            "gateway": dict(_UNLIMITED, key_requests_at_once=100_000),
            "node": {"memory_limit": _MEMORY},
        }
        if model is None:
            model = random_model(dataclasses.replace(TINY, layers=2 * len(machines)))
        super().__init__(folder, model, nodes=len(machines), name=NAME, settings=settings, host=PacedHost())
        spaces = network.spaces if network is not None else [""] * len(machines)
        self._network = network
        self._paces = {
            name: dataclasses.replace(pace, machine=machine, space=space)
            for name, machine, space in zip(self.node_names, machines, spaces, strict=True)
        }

    def _environment(self, name: str) -> dict[str, str]:
        pace = self._paces.get(name)
        return {PACE: json.dumps(asdict(pace))} if pace is not None else {}

    def address(self, name: str) -> str:
        if self._network is None or name.startswith("gateway"):  # without TLS on loopback alone
            return super().address(name)
        return f"{self._host_of(name)}:{self.ports[name]}"

    def settings_of(self, name: str) -> dict[str, Any]:
        found = super().settings_of(name)
        if self._network is not None and name in self.node_names:
            found["ring_host"] = self._host_of(name)
        return found

    def _host_of(self, name: str) -> str:
        assert self._network is not None
        if name in self.node_names:
            return self._network.hosts[self.node_names.index(name)]
        return self._network.host


@dataclass(frozen=True)
class Cost:
    """Seconds of all engines of a cluster until a moment, as `engine.Cost`."""

    busy: float
    own: float
    late: float
    steps: int

    @classmethod
    def read(cls, folder: Path) -> Cost:
        found = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        return cls(*(sum(one[name] for one in found) for name in ("busy", "own", "late", "steps")))

    def since(self, before: Cost) -> Cost:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return Cost(*(now - then for now, then in pairs))

    @property
    def share(self) -> float:
        """This machine's own part of the paced time: processor time and lateness."""
        return (self.own + self.late) / self.busy if self.busy else 0.0


@dataclass(frozen=True)
class Macs:
    """A cluster that serves."""

    made: MacCluster
    reports: Path
    network: str
    """What its results say of the links."""

    @property
    def url(self) -> str:
        return self.made.http_url

    def cost(self) -> Cost:
        return Cost.read(self.reports)


@asynccontextmanager
async def macs(
    machines: Sequence[str], pace: Pace, spec: dict[str, Any], model: Path | None = None
) -> AsyncIterator[Macs]:
    """A ring of these machines that serves `NAME`, by default with a tiny model.

    Raises DeadlineExceeded, Unavailable.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sealring-macs-") as folder,
        network(len(machines) if pace.namespaces else 0, _delay(pace)) as links,
    ):
        reports = Path(folder) / "reports"
        reports.mkdir()
        pace = dataclasses.replace(pace, reports=str(reports), shaped=links is not None and links.shaped)
        made = MacCluster(Path(folder) / "cluster", machines, pace, model, links)
        async with made:
            await made.start()
            stages = {} if "split" in spec else {"stages": len(machines)}
            await made.deploy(replicas=1, **stages, **spec)
            yield Macs(made, reports, links.words if links is not None else WITHOUT)


def _delay(pace: Pace) -> float:
    """Seconds one way."""
    return figures().links[pace.link].seconds * pace.slower if pace.link else 0.0
