"""gRPC without sockets: channels and servers in one process, over a network that a simulation commands.

They behave as those of `grpc.aio`, as far as this product uses them: all four kinds of call, deadlines,
cancellation by either end, status with details, connectivity, back-off, keep-alive, flow control. Messages
arrive later than they are sent, in order within a connection and in any order between two. Machines can be
cut off from each other, in both directions or in one, and processes can end, stand still and go on.

Certificates are looked at as TLS looks at them. Nothing is encrypted, and a caller's key is not proved: the
proofs have tests of their own. Time is the event loop's, and everything random comes from one source.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

import grpc
import grpc.aio
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.pki import TlsMaterial, to_pem
from sealring.mesh.rpc import arity
from sealring.mesh.rpc.transport import Options, ServerHandshakes, transport

WINDOW_BYTES = 64 << 10
"""Unread bytes of one direction of a call, beyond which its writer waits."""

CONNECT_SECONDS = 20.0
"""How long gRPC tries to connect."""

_APART = 1e-6
"""Seconds between two messages of a flow: timers of the same moment run in any order."""

_OK = grpc.StatusCode.OK
_GONE = "Socket closed"
_NOTHING = grpc.aio.Metadata()

process: ContextVar[Process] = ContextVar("process")
"""The process whose code runs."""


class Process:
    """A process of a simulated machine: everything that runs in its context, and nothing else."""

    def __init__(self, name: str, host: str, network: Network) -> None:
        """`host` is the machine's address."""
        self.name, self.host = name, host
        self.ended = self.stands = False
        self.context: Context = copy_context()
        self.context.run(process.set, self)
        self.context.run(transport.set, _InMemory(network))
        network.processes.append(self)


@dataclass
class _Path:
    """The way from one machine to another."""

    cut: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)
    arrived: dict[object, float] = field(default_factory=dict)


class Network:
    """Machines by their addresses, and the ways between them."""

    def __init__(self, random: Random, *, least: float = 0.0002, most: float = 0.003) -> None:
        """A message takes from `least` to `most` seconds; within a machine a tenth of that."""
        self.random = random
        self.least, self.most = least, most
        self.processes: list[Process] = []
        self.off: set[str] = set()
        """Machines without power: what is sent to them is lost."""
        self.attempts: Counter[tuple[Process, str]] = Counter()
        """Connections that a process has tried to make, by their address."""
        self._paths: dict[tuple[str, str], _Path] = {}
        self._listening: dict[str, _Server] = {}
        self._connections: dict[_Connection, None] = {}
        self._ports = 20_000
        self._lagging: tuple[object, float] | None = None

    # Messages

    def send(
        self,
        source: str,
        target: str,
        deliver: Callable[[], object],
        context: Context | None = None,
        flow: object = None,
    ) -> None:
        """Calls `deliver`, in `context`, once a message has come from `source` to `target`. Those of one
        `flow` arrive in order. What is sent while the way is cut arrives when it is mended."""
        path = self._path(source, target)
        if path.cut:
            path.held.append(lambda: self.send(source, target, deliver, context, flow))
            return
        if target in self.off:
            return
        loop = asyncio.get_running_loop()
        takes = self.random.uniform(self.least, self.most) * (0.1 if source == target else 1.0)
        at = now() + takes
        if self._lagging is not None and flow == self._lagging[0]:
            at += self._lagging[1]
        if flow is not None:
            at = max(at, path.arrived.get(flow, 0.0) + _APART)
            path.arrived[flow] = at
        loop.call_at(at, deliver, context=Context() if context is None else context)

    def _path(self, source: str, target: str) -> _Path:
        return self._paths.setdefault((source, target), _Path())

    # Faults

    def cut(self, one: str, other: str, *, both: bool = True) -> None:
        """Nothing from `one` arrives at `other` any more, and nothing back if `both`."""
        for source, target in [(one, other), *([(other, one)] if both else [])]:
            self._path(source, target).cut = True
        self._mute()

    def mend(self, one: str = "", other: str = "") -> None:
        """The ways between two machines are there again, or all; what was sent meanwhile arrives, as by
        TCP."""
        for ends, path in self._paths.items():
            if path.cut and (not one or set(ends) == {one, other}):
                path.cut = False
                held, path.held = path.held, []
                for send in held:
                    send()
        self._heard()

    def lag(self, seconds: float, source: str = "", target: str = "") -> str | None:
        """From now on messages of one connection, in one direction, take these seconds longer; those of all
        others do not. Any connection will do, or one from the machine `source` to `target`. Returns whose
        they are; None if there is no such connection."""
        self._lagging = None
        there = [
            (one, side)
            for one in (self._connections if seconds else ())
            for side in (CLIENT, SERVER)
            if all(one.open)
            and (not source or (one.ends[side].host, one.ends[1 - side].host) == (source, target))
        ]
        if not there:
            return None
        connection, side = self.random.choice(there)
        self._lagging = (connection, side), seconds
        return f"a connection from {connection.ends[side].name} to {connection.ends[1 - side].name}"

    def stand(self, one: Process) -> None:
        """The process stands still: the kernel takes what is sent to it, and nobody reads it."""
        one.stands = True
        self._mute()

    def go_on(self, one: Process) -> None:
        """The process runs again."""
        one.stands = False
        self._heard()

    def end(self, one: Process) -> None:
        """The process has ended; its kernel closes its connections, unless the machine is off."""
        if one.ended:
            return
        one.ended = True
        self.processes.remove(one)
        for address in [each for each, server in self._listening.items() if server.process is one]:
            del self._listening[address]
        for connection in list(self._connections):
            for side in connection.sides_of(one):
                connection.close(side)

    def _mute(self) -> None:
        for connection in list(self._connections):
            connection.look()

    def _heard(self) -> None:
        for connection in list(self._connections):
            connection.heard()

    def passes(self, source: Process, target: Process) -> bool:
        """Whether `target` answers what `source` sends."""
        there, back = self._path(source.host, target.host), self._path(target.host, source.host)
        return not (there.cut or back.cut or target.stands or target.ended or target.host in self.off)

    # Ports

    def listen(self, address: str, server: _Server) -> int:
        """Raises RuntimeError, as gRPC does, if the address is taken."""
        host, _, port = _own(address, server.process).rpartition(":")
        number = int(port) or self._next_port()
        if f"{host}:{number}" in self._listening:
            raise RuntimeError(f"{address} is in use")
        self._listening[f"{host}:{number}"] = server
        return number

    def close(self, server: _Server) -> None:
        """Stops listening."""
        self._listening = {one: each for one, each in self._listening.items() if each is not server}

    def _next_port(self) -> int:
        self._ports += 1
        return self._ports

    def connect(self, channel: _Channel, connected: Callable[[_Connection | None], None]) -> None:
        """Calls `connected` in the channel's process, with None if nobody listens or TLS fails; does not call
        it while no answer comes."""
        client = channel.process
        address = _own(channel.address, client)
        host = address.rpartition(":")[0]
        self.attempts[client, address] += 1
        source = f"{client.host}:{self._next_port()}"
        server = self._listening.get(address)
        if server is None:
            self.send(
                client.host,
                host,
                lambda: self.send(host, client.host, lambda: connected(None), client.context),
            )
            return

        def accept() -> None:
            made = None
            if self._listening.get(address) is server and server.takes(channel):
                made = _Connection(self, channel, server, source)
                self._connections[made] = None
            self.send(host, client.host, lambda: connected(made), client.context, made)

        self.send(client.host, host, accept, server.process.context)

    async def leaf(self, client: Process, host: str, port: int) -> bytes | None:
        """The certificate of what listens there. Raises ConnectionRefusedError; waits while none answers."""
        told: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

        def answer() -> None:
            server = self._listening.get(_own(f"{host}:{port}", client))
            own = server.certificate if server is not None else None

            def tell() -> None:
                if not told.done():
                    told.set_result(own)

            self.send(host, client.host, tell, client.context)

        server = self._listening.get(_own(f"{host}:{port}", client))
        self.send(client.host, host, answer, server.process.context if server is not None else None)
        found = await told
        if found is None:
            raise ConnectionRefusedError
        return found

    def forget(self, connection: _Connection) -> None:
        """Both ends are closed."""
        self._connections.pop(connection, None)


def _own(address: str, one: Process) -> str:
    """The address as another machine would name it: each has a loopback of its own."""
    host, _, port = address.rpartition(":")
    return f"{one.host}:{port}" if host in ("127.0.0.1", "0.0.0.0") else address


def now() -> float:
    """The loop's time; that of the machine's own clock may differ."""
    return asyncio.get_running_loop().time()


class _InMemory:
    """The transport of a process."""

    watches = False

    def __init__(self, network: Network) -> None:
        self._network = network

    def channel(
        self,
        address: str,
        options: Options,
        *,
        authorities: Sequence[bytes] = (),
        material: TlsMaterial | None = None,
    ) -> Any:
        return _Channel(self._network, address, dict(options), tuple(authorities), material)

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> Any:
        return _Server(self._network, interceptors, dict(options))

    def server_credentials(self, handshakes: ServerHandshakes) -> Any:
        return handshakes

    async def leaf(self, host: str, port: int) -> bytes | None:
        return await self._network.leaf(process.get(), host, port)


# Certificates


@functools.lru_cache(maxsize=4096)
def _issued(certificate: bytes, authority: bytes) -> bool:
    try:
        _parsed(certificate).verify_directly_issued_by(_parsed(authority))
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _parsed(certificate: bytes) -> x509.Certificate:
    return x509.load_der_x509_certificate(certificate)


def _names(certificate: bytes, kind: Any) -> list[str]:
    names = _parsed(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(one) for one in names.get_values_for_type(kind)]


def _believed(certificate: bytes, authorities: Iterable[bytes], clock: Clock) -> bool:
    found = _parsed(certificate)
    valid = found.not_valid_before_utc.timestamp() <= clock() <= found.not_valid_after_utc.timestamp()
    return valid and any(_issued(certificate, one) for one in authorities)


@functools.lru_cache(maxsize=4096)
def _shown(certificate: bytes) -> dict[str, list[bytes]]:
    """What gRPC says of a caller with this certificate."""
    return {
        "transport_security_type": [b"ssl"],
        "x509_pem_cert": [to_pem(certificate)],
        "peer_uri": [one.encode() for one in _names(certificate, x509.UniformResourceIdentifier)],
    }


# Connections

CLIENT, SERVER = 0, 1


class _Connection:
    """One connection, with the calls over it. Each end finds out by itself that the other is gone."""

    def __init__(self, network: Network, channel: _Channel, server: _Server, source: str) -> None:
        self._network = network
        self.channel, self.server, self.source = channel, server, source
        self.ends = (channel.process, server.process)
        self.caller = channel.material.certificate if channel.material is not None else b""
        self.open = [True, True]
        self.calls: list[dict[int, Any]] = [{}, {}]
        self._number = 0
        self._silences = 0
        server.connections[self] = None

    def sides_of(self, one: Process) -> list[int]:
        return [side for side in (CLIENT, SERVER) if self.ends[side] is one]

    def begin(self, call: Any) -> int:
        """Registers a client's call."""
        self._number += 1
        self.calls[CLIENT][self._number] = call
        self.look()
        return self._number

    def send(self, side: int, arrives: Callable[..., None], *what: Any) -> None:
        """Calls `arrives` at the other end with what was sent."""
        if not self.open[side]:
            return
        here, there = self.ends[side], self.ends[1 - side]
        deliver = functools.partial(self._deliver, 1 - side, arrives, what)
        self._network.send(here.host, there.host, deliver, there.context, (self, side))

    def _deliver(self, side: int, arrives: Callable[..., None], what: tuple[Any, ...]) -> None:
        if self.open[side]:
            arrives(*what)

    def tell(self, side: int, number: int, what: Callable[..., None], *arguments: Any) -> None:
        """Calls a method of a call's other end, if it is there when this arrives."""
        self.send(side, self._told, 1 - side, number, what, arguments)

    def _told(self, side: int, number: int, what: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        call = self.calls[side].get(number)
        if call is not None:
            what(call, *arguments)

    def close(self, side: int) -> None:
        """This end is closed; the other learns it, if its machine is there."""
        if not self.open[side]:
            return
        self.send(side, self._over, 1 - side)
        self.open[side] = False
        if not any(self.open):
            self._network.forget(self)

    def _over(self, side: int) -> None:
        """This end, in its own process, finds the connection closed or the other end silent."""
        if not self.open[side]:
            return
        self.close(side)
        self.calls[side], calls = {}, self.calls[side]
        for call in calls.values():
            call.lost()
        if side == CLIENT:
            self.channel.disconnected(self)
        else:
            self.server.connections.pop(self, None)

    def look(self) -> None:
        """Has each end find the other silent after its keep-alive, if that does not answer now."""
        for side in (CLIENT, SERVER):
            here, there = self.ends[side], self.ends[1 - side]
            if here.ended or not self.open[side] or self._network.passes(here, there):
                continue
            options = self.channel.options if side == CLIENT else self.server.options
            pause = options.get("grpc.keepalive_time_ms", 0) + options.get("grpc.keepalive_timeout_ms", 0)
            if pause:
                silent = functools.partial(self._silent, side, self._silences)
                asyncio.get_running_loop().call_later(pause / 1000, silent, context=here.context)

    def heard(self) -> None:
        """The ends may hear each other again."""
        if all(self._network.passes(self.ends[a], self.ends[1 - a]) for a in (CLIENT, SERVER)):
            self._silences += 1

    def _silent(self, side: int, silence: int) -> None:
        if silence == self._silences and (side == SERVER or self.calls[CLIENT]):
            self._over(side)


class _Inbox:
    """Messages of one direction of a call, at their reader."""

    def __init__(self, read: Callable[[int], None]) -> None:
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._read = read
        self._taken = 0
        self.over = False

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._wake()

    def end(self) -> None:
        """No more come."""
        self.over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> bytes | None:
        """The next message; None at the end."""
        while not self._messages:
            if self.over:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        self._taken += len(message)
        if self._taken >= WINDOW_BYTES // 2:
            taken, self._taken = self._taken, 0
            self._read(taken)
        return message


class _Outbox:
    """The writer's side: waits while too much is unread."""

    def __init__(self) -> None:
        self._unread = 0
        self._room = asyncio.Event()

    async def sent(self, size: int) -> None:
        """Returns once a writer may go on that has sent `size` bytes."""
        self._unread += size
        while self._unread > WINDOW_BYTES:
            self._room.clear()
            await self._room.wait()

    def read(self, size: int) -> None:
        self._unread -= size
        self._room.set()

    def end(self) -> None:
        """Nobody reads any more."""
        self._unread = 0
        self._room.set()


# The client's end

_Status = tuple[grpc.StatusCode, str, grpc.aio.Metadata]


class _Channel:
    """As `grpc.aio.Channel`."""

    def __init__(
        self,
        network: Network,
        address: str,
        options: dict[str, Any],
        authorities: tuple[bytes, ...],
        material: TlsMaterial | None,
    ) -> None:
        self._network = network
        self.process = process.get()
        self.address, self.options = address, options
        self.authorities, self.material = authorities, material
        self._state = grpc.ChannelConnectivity.IDLE
        self._changed = asyncio.Event()
        self._connection: _Connection | None = None
        self._wait = 0.0
        self._attempt = 0
        self._active_calls: set[_Call] = set()

    def unary_unary(self, *arguments: Any, **named: Any) -> _Method:
        return _Method(self, "unary", "unary", *arguments, **named)

    def unary_stream(self, *arguments: Any, **named: Any) -> _Method:
        return _Method(self, "unary", "stream", *arguments, **named)

    def stream_unary(self, *arguments: Any, **named: Any) -> _Method:
        return _Method(self, "stream", "unary", *arguments, **named)

    def stream_stream(self, *arguments: Any, **named: Any) -> _Method:
        return _Method(self, "stream", "stream", *arguments, **named)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        if try_to_connect and self._state is grpc.ChannelConnectivity.IDLE:
            self._connect()
        return self._state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while self._state is last_observed_state:
            await self._changed.wait()

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        if self._state is grpc.ChannelConnectivity.SHUTDOWN:
            return
        self._set(grpc.ChannelConnectivity.SHUTDOWN)
        if grace and self._active_calls:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    while self._active_calls:
                        await next(iter(self._active_calls)).ended()
        self.end()

    @property
    def _channel(self) -> Any:  # gRPC's own, which has a `close` that ends everything at once
        return _Closing(self)

    def begun(self, call: _Call) -> None:
        self._active_calls.add(call)

    def over(self, call: _Call) -> None:
        self._active_calls.discard(call)

    def end(self) -> None:
        for call in list(self._active_calls):
            call.cancel()
        if self._connection is not None:
            self._connection.close(CLIENT)
            self._connection = None

    def _set(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def _connect(self) -> None:
        self._set(grpc.ChannelConnectivity.CONNECTING)
        self._attempt += 1
        attempt = self._attempt
        self._network.connect(self, functools.partial(self._connected, attempt))
        asyncio.get_running_loop().call_later(CONNECT_SECONDS, self._connected, attempt, None)

    def _connected(self, attempt: int, connection: _Connection | None) -> None:
        if attempt != self._attempt or self._state is not grpc.ChannelConnectivity.CONNECTING:
            if connection is not None and connection is not self._connection:
                connection.close(CLIENT)
            return
        if connection is not None and not connection.open[CLIENT]:
            connection = None
        if connection is not None:
            self._connection, self._wait = connection, 0.0
            self._set(grpc.ChannelConnectivity.READY)
            return
        first, last = (
            self.options.get(f"grpc.{which}_reconnect_backoff_ms", 1000) / 1000
            for which in ("initial", "max")
        )
        self._wait = min(2 * self._wait, last) or first
        self._set(grpc.ChannelConnectivity.TRANSIENT_FAILURE)
        pause = self._wait * self._network.random.uniform(0.8, 1.2)
        asyncio.get_running_loop().call_later(pause, self._idle)

    def _idle(self) -> None:
        if self._state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self._set(grpc.ChannelConnectivity.IDLE)

    def disconnected(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._connection = None
            if self._state is grpc.ChannelConnectivity.READY:
                self._set(grpc.ChannelConnectivity.IDLE)

    async def connection(self, *, wait: bool) -> _Connection | None:
        """The connection, made if there is none; None if it cannot be made and the caller does not wait."""
        while True:
            state = self.get_state(try_to_connect=True)
            if state is grpc.ChannelConnectivity.READY:
                return self._connection
            if state is grpc.ChannelConnectivity.SHUTDOWN:
                return None
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not wait:
                return None
            await self.wait_for_state_change(state)


@dataclass
class _Closing:
    channel: _Channel

    def close(self) -> None:
        self.channel.end()


class _Method:
    """As a multi-callable of gRPC's."""

    def __init__(
        self,
        channel: _Channel,
        requests: str,
        responses: str,
        method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> None:
        self.channel, self.method = channel, method
        self.requests, self.responses = requests, responses
        self.encode = request_serializer or (lambda one: one)
        self.decode = response_deserializer or (lambda one: one)

    def __call__(
        self,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        wait_for_ready: bool | None = None,
        **_: Any,
    ) -> _Call:
        if self.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN:
            raise grpc.aio.UsageError("Channel is closed.")
        return _Call(self, request, timeout, tuple(metadata or ()), bool(wait_for_ready))


class _Call:
    """As a call of `grpc.aio`: of any kind, since code calls only what its kind has."""

    def __init__(
        self, method: _Method, request: Any, timeout: float | None, metadata: tuple[Any, ...], wait: bool
    ) -> None:
        self._method = method
        self._channel = method.channel
        self._metadata = metadata
        loop = asyncio.get_running_loop()
        self._status: asyncio.Future[_Status] = loop.create_future()
        self._cancelled = False
        self._connection: _Connection | None = None
        self._begun = asyncio.Event()
        self._half_closed = False
        self._outbox = _Outbox()
        self._inbox = _Inbox(self._acknowledge)
        self._timer = loop.call_later(timeout, self._late) if timeout is not None else None
        self._channel.begun(self)
        self._work = loop.create_task(self._run(request, wait))

    # What gRPC offers

    def done(self) -> bool:
        return self._status.done()

    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> bool:
        if self.done():
            return False
        self._cancelled = True
        self._reset()
        self._finish(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    def time_remaining(self) -> float | None:
        return None if self._timer is None else max(0.0, self._timer.when() - now())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._status.add_done_callback(lambda _: callback(self))

    async def code(self) -> grpc.StatusCode:
        return (await asyncio.shield(self._status))[0]

    async def details(self) -> str:
        return (await asyncio.shield(self._status))[1]

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return _NOTHING

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return (await asyncio.shield(self._status))[2]

    def __await__(self) -> Any:
        return self._unary().__await__()

    async def _unary(self) -> Any:
        try:
            message = await self._inbox.get()
            await self._raise_for_status()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._method.decode(message or b"")

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._each()

    async def _each(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def read(self) -> Any:
        """The next message, or EOF. A reader that is cancelled cancels the call, as gRPC does."""
        try:
            message = await self._inbox.get()
            if message is None:
                await self._raise_for_status()
                return grpc.aio.EOF
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self._method.decode(message)

    async def write(self, request: Any) -> None:
        if self.done():
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._half_closed:
            raise asyncio.InvalidStateError("RPC is half closed")
        try:
            await self._begun.wait()
            if not self.done():
                await self._send(self._method.encode(request))
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.done():
            await self._raise_for_status()

    async def done_writing(self) -> None:
        if not self.done() and not self._half_closed:
            self._half_closed = True
            await self._begun.wait()
            self._tell(_Served.half_closed)

    async def wait_for_connection(self) -> None:
        await self._begun.wait()
        await self._raise_for_status() if self.done() else None

    async def ended(self) -> None:
        await asyncio.wait((self._status,))

    # The way there

    async def _run(self, request: Any, wait: bool) -> None:
        connection = await self._channel.connection(wait=wait)
        if self.done():
            return
        if connection is None:
            address = self._channel.address
            self._finish(grpc.StatusCode.UNAVAILABLE, f"failed to connect to all addresses; last: {address}")
            return
        self._connection = connection
        self._number = connection.begin(self)
        connection.send(
            CLIENT, connection.server.called, connection, self._number, self, self._method, self._metadata
        )
        self._begun.set()
        if self._method.requests == "unary":
            await self._send(self._method.encode(request))
            self._tell(_Served.half_closed)
        elif request is not None:
            await self._send_all(request)

    async def _send_all(self, requests: Any) -> None:
        if isinstance(requests, AsyncIterator) or hasattr(requests, "__aiter__"):
            async for one in requests:
                await self._send(self._method.encode(one))
        else:
            for one in requests:
                await self._send(self._method.encode(one))
        self._half_closed = True
        self._tell(_Served.half_closed)

    async def _send(self, message: bytes) -> None:
        self._tell(_Served.message, message)
        await self._outbox.sent(len(message))

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        if self._connection is not None:
            self._connection.tell(CLIENT, self._number, what, *arguments)

    def _acknowledge(self, size: int) -> None:
        self._tell(_Served.acknowledged, size)

    def _reset(self) -> None:
        self._tell(_Served.reset)

    def _late(self) -> None:
        if not self.done():
            self._reset()
            self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    # What arrives

    def message(self, message: bytes) -> None:
        if not self.done():
            self._inbox.put(message)

    def acknowledged(self, size: int) -> None:
        self._outbox.read(size)

    def status(self, code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata) -> None:
        self._finish(code, details, trailing)

    def lost(self) -> None:
        self._finish(grpc.StatusCode.UNAVAILABLE, _GONE)

    def _finish(self, code: grpc.StatusCode, details: str, trailing: grpc.aio.Metadata = _NOTHING) -> None:
        if self.done():
            return
        if self._connection is not None:
            self._connection.calls[CLIENT].pop(self._number, None)
        if self._timer is not None:
            self._timer.cancel()
        self._status.set_result((code, details, trailing))
        self._channel.over(self)
        self._begun.set()
        self._inbox.end()
        self._outbox.end()
        if self._work is not asyncio.current_task():
            self._work.cancel()

    async def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        code, details, trailing = await asyncio.shield(self._status)
        if code is not _OK:
            raise grpc.aio.AioRpcError(code, _NOTHING, trailing, details=details)


# The server's end


class _Server:
    """As `grpc.aio.Server`."""

    def __init__(
        self, network: Network, interceptors: Sequence[grpc.aio.ServerInterceptor], options: dict[str, Any]
    ) -> None:
        self._network = network
        self.process = process.get()
        self.options = options
        self._interceptors = interceptors
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._credentials: ServerHandshakes | None = None
        self._address = ""
        self._stopped = asyncio.Event()
        self._serves = False
        self.connections: dict[_Connection, None] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self._handlers.append(grpc.method_handlers_generic_handler(service, handlers))

    def add_insecure_port(self, address: str) -> int:
        return self._network.listen(address, self)

    def add_secure_port(self, address: str, credentials: Any) -> int:
        self._credentials = credentials
        return self._network.listen(address, self)

    async def start(self) -> None:
        self._serves = True

    async def stop(self, grace: float | None) -> None:
        self._serves = False
        self._network.close(self)
        running = [one.task for each in self.connections for one in each.calls[SERVER].values()]
        if running and grace:
            await asyncio.wait(running, timeout=grace)
        for connection in list(self.connections):
            for served in connection.calls[SERVER].values():
                served.task.cancel()
            connection.close(SERVER)
        if running:
            await asyncio.wait(running)
        self.connections.clear()
        self._stopped.set()

    async def wait_for_termination(self) -> bool:
        await self._stopped.wait()
        return True

    @property
    def certificate(self) -> bytes | None:
        return self._credentials.material.certificate if self._credentials else None

    def takes(self, channel: _Channel) -> bool:
        """Whether both ends believe each other's certificates."""
        if not self._serves:
            return False
        if self._credentials is None:
            return not channel.authorities
        own = self._credentials.material
        name = channel.options.get("grpc.ssl_target_name_override", "")
        if name not in _names(own.certificate, x509.DNSName):
            return False
        at_client = channel.process.context.copy()
        if not at_client.run(_believed, own.certificate, channel.authorities, wall_clock):
            return False
        if not self._credentials.require_client:
            return True
        shown = channel.material
        return shown is not None and _believed(shown.certificate, own.authorities, wall_clock)

    def called(
        self, connection: _Connection, number: int, call: _Call, method: _Method, metadata: tuple[Any, ...]
    ) -> None:
        """A call has arrived."""
        served = _Served(self, connection, number, call, metadata)
        connection.calls[SERVER][number] = served
        served.task = asyncio.get_running_loop().create_task(served.serve(method.method))

    async def find(self, details: _Details) -> Any:
        async def at(position: int, details: Any) -> Any:
            if position < len(self._interceptors):
                follow = functools.partial(at, position + 1)
                return await self._interceptors[position].intercept_service(follow, details)
            return next((one for each in self._handlers if (one := each.service(details)) is not None), None)

        return await at(0, details)


@dataclass(frozen=True)
class _Details(grpc.HandlerCallDetails):
    method: str
    invocation_metadata: tuple[Any, ...]


class _Served:
    """A call at its server, and the context of its handler, as `grpc.aio.ServicerContext`."""

    task: asyncio.Task[None]

    def __init__(
        self,
        server: _Server,
        connection: _Connection,
        number: int,
        call: _Call,
        metadata: tuple[Any, ...],
    ) -> None:
        self._server, self._connection, self._number, self._call = server, connection, number, call
        self._invocation = metadata
        self._trailing = _NOTHING
        self._encode: Callable[[Any], bytes] = lambda one: one
        self._inbox = _Inbox(self._acknowledge)
        self._outbox = _Outbox()
        self._aborted: tuple[grpc.StatusCode, str] | None = None

    # What gRPC offers to handlers

    def peer(self) -> str:
        return f"ipv4:{self._connection.source}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return _shown(self._connection.caller) if self._connection.caller else {}

    def invocation_metadata(self) -> tuple[Any, ...]:
        return self._invocation

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._trailing = grpc.aio.Metadata(*trailing)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._trailing = grpc.aio.Metadata(*trailing_metadata)
        self._aborted = (code, details)
        raise grpc.aio.AbortError

    async def abort_with_status(self, status: Any) -> None:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def write(self, message: Any) -> None:
        data = self._encode(message)
        self._tell(_Call.message, data)
        await self._outbox.sent(len(data))

    async def read(self) -> Any:
        message = await self._inbox.get()
        return grpc.aio.EOF if message is None else message

    async def send_initial_metadata(self, metadata: Any) -> None:
        pass

    # Its life

    async def serve(self, method: str) -> None:
        code, details = _OK, ""
        try:
            await self._serve(method)
        except grpc.aio.AbortError:
            code, details = self._aborted or (grpc.StatusCode.UNKNOWN, "")
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, "the server ended the call"
            raise
        except Exception as error:
            code, details = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}"
        finally:
            self._connection.calls[SERVER].pop(self._number, None)
            self._tell(_Call.status, code, details, self._trailing)

    async def _serve(self, method: str) -> None:
        found = await self._server.find(_Details(method, self._invocation))
        if found is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        requests, responses = arity(found)
        decode = found.request_deserializer or (lambda one: one)
        self._encode = found.response_serializer or (lambda one: one)
        handle = getattr(found, f"{requests}_{responses}")
        if requests == "unary":
            message = await self._inbox.get()
            if message is None:
                await self.abort(grpc.StatusCode.CANCELLED, "no request")
            request: Any = decode(message)
        else:
            request = self._requests(decode)
        answer = handle(request, self)
        if responses == "unary":
            await self.write(await answer)
        elif inspect.isawaitable(answer):
            await answer
        else:
            async with contextlib.aclosing(answer):
                async for one in answer:
                    await self.write(one)

    async def _requests(self, decode: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while (message := await self._inbox.get()) is not None:
            yield decode(message)

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        self._connection.tell(SERVER, self._number, what, *arguments)

    def _acknowledge(self, size: int) -> None:
        self._tell(_Call.acknowledged, size)

    # What arrives

    def message(self, message: bytes) -> None:
        self._inbox.put(message)

    def half_closed(self) -> None:
        self._inbox.end()

    def acknowledged(self, size: int) -> None:
        self._outbox.read(size)

    def reset(self) -> None:
        """The client has cancelled."""
        self.lost()

    def lost(self) -> None:
        self._inbox.end()
        self._outbox.end()
        self.task.cancel()
