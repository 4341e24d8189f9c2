"""The daemon's side of a carrier process: one epoch, one life."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, SealringError
from sealring.mesh.rpc.problem import from_problem
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.networks import own_addresses, sources_towards
from sealring.mesh.system.starting import Starts
from sealring.node.carrier.ways import MAX_WAYS
from sealring.node.daemon.supervisor import Child, Liveness, Spawn, child_ended, within
from sealring.v1 import control_pb2, engine_pb2, trace_pb2

log = structlog.get_logger()

CARRIER_MODULE = "sealring.node.carrier.main"

_TIMEOUT = "CARRIER_TIMEOUT"
_STARTS = Starts("carrier", 30.0)
_UP_GRACE_SECONDS = 2.0
_PING_INTERVAL = 1.0
_PING_DEADLINE = 8.0
_INSTALL_SECONDS = 5.0
_KNOCK_SECONDS = 10.0
_KNOCK_PAUSE = 0.005
_TRACE_SECONDS = 5.0
_REAP_SECONDS = 5.0
_LOOK_SECONDS = 0.5
_OWN_NUMBERS = 1 << 32
"""The first number of the daemon's own pings, above those of `Liveness`, so that answers do not mix."""


@dataclass(frozen=True)
class LinkFigures:
    """Records of this epoch: sent, including one under way, and received.

    `waiting_ms` is the time without a byte of the record that is due; 0 while none is due or it is unknown.
    """

    sent: int = 0
    received: int = 0
    waiting_ms: int = 0


class CarrierProcess:
    """One carrier process. `on_fault` receives its first fault."""

    def __init__(self, on_fault: Callable[[SealringError], None]) -> None:
        self._on_fault: Callable[[SealringError], None] | None = on_fault
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._up: asyncio.Future[engine_pb2.CarrierUp] = loop.create_future()
        self._rekey_outgoing, self._rekey_incoming = asyncio.Event(), asyncio.Event()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._asked = _OWN_NUMBERS
        self._figures = LinkFigures()
        self._knocking: asyncio.Task[None] | None = None
        self._child: Child | None = None
        self._liveness: Liveness | None = None

    @classmethod
    async def start(
        cls,
        channel: tuple[int, ...],
        listener: socket.socket,
        *,
        folder: Path,
        on_fault: Callable[[SealringError], None],
        spawn: Spawn = Child.spawn,
        watch: Callable[..., Liveness] = Liveness,
    ) -> CarrierProcess:
        """Spawns a carrier with its ends of the data channel and waits until it is ready.

        `listener` is the socket on which the previous member is awaited. The caller closes its own copies.
        `folder` takes the carrier's temporary files. Raises EpochEnded, DeadlineExceeded, OSError.
        """
        carrier = cls(on_fault)
        try:
            carrier._child = await spawn(
                "carrier",
                [
                    *("-m", CARRIER_MODULE),
                    *("--channel-fds", ",".join(map(str, channel))),
                    *("--listen-fd", str(listener.fileno())),
                ],
                on_message=carrier._message,
                on_end=carrier._ended,
                descriptors=(*channel, listener.fileno()),
                environment={"TMPDIR": str(folder)},
            )
            carrier._liveness = watch(carrier._child, _ping, carrier._frozen)
            carrier._liveness.look()
            await within(carrier._ready, _STARTS.allowed(), "the start of a carrier", _TIMEOUT)
            _STARTS.ready()
        except BaseException:
            await carrier.stop()
            raise
        return carrier

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    def give(self, start: engine_pb2.StartCarrier) -> None:
        """Sends rank, address and link keys; the caller forgets the keys. Raises EpochEnded.

        Before the group is formed, a later call replaces the fields that it sets.

        `next_address` may name several addresses, separated by commas: the carrier takes the fastest.
        """
        if start.next_address:
            start.ways.extend(ways_to(start.next_address.split(",")))
        self._send(engine_pb2.CarrierCommand(start=start))

    async def form(self, seconds: float) -> None:
        """Forms the MLX group and confirms both links. The carrier cannot answer pings meanwhile.

        Raises EpochEnded, DeadlineExceeded, or the carrier's error.
        """
        self._send(engine_pb2.CarrierCommand(form=engine_pb2.FormGroup()))
        try:
            await within(self._up, seconds + _UP_GRACE_SECONDS, "the forming of the ring", _TIMEOUT)
        finally:
            if self._knocking is not None:
                self._knocking.cancel()
        assert self._liveness is not None
        self._liveness.watch(interval=_PING_INTERVAL, deadline=_PING_DEADLINE)

    @property
    def taken(self) -> engine_pb2.CarrierUp:
        """The way over which it sends, once the group is formed."""
        return self._up.result() if self._up.done() else engine_pb2.CarrierUp()

    def rekey_wanted(self, *, outgoing: bool) -> asyncio.Event:
        """Set when the carrier wants new keys for a link."""
        return self._rekey_outgoing if outgoing else self._rekey_incoming

    async def install(self, keys: bytes, *, outgoing: bool, at_step: int) -> None:
        """Sends a link's next keys; returns when the carrier has them. Raises EpochEnded."""
        install = engine_pb2.InstallKeys(outgoing=outgoing, keys=keys, at_step=at_step)
        self._send(engine_pb2.CarrierCommand(install=install))
        # commands are executed in order, so the answer to a ping is an answer to both
        await self._ask(_ping, _INSTALL_SECONDS, "the taking over of keys")

    async def look(self, seconds: float = _LOOK_SECONDS) -> LinkFigures:
        """The current figures. If the carrier is slow to answer: its last counts, and no waiting.

        Raises EpochEnded.
        """
        try:
            await self._ask(_ping, seconds, "a look at the links")
        except DeadlineExceeded:
            return dataclasses.replace(self._figures, waiting_ms=0)
        return self._figures

    async def trace(self, since: int) -> trace_pb2.ProcessTrace:
        """The carrier's activities since `since` (monotonic ns). Raises EpochEnded, DeadlineExceeded."""

        def command(number: int) -> bytes:
            take = engine_pb2.TakeTrace(id=number, since=since)
            return engine_pb2.CarrierCommand(trace=take).SerializeToString()

        taken: trace_pb2.ProcessTrace = await self._ask(command, _TRACE_SECONDS, "the trace of a carrier")
        return taken

    async def _ask(self, command: Callable[[int], bytes], seconds: float, what: str) -> Any:
        """Sends a numbered command and waits for its answer."""
        self._asked += 1
        number = self._asked
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._send_raw(command(number))
            return await within(self._answers[number], seconds, what, _TIMEOUT)
        finally:
            del self._answers[number]

    async def stop(self) -> None:
        """Kills the process and reaps it; safe to call again.

        A process that cannot die (in a frozen control group) is left behind: the next epoch does not need it.
        """
        self._on_fault = None
        if self._liveness is not None:
            self._liveness.stop()
        if self._knocking is not None:
            self._knocking.cancel()
        for future in (self._ready, self._up):
            if not future.done():
                future.cancel()
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_SECONDS):
                    await self._child.stop()

    def _send(self, command: engine_pb2.CarrierCommand) -> None:
        self._send_raw(command.SerializeToString())

    def _send_raw(self, command: bytes) -> None:
        if self._child is None:
            raise child_ended("carrier")
        self._child.send(command)

    def _message(self, body: bytes) -> None:
        event = engine_pb2.CarrierEvent.FromString(body)
        kind = event.WhichOneof("event")
        if kind == "ready":
            _resolve(self._ready)
        elif kind == "up":
            _resolve(self._up, event.up)
        elif kind == "fault":
            self._fault(from_problem(event.fault.problem))
        elif kind == "pong":
            self._pong(event.pong)
        elif kind == "knock" and self._knocking is None:
            self._knocking = asyncio.get_running_loop().create_task(knock(event.knock.port))
        elif kind == "trace":
            self._answer(event.trace.id, event.trace.trace)
        elif kind == "rekey":
            self.rekey_wanted(outgoing=event.rekey.outgoing).set()

    def _pong(self, pong: engine_pb2.CarrierPong) -> None:
        self._figures = LinkFigures(pong.records_sealed, pong.records_opened, pong.waiting_ms)
        self._answer(pong.sequence)

    def _answer(self, number: int, answer: object = None) -> None:
        if number in self._answers:
            _resolve(self._answers[number], answer)

    def _frozen(self) -> None:
        self._fault(
            EpochEnded(
                "the carrier process does not answer",
                hint="see the node's log; the ring is formed anew",
                reason="CARRIER_FROZEN",
            )
        )

    def _ended(self) -> None:
        self._fault(child_ended("carrier"))

    def _fault(self, error: SealringError) -> None:
        on_fault, self._on_fault = self._on_fault, None
        futures: tuple[asyncio.Future[Any], ...] = (self._ready, self._up, *self._answers.values())
        for future in futures:
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as read: nobody may await it
        if on_fault is not None:
            on_fault(error)


def ways_to(addresses: Sequence[str]) -> list[engine_pb2.RingWay]:
    """The ways to a neighbour's ring addresses: to each from every own address that shares a network with it.

    What is in no network of this machine is left to the routes, and left out where there are others: a
    neighbour has nobody call strangers.
    """
    own = own_addresses()
    ways = [
        engine_pb2.RingWay(address=address, source=source)
        for address in addresses
        for source in sources_towards(parse_address(address)[0], own)
    ]
    return ways[:MAX_WAYS] or [engine_pb2.RingWay(address=addresses[0])]


def _resolve(future: asyncio.Future[Any], answer: object = None) -> None:
    if not future.done():
        future.set_result(answer)


async def knock(
    port: int,
    *,
    seconds: float = _KNOCK_SECONDS,
    pause: float = _KNOCK_PAUSE,
    connection: Any = socket.socket,
) -> None:
    """Connects to a loopback port as soon as MLX listens there, and stays connected until it is cancelled.

    The carrier holds the port before MLX listens. Linux answers a connection then with a reset; macOS drops
    it, and the kernel retries a second later. Hence each attempt is short: on loopback a connection succeeds
    at once or not at all.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while 0 < port < 65536 and loop.time() < until:
        with connection() as visitor:
            visitor.setblocking(False)
            visitor.connect_ex(("127.0.0.1", port))
            await asyncio.sleep(pause)
            if _is_connected(visitor):
                await loop.create_future()


def _is_connected(visitor: socket.socket) -> bool:
    try:
        visitor.getpeername()
    except OSError:
        return False
    return True


def _ping(sequence: int) -> bytes:
    return engine_pb2.CarrierCommand(ping=control_pb2.Ping(sequence=sequence)).SerializeToString()
