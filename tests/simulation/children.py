"""The child processes of one simulated machine: engines and carriers, behind the seam `Child.spawn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath

from simulatedcarrier import SimulatedCarrier
from simulatedchild import SimulatedChild
from simulateddisk import PrefixDisk
from simulatedengine import SimulatedEngine
from simulatedmodel import SimulatedModel
from wires import Wires

from sealring.mesh.errors import SealringError
from sealring.node.wire.channel import RecordHeader

FIRST_PID = 1 << 30
"""Above the process ids of any system."""


@dataclass(frozen=True)
class LoadFault:
    """What happens to a load: it takes `factor` times as long, then fails with an error, or its process is
    killed."""

    factor: float = 1.0
    error: Exception | None = None
    killed: bool = False


class Channel:
    """The data channel between engine and carrier of an epoch."""

    def __init__(self) -> None:
        self._engine: SimulatedEngine | None = None
        self._carrier: SimulatedCarrier | None = None
        self._waiting: list[Callable[[SimulatedCarrier], None]] = []
        self._over = False

    def bind(self, carrier: SimulatedCarrier) -> None:
        """The carrier has its end."""
        self._carrier = carrier
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            carrier.child.do(partial(work, carrier))

    def open(self, engine: SimulatedEngine) -> None:
        """The engine has its end."""
        self._engine = engine
        if self._over:
            self.carrier_gone()

    def send(self, header: RecordHeader, payload: bytes) -> None:
        self._tell(lambda carrier: carrier.send(header, payload))

    def expect(self, headers: Sequence[RecordHeader]) -> None:
        for header in headers:
            self._tell(partial(_expect, header=header))

    def deliver(self, header: RecordHeader, payload: bytes) -> None:
        """A record has arrived for the engine."""
        if self._engine is not None:
            self._engine.child.do(partial(self._engine.arrived, self, header, payload))

    def shut(self) -> None:
        """The engine closes its end."""
        self._engine = None
        self._tell(lambda carrier: carrier.shut())

    def carrier_gone(self) -> None:
        self._over = True
        if self._engine is not None:
            self._engine.child.do(partial(self._engine.channel_closed, self))

    def _tell(self, work: Callable[[SimulatedCarrier], None]) -> None:
        if self._carrier is None:
            self._waiting.append(work)
        else:
            self._carrier.child.do(partial(work, self._carrier))


def _expect(carrier: SimulatedCarrier, header: RecordHeader) -> None:
    carrier.expect(header)


class Children:
    """The children of one machine, alive or not; its daemon may start anew.

    `load` befalls the next loads, `step_error` the next step, and all steps take `slowness` times as long.
    Without `signs` its engines say nothing that could be signed.
    """

    def __init__(
        self,
        host: str,
        wires: Wires,
        models: Sequence[SimulatedModel],
        *,
        memory: int = 1 << 34,
        rekey_records: int = 1 << 30,
        disk: PrefixDisk | None = None,
    ) -> None:
        """`memory` is what the machine's device holds, in bytes. A carrier wants new keys after this number
        of records. Without a disk no prefixes are stored."""
        self.host, self.wires, self.memory, self.rekey_records = host, wires, memory, rekey_records
        self.models: Mapping[str, SimulatedModel] = {model.name: model for model in models}
        self.disk = disk
        self.load = LoadFault()
        self.step_error: SealringError | None = None
        self.slowness = 1.0
        self.signs = True
        self.alive: list[SimulatedChild] = []
        self._channels: dict[tuple[str, int], Channel] = {}
        self._spawned = 0

    async def spawn(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        on_message: Callable[[bytes], None],
        on_end: Callable[[], None],
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> SimulatedChild:
        """As `Child.spawn`."""
        self._spawned += 1
        child = SimulatedChild(name, FIRST_PID + self._spawned, on_message, on_end)
        if name == "engine":
            child.program = SimulatedEngine(child, self, descriptors[0])
        else:
            child.program = SimulatedCarrier(child, self, descriptors[-1])
        self.alive = [one for one in self.alive if one.status is None]
        self.alive.append(child)
        child.program.begin()
        return child

    @property
    def memory_used(self) -> int:
        """Bytes that all its engines hold."""
        programs = [child.program for child in self.named("engine")]
        return sum(one.memory for one in programs if isinstance(one, SimulatedEngine))

    def named(self, name: str) -> list[SimulatedChild]:
        """The engines or the carriers that are alive, oldest first."""
        return [one for one in self.alive if one.name == name and one.status is None]

    def model(self, path: str) -> SimulatedModel | None:
        """The model in a folder."""
        return self.models.get(PurePath(path).name)

    def channel(self, ring: str, epoch: int) -> Channel:
        """The data channel of an epoch; the last ones are kept."""
        key = ring, epoch
        if key not in self._channels:
            for old in [one for one in self._channels if one[0] == ring and one[1] + 8 < epoch]:
                del self._channels[old]
            self._channels[key] = Channel()
        return self._channels[key]

    def orphan(self) -> None:
        """The daemon was killed: its children end, and the machine closes their connections. To be called in
        the context of another process."""
        alive, self.alive = self.alive, []
        for child in alive:
            child.crash(0)

    def power_off(self) -> None:
        """The machine loses its power."""
        for child in self.alive:
            child.vanish()
        self.alive = []
        self._channels.clear()
