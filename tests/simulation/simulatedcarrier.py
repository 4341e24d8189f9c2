"""The double of a carrier process: real links with real keys, over the connections of `Wires`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from simulatedchild import SimulatedChild
from wires import Pipe

from sealring.mesh.crypto import TAG_BYTES
from sealring.mesh.errors import EpochEnded, SealringError, Unavailable
from sealring.mesh.rpc import to_problem
from sealring.mesh.system.addresses import parse_address
from sealring.node.link.keys import SessionKeys
from sealring.node.link.records import Link
from sealring.node.wire.channel import RecordHeader
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import trace_pb2

if TYPE_CHECKING:
    from children import Channel, Children

_START_SECONDS = 0.3
_GROUP_SECONDS = 0.05
_GUEST_SECONDS = 3.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_HALF_PASS_BYTES = 32


class SimulatedCarrier:
    """One carrier: what `node/carrier` does, one event after the other."""

    def __init__(self, child: SimulatedChild, children: Children, listener: int) -> None:
        """`listener` is the descriptor of the socket whose address the previous member is given."""
        self.child = child
        self.host = children.host
        self.sealed = self.opened = 0
        self._children, self._wires = children, children.wires
        self._held = os.dup(listener)
        with socket.socket(fileno=os.dup(listener)) as bound:
            self._address: tuple[str, int] = bound.getsockname()[:2]
        self._start: engine.StartCarrier | None = None
        self._channel: Channel | None = None
        self._outgoing: Link | None = None
        self._incoming: Link | None = None
        self._next: Pipe | None = None
        self._previous: Pipe | None = None
        self._calling: Pipe | None = None
        self._callers: list[tuple[Pipe, bytes]] = []
        self._pause = _FIRST_PAUSE
        self._confirmation = self._confirmed = b""
        self._met = self._up = self._cut = False
        self._to_seal: deque[tuple[RecordHeader, bytes]] = deque()
        self._expected: deque[RecordHeader] = deque()
        self._arrived: deque[bytes] = deque()
        self._waiting_since = 0.0
        self._used = {True: 0, False: 0}  # records since the newest keys, of the outgoing link and the other

    def begin(self) -> None:
        self._wires.listeners[self._address] = self
        self.child.later(_START_SECONDS, lambda: self._says(ready=engine.CarrierReady()))

    def gone(self) -> None:
        for pipe in (self._calling, self._next):
            if pipe is not None:
                pipe.write(b"")
        for pipe in (self._previous, *(pipe for pipe, _ in self._callers)):
            if pipe is not None:
                pipe.shut = True
        if self._channel is not None:
            self._channel.carrier_gone()
        self._close()

    def vanish(self) -> None:
        for pipe in (self._calling, self._next):
            if pipe is not None:
                pipe.vanish()
        self._close()

    def _close(self) -> None:
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        if self._wires.listeners.get(self._address) is self:
            del self._wires.listeners[self._address]

    # Commands

    def take(self, body: bytes) -> None:
        command = engine.CarrierCommand.FromString(body)
        kind = command.WhichOneof("command")
        try:
            if kind == "start":
                self._take_start(command.start)
            elif kind == "form":
                self._form()
            elif kind == "install":
                self._install(command.install)
            elif kind == "ping":
                waits = self._up and self._expected and not self._arrived
                waiting = asyncio.get_running_loop().time() - self._waiting_since if waits else 0.0
                self._says(
                    pong=engine.CarrierPong(
                        sequence=command.ping.sequence,
                        records_sealed=self.sealed,
                        records_opened=self.opened,
                        waiting_ms=int(1000 * waiting),
                    )
                )
            elif kind == "trace":
                taken = engine.TraceTaken(id=command.trace.id, trace=trace_pb2.ProcessTrace())
                self._says(trace=taken)
            elif kind == "shutdown":
                self.child.exit(0)
        except SealringError as error:
            self.fault(error)

    def _take_start(self, start: engine.StartCarrier) -> None:
        if self._start is None:
            self._start = start
            context = SessionKeys.from_carrier(start.outgoing_keys).context
            self._channel = self._children.channel(context.ring, context.epoch)
            self._channel.bind(self)
        else:
            self._start.MergeFrom(start)

    def _install(self, install: engine.InstallKeys) -> None:
        link = self._outgoing if install.outgoing else self._incoming
        if self._up and link is not None:
            link.install(SessionKeys.from_carrier(install.keys), install.at_step)
            self._used[install.outgoing] = 0

    def fault(self, error: SealringError) -> None:
        """Reports a fault and ends."""
        self._says(fault=engine.CarrierFault(problem=to_problem(error)))
        self.child.exit(1)

    def _says(self, **event: object) -> None:
        self.child.says(engine.CarrierEvent(**event).SerializeToString())

    # Forming: calls the next member, and is called by the previous one

    def _form(self) -> None:
        start = self._start
        if start is None:
            raise EpochEnded("the carrier got the command to form a group before it was started")
        context = SessionKeys.from_carrier(start.outgoing_keys).context
        self._wires.forming(self.host, context.ring, context.epoch)
        clock = asyncio.get_running_loop().time
        self._outgoing = Link(SessionKeys.from_carrier(start.outgoing_keys), clock=clock)
        self._incoming = Link(SessionKeys.from_carrier(start.incoming_keys), clock=clock)
        self._confirmation = self._outgoing.sealer.seal_confirmation()
        self.child.later(start.form_timeout_ms / 1000, self._out_of_time)
        callers, self._callers = self._callers, []
        for pipe, greeting in callers:
            self._greet(pipe, greeting)
        self._call()

    def _call(self) -> None:
        if self._next is not None or self._met or self._start is None:
            return
        for way in self._ways():
            listener = self._wires.listener(parse_address(way))
            if listener is not None:
                greeting = self._start.outgoing_pass[:_HALF_PASS_BYTES] + self._confirmation
                self._calling = pipe = Pipe(self._wires, self, listener)
                self._wires.send(self.host, listener.host, partial(listener.called, pipe, greeting))
                self.child.later(_GUEST_SECONDS, partial(self._give_up, pipe))
                return
        self._call_again()

    def _ways(self) -> list[str]:
        assert self._start is not None
        return [way.address for way in self._start.ways] or [self._start.next_address]

    def _call_again(self) -> None:
        self._calling = None
        self.child.later(self._pause, self._call)
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)

    def _give_up(self, pipe: Pipe) -> None:
        if self._calling is pipe and self._next is None:
            self._call_again()

    def called(self, pipe: Pipe, greeting: bytes) -> None:
        """Somebody calls; runs in the context of this host."""
        if self.child.status is not None or self._met:
            self._wires.send(self.host, pipe.caller.host, partial(pipe.caller.refused, pipe))
        else:
            self.child.do(partial(self._greet, pipe, greeting))

    def _greet(self, pipe: Pipe, greeting: bytes) -> None:
        start = self._start
        if self._incoming is None or start is None:
            self._callers.append((pipe, greeting))
            return
        if self._met or greeting[:_HALF_PASS_BYTES] != start.incoming_pass[:_HALF_PASS_BYTES]:
            self._wires.send(self.host, pipe.caller.host, partial(pipe.caller.refused, pipe))
            return
        confirmation = greeting[_HALF_PASS_BYTES:]
        if not self._confirmed:
            try:
                self._incoming.opener.open_confirmation(confirmation)
            except SealringError as error:
                self._wires.note(f"{self.host} and {pipe.caller.host} have different keys for their link")
                self.fault(error)
                return
            self._confirmed = confirmation
        elif confirmation != self._confirmed:
            self._wires.send(self.host, pipe.caller.host, partial(pipe.caller.refused, pipe))
            return
        if self._previous is not None:
            self._previous.shut = True
        self._previous = pipe
        answer = start.incoming_pass[_HALF_PASS_BYTES:]
        self._wires.send(self.host, pipe.caller.host, partial(pipe.caller.answered, pipe, answer))
        self._meet()

    def refused(self, pipe: Pipe) -> None:
        """Nobody listens there, or does not know the pass; runs in the context of this host."""
        self.child.do(partial(self._give_up, pipe))

    def answered(self, pipe: Pipe, answer: bytes) -> None:
        """The next member knows the pass; runs in the context of this host."""

        def taken() -> None:
            start = self._start
            if start is None or self._calling is not pipe or self._next is not None:
                return
            if answer != start.outgoing_pass[_HALF_PASS_BYTES:]:
                self._give_up(pipe)
                return
            self._calling, self._next = None, pipe
            self._meet()

        self.child.do(taken)

    def _meet(self) -> None:
        if self._next is not None and self._previous is not None and not self._met:
            self._met = True
            self.child.later(_GROUP_SECONDS, self._formed)

    def _formed(self) -> None:
        assert self._next is not None
        assert self._previous is not None
        if self._cut or self._previous.ended:
            self.fault(_lost())
            return
        self._up = True
        self._waiting_since = asyncio.get_running_loop().time()
        up = engine.CarrierUp()
        host, port = self._next.listener.address
        up.way.address = f"{host}:{port}"
        self._says(up=up)
        self._seal_all()
        self._open_all()

    @property
    def address(self) -> tuple[str, int]:
        """The address at which it listens."""
        return self._address

    def _out_of_time(self) -> None:
        if self._met:
            return
        if self._previous is None:
            self.fault(EpochEnded("the previous member did not connect", reason="NO_CONFIRMATION"))
        else:
            self.fault(
                Unavailable("the next member does not accept the ring's connection", reason="RING_FAILED")
            )

    # Records

    def send(self, header: RecordHeader, payload: bytes) -> None:
        """Takes a record of the engine."""
        self._to_seal.append((header, payload))
        self._seal_all()

    def expect(self, header: RecordHeader) -> None:
        """The engine expects a record."""
        if not self._expected:
            self._waiting_since = asyncio.get_running_loop().time()
        self._expected.append(header)
        self._open_all()

    def shut(self) -> None:
        """The engine has closed its end of the data channel."""
        self.fault(EpochEnded("the data channel was closed", hint="the epoch is over; a new one is formed"))

    def arrived(self, pipe: Pipe, message: bytes) -> None:
        """Takes what the previous member has sent."""
        pipe.ended = pipe.ended or not message
        if pipe is not self._previous:
            return
        if message:
            self._arrived.append(message)
            self._open_all()
        elif self._up:
            self.fault(_lost())

    def cut(self, pipe: Pipe) -> None:
        """The connection to the next member was reset."""
        if pipe is self._next:
            self._cut = True

    def _seal_all(self) -> None:
        while self._up and self._to_seal and self.child.status is None:
            assert self._outgoing is not None
            assert self._next is not None
            header, payload = self._to_seal.popleft()
            sealed = bytearray(len(payload) + TAG_BYTES)
            try:
                self._outgoing.sealer.seal_into(payload, sealed, header)
                if self._cut:
                    raise _lost()
            except SealringError as error:
                self.fault(error)
                return
            self.sealed += 1
            self._next.write(bytes(sealed))
            self._count(outgoing=True)

    def _open_all(self) -> None:
        while self._up and self._expected and self._arrived and self.child.status is None:
            assert self._incoming is not None
            assert self._channel is not None
            header, sealed = self._expected.popleft(), self._arrived.popleft()
            payload = bytearray(header.length)
            try:
                self._incoming.opener.open_into(sealed, payload, header)
            except SealringError as error:
                self._wires.note(f"{self.host} cannot open a record of step {header.step}: {error.reason}")
                self.fault(error)
                return
            self.opened += 1
            self._waiting_since = asyncio.get_running_loop().time()
            self._channel.deliver(header, bytes(payload))
            self._count(outgoing=False)

    def _count(self, *, outgoing: bool) -> None:
        self._used[outgoing] += 1
        if self._used[outgoing] == self._children.rekey_records:
            self._says(rekey=engine.RekeyWanted(outgoing=outgoing))


def _lost() -> EpochEnded:
    return EpochEnded("the connection to a neighbour on the ring was lost", reason="PEER_LOST")
