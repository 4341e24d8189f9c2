"""Connections to machines with several addresses, some of which may be dead, and pauses between attempts.

A Mac advertises the addresses of Thunderbolt, Ethernet and Wi-Fi, and a cable may be out. They are tried in
parallel as in RFC 8305 (Happy Eyeballs, section 5): each a quarter of a second after the previous one, or as
soon as that has failed. The first address where the peer proves its identity is used, and tried first the
next time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc

from sealring.mesh.errors import Unavailable
from sealring.mesh.pki.certificates import PeerIdentity
from sealring.mesh.rpc.tls import PeerChannel, TlsStore

T = TypeVar("T")

CONNECT_SECONDS = 4.0
"""How long one address may take, TLS included."""

APART_SECONDS = 0.25
"""RFC 8305's recommended Connection Attempt Delay."""

_FIRST_SECONDS = 0.2
_LAST_SECONDS = 4.0
"""The longest pause between tries. With the spread, every machine is back within 6 s of a coordinator's
return, and a thousand machines try at most 250 times a second while it is away."""

_TRIES = 5
"""Attempts at a port that others may flood: about three seconds, besides what each takes. Its connections of
strangers are looked through ten times a second."""

_STEADY_SECONDS = 5.0
_SPREAD = 0.5


class Backoff:
    """Pauses that double with each failure and start again after a success; the defaults are for streams.

    In seconds: the `first` pause, the `last` and longest, and the time after which an attempt counts as
    `steady`, a success. Pauses vary by the share `spread`, so that machines that failed together do not retry
    together.
    """

    def __init__(
        self,
        first: float = _FIRST_SECONDS,
        last: float = _LAST_SECONDS,
        *,
        steady: float = _STEADY_SECONDS,
        spread: float = _SPREAD,
    ) -> None:
        self._first = self._next = first
        self._last = last
        self._steady = steady
        self._spread = spread

    def after(self, lasted: float) -> float:
        """Seconds to wait after an attempt that `lasted` seconds."""
        if lasted >= self._steady:
            self._next = self._first
        pause = self._next * random.uniform(1 - self._spread, 1 + self._spread)  # noqa: S311 - no secret
        self._next = min(2 * self._next, self._last)
        return pause


async def patiently(attempt: Callable[[], Awaitable[T]], backoff: Backoff | None = None) -> T:
    """The result of `attempt`, which is repeated a few times while it raises Unavailable, and raises it then.

    A port that is flooded turns honest callers away too, for a moment. `attempt` must be harmless if it is
    made twice.
    """
    pauses = backoff or Backoff()
    for _ in range(_TRIES - 1):
        try:
            return await attempt()
        except Unavailable:
            await asyncio.sleep(pauses.after(0.0))
    return await attempt()


async def first_of(
    addresses: Sequence[str],
    attempt: Callable[[str], Coroutine[Any, Any, T | None]],
    discard: Callable[[T], Awaitable[object]] | None = None,
) -> T | None:
    """The first result of `attempt` over these addresses; None if all fail, which each says with None.

    Each is begun 0.25 s after the one before it, or as soon as that has failed.

    Attempts that are not needed any more are cancelled; `discard` is called with what they have made.
    """
    waiting = list(dict.fromkeys(addresses))
    trying: set[asyncio.Task[T | None]] = set()
    found: list[T] = []
    try:
        while not found and (waiting or trying):
            if waiting:
                trying.add(asyncio.create_task(attempt(waiting.pop(0))))
            done, trying = await asyncio.wait(
                trying,
                timeout=APART_SECONDS if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            found = [result for task in done if (result := task.result()) is not None]
    finally:
        for task in trying:
            task.cancel()
        late = await asyncio.gather(*trying, return_exceptions=True)
        if discard is not None:
            for one in (*found[1:], *late):
                if one is not None and not isinstance(one, BaseException):
                    await discard(one)
    return found[0] if found else None


class Reach:
    """Connects with the certificate in `store`. Use it from one event loop only."""

    def __init__(self, store: TlsStore, options: Sequence[tuple[str, int]] = ()) -> None:
        """`options` are those of `PeerChannel`."""
        self._store = store
        self._options = options
        self._worked: dict[str, str] = {}

    async def connect(self, peer: PeerIdentity, addresses: Sequence[str]) -> PeerChannel:
        """A connected channel to the first of a member's addresses that answers with the right certificate.

        Raises Unavailable (PEER_UNREACHABLE), at once if all connections are refused.
        """
        last = self._worked.get(peer.id)
        ordered = sorted(addresses, key=lambda address: address != last)
        found = await first_of(ordered, lambda address: self._try(peer, address), PeerChannel.close)
        if found is None:
            raise Unavailable(
                "the member cannot be reached",
                hint="check the addresses that it advertises",
                reason="PEER_UNREACHABLE",
                peer=peer.id,
                addresses=",".join(addresses),
            )
        self._worked[peer.id] = found.address
        return found

    async def _try(self, peer: PeerIdentity, address: str) -> PeerChannel | None:
        return await connected(address, self._store, peer.server_name, self._options, seconds=CONNECT_SECONDS)


async def connected(
    address: str,
    store: TlsStore,
    server_name: str,
    options: Sequence[tuple[str, int]] = (),
    *,
    seconds: float,
) -> PeerChannel | None:
    """A channel that is connected to this address; None unless a peer of that name answers in `seconds`."""
    channel = PeerChannel(address, store, server_name, options)
    try:
        async with asyncio.timeout(seconds):
            if await _is_ready(channel.get()):
                return channel
    except TimeoutError:
        pass
    except BaseException:
        await channel.close()
        raise
    await channel.close()
    return None


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    """Waits for the first attempt to connect. `channel_ready` would try again after a refusal."""
    while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            return False
        await channel.wait_for_state_change(state)
    return True
