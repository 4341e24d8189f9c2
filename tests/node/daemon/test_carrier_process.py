"""How a daemon lets its carrier in: by knocking at a port until somebody listens there."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from typing import Any

import pytest
from patience import until

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, SealringError
from sealring.mesh.rpc import to_problem
from sealring.mesh.system.starting import Starts
from sealring.node.daemon import carrier_process
from sealring.node.daemon.carrier_process import CarrierProcess, LinkFigures, knock
from sealring.v1 import engine_pb2


class Silent:
    """Connections to a port that drops those who come before somebody listens, as a Mac's."""

    def __init__(self, until: int, port: int = 4242) -> None:
        self.until, self.port, self.attempts = until, port, 0
        self.closed = 0

    def __call__(self) -> Silent:
        self.attempts += 1
        return self

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1

    def setblocking(self, flag: bool) -> None:
        assert flag is False

    def connect_ex(self, address: tuple[str, int]) -> int:
        assert address == ("127.0.0.1", self.port)
        return errno.EINPROGRESS

    def getpeername(self) -> tuple[str, int]:
        if self.attempts < self.until:
            raise OSError(errno.ENOTCONN, "not connected")
        return ("127.0.0.1", self.port)


async def test_a_knock_that_is_not_answered_at_once_is_repeated() -> None:
    silent = Silent(until=5)
    knocking = asyncio.create_task(knock(4242, seconds=200.0, pause=0.0, connection=silent))
    await until(lambda: silent.attempts >= 5)
    for _ in range(20):
        await asyncio.sleep(0)
    assert (silent.attempts, silent.closed) == (5, 4), "it stays when it was let in"
    knocking.cancel()
    await asyncio.wait((knocking,))
    assert silent.closed == 5


async def test_a_knock_finds_who_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        knocking = asyncio.create_task(knock(held.getsockname()[1]))
        await asyncio.sleep(0)
        held.listen()
        held.setblocking(False)
        visitor, _ = await asyncio.get_running_loop().sock_accept(held)
        knocking.cancel()
        await asyncio.wait((knocking,))
        with visitor:
            assert await asyncio.get_running_loop().sock_recv(visitor, 1) == b""


@pytest.mark.parametrize(("port", "knocks"), [(-1, 0), (0, 0), (1, 1), (65535, 1), (65536, 0)])
async def test_nobody_knocks_where_there_is_no_port(port: int, knocks: int) -> None:
    silent = Silent(until=1, port=port)
    knocking = asyncio.create_task(knock(port, pause=0.0, connection=silent))
    for _ in range(5):
        await asyncio.sleep(0)
    assert knocking.done() == (not knocks)
    knocking.cancel()
    await asyncio.wait((knocking,))
    assert silent.attempts == knocks


async def test_a_knock_is_given_up_after_a_while() -> None:
    silent = Silent(until=10**9)
    await knock(4242, seconds=0.001, pause=0.0, connection=silent)
    assert silent.closed == silent.attempts


async def test_a_carrier_that_did_not_start_takes_no_orders() -> None:
    """Its epoch ends with a reason, and no step waits for it."""
    carrier = CarrierProcess(lambda error: None)
    with pytest.raises(EpochEnded) as ended:
        carrier.give(engine_pb2.StartCarrier())
    with pytest.raises(EpochEnded):
        await carrier.look()
    assert (ended.value.reason, carrier.pid) == ("CHILD_ENDED", 0)


class Script:
    """A carrier's process and its liveness: keeps commands and pings, and sends a test's events."""

    pid = 7

    def __init__(self) -> None:
        self.commands: list[engine_pb2.CarrierCommand] = []
        self.pings: list[Any] = []
        self.ended: Any = None
        self.frozen: Any = None
        self._hear: Any = None

    async def spawn(self, name: str, arguments: Any, *, on_message: Any, on_end: Any, **more: Any) -> Any:
        self._hear, self.ended = on_message, on_end
        self.says(ready=engine_pb2.CarrierReady())
        return self

    def liveness(self, child: Any, ping: Any, on_frozen: Any) -> Any:
        self.frozen = on_frozen
        return Liveness(self)

    def says(self, **event: Any) -> None:
        self._hear(engine_pb2.CarrierEvent(**event).SerializeToString())

    def send(self, command: bytes) -> None:
        self.commands.append(engine_pb2.CarrierCommand.FromString(command))

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


class Liveness:
    """Keeps the pings."""

    def __init__(self, script: Script) -> None:
        self._script = script

    def watch(self, *, interval: float, deadline: float) -> None:
        self._script.pings.append((interval, deadline))

    def look(self) -> None: ...

    def stop(self) -> None: ...


class Bench:
    """A carrier over a script."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.script = Script()
        self.carrier: Any = None

    async def start(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.carrier = await CarrierProcess.start(
                (),
                listener,
                folder=folder,
                on_fault=lambda error: self.faults.append(error.reason),
                spawn=self.script.spawn,
                watch=self.script.liveness,
            )

    def says(self, **event: Any) -> None:
        self.script.says(**event)

    async def asked(self, work: Any, commands: int = 1) -> asyncio.Task[Any]:
        """The work, once it has sent `commands` commands."""
        task = asyncio.create_task(work)
        wanted = len(self.script.commands) + commands
        await until(lambda: len(self.script.commands) >= wanted)
        return task


@pytest.fixture
async def bench(tmp_path: Path) -> Bench:
    bench = Bench()
    await bench.start(tmp_path)
    return bench


async def test_the_first_carrier_of_a_daemon_may_take_longer_to_start(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrier_process, "_STARTS", Starts("carrier", 0.0))
    await bench.start(tmp_path)
    monkeypatch.setattr(bench.script, "says", lambda **_: None)
    with pytest.raises(DeadlineExceeded, match="took longer than 0 s"):
        await bench.start(tmp_path)


async def test_pings_begin_when_the_ring_is_formed(bench: Bench) -> None:
    forming = await bench.asked(bench.carrier.form(200.0))
    assert bench.script.pings == []
    bench.says(knock=engine_pb2.Knock(port=0))
    bench.says(up=engine_pb2.CarrierUp())
    await forming
    assert bench.script.pings == [(1.0, 8.0)]


async def test_keys_are_installed_when_the_carrier_has_executed_that(bench: Bench) -> None:
    installing = await bench.asked(bench.carrier.install(b"keys", outgoing=True, at_step=5), commands=2)
    install, ping = bench.script.commands
    assert (install.install.keys, install.install.outgoing, install.install.at_step) == (b"keys", True, 5)
    bench.says(pong=engine_pb2.CarrierPong(sequence=1))
    await asyncio.sleep(0)
    assert not installing.done(), "the answer to another ping"
    bench.says(pong=engine_pb2.CarrierPong(sequence=ping.ping.sequence))
    await installing


async def test_figures_are_the_newest_and_those_of_before_where_none_come(bench: Bench) -> None:
    looking = await bench.asked(bench.carrier.look())
    sequence = bench.script.commands[-1].ping.sequence
    assert sequence > 1 << 32, "no number of a ping that liveness sends"
    pong = engine_pb2.CarrierPong(sequence=sequence, records_sealed=7, records_opened=6, waiting_ms=5)
    bench.says(pong=pong)
    assert await looking == LinkFigures(7, 6, 5)
    assert await bench.carrier.look(0.0) == LinkFigures(7, 6, 0), "nobody knows whether it waits"


async def test_who_wants_new_keys_says_for_which_link(bench: Bench) -> None:
    bench.says(rekey=engine_pb2.RekeyWanted(outgoing=True))
    assert bench.carrier.rekey_wanted(outgoing=True).is_set()
    assert not bench.carrier.rekey_wanted(outgoing=False).is_set()


@pytest.mark.parametrize("how", ["frozen", "ended", "says"])
async def test_a_fault_is_told_once_and_ends_what_is_waited_for(bench: Bench, how: str) -> None:
    waiting = await bench.asked(bench.carrier.trace(0))
    if how == "says":
        bench.says(fault=engine_pb2.CarrierFault(problem=to_problem(EpochEnded("x", reason="LINK_LOST"))))
    else:
        getattr(bench.script, how)()
    reason = {"frozen": "CARRIER_FROZEN", "ended": "CHILD_ENDED", "says": "LINK_LOST"}[how]
    with pytest.raises(SealringError) as ended:
        await waiting
    bench.script.ended()
    assert (ended.value.reason, bench.faults) == (reason, [reason])


async def test_who_stops_a_carrier_hears_no_fault_of_it(bench: Bench) -> None:
    await bench.carrier.stop()
    bench.script.ended()
    assert bench.faults == []
