"""Leads a machine's channel to the address at which its coordinator answers now.

A Mac has several addresses, and each may change: Wi-Fi gives another one, a Thunderbolt cable comes and goes.
So every address that the machine knows is tried in parallel (`mesh/rpc/reach.py`), with mTLS. Whatever
answers has to hold a certificate of the cluster's authority for the coordinator's role, no matter at which
address. If none answers, the machine asks the network by multicast (`mesh/member/discovery.py`), and tries
what it hears.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import structlog

from sealring.mesh.errors import SealringError
from sealring.mesh.pki.certificates import Role, role_server_name
from sealring.mesh.rpc.reach import Backoff, connected, first_of
from sealring.mesh.rpc.tls import TURN_SECONDS, PeerChannel, TlsStore
from sealring.mesh.system.addresses import format_address, is_loopback, parse_address
from sealring.mesh.system.networks import own_addresses

log = structlog.get_logger()

_SECONDS = 10.0
"""How long one address may take. A coordinator that many machines call at once is slower than a member."""

_SEARCH_AFTER_SECONDS = 2.0
"""A coordinator that is started again is back before this, and nobody asks the network for it."""

_SEARCH_EVERY_SECONDS = 15.0
"""64 machines that look for their coordinator send a few packets a second."""

_LOOPBACK = "127.0.0.1"
Find = Callable[[], Awaitable[Sequence[str]]]


async def look_for_coordinator(root_sha256: bytes) -> Sequence[str]:
    """What this machine's networks say about the coordinator of the cluster with this root.

    Raises Unavailable (NO_MULTICAST).
    """
    from sealring.mesh.member.discovery import hear_of_coordinator  # zeroconf takes a tenth of a second

    return await hear_of_coordinator(root_sha256, [one.host for one in own_addresses()])


class Coordinators:
    """`channel` leads to `address` (host:port), where this machine was enrolled, until another one answers.

    `known` returns the addresses of the newest roster. `find` returns what the network says (see
    `mesh/member/discovery.py`), or raises. Use it from one event loop.
    """

    def __init__(
        self,
        address: str,
        store: TlsStore,
        known: Callable[[], Sequence[str]],
        find: Find,
        *,
        seconds: float = _SECONDS,
        search_after: float = _SEARCH_AFTER_SECONDS,
        search_every: float = _SEARCH_EVERY_SECONDS,
    ) -> None:
        """In seconds: the longest attempt at one address, the pause before the first question to the network
        and that after each."""
        self._seconds, self._search_after, self._search_every = seconds, search_after, search_every
        self._store = store
        self._name = role_server_name(Role.COORDINATOR)
        self._first = address
        self.channel = PeerChannel(address, store, self._name)
        self._known = known
        self._find = find
        self._heard: tuple[str, ...] = ()
        self._search: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses at which the coordinator may be, the one in use first.

        The machine's own loopback is the last: its coordinator may run beside it, where no network is needed.
        """
        beside = format_address(_LOOPBACK, parse_address(self._first)[1])
        return tuple(dict.fromkeys((self.channel.address, self._first, *self._known(), *self._heard, beside)))

    async def lead(self, *, elsewhere: bool = False) -> bool:
        """Leads `channel` to an address where the coordinator answers; False if none does.

        With `elsewhere` the present address is tried last: a coordinator answered there and was of no use, as
        one that a standby has replaced.
        """
        present = self.channel.address
        ordered = sorted(self.addresses, key=lambda one: (one == present) is elsewhere)
        if self._search is None or self._search.done():
            self._search = asyncio.get_running_loop().create_task(self._look_around())
        found = await first_of(
            ordered,
            lambda one: connected(one, self._store, self._name, seconds=self._seconds),
            PeerChannel.close,
        )
        if found is None:
            log.warning("coordinator_unreachable", addresses=list(ordered))
            return False
        self._search.cancel()
        if found.address != present:
            log.info("coordinator_found", address=found.address, before=present)
        self.channel.adopt(found)
        if found.address != present:
            self._moved.set()
            self._moved = asyncio.Event()
        return True

    async def pause(self, address: str, seconds: float) -> None:
        """Waits `seconds`, or until the coordinator answers elsewhere than at `address`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.channel.address == address:
                    await self._moved.wait()

    async def follow(
        self,
        stream: Callable[[], Awaitable[None]],
        backoff: Backoff,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Calls `stream`, which opens a stream over `channel` and returns at its end, again and again until
        `over`. Raises what it raises."""
        loop = asyncio.get_running_loop()
        elsewhere = False
        while not over():
            lasted = 0.0
            if await self.lead(elsewhere=elsewhere):
                started = loop.time()
                await stream()
                lasted = loop.time() - started
                elsewhere = lasted < TURN_SECONDS
            await self.channel.pause(backoff.after(lasted))

    async def close(self) -> None:
        """Closes the channel, and ends a search."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait((self._search,))
        await self.channel.close()

    async def _look_around(self) -> None:
        """One question to the network. `lead` begins it and ends it once the coordinator answers."""
        if all(is_loopback(parse_address(one)[0]) for one in self.addresses):
            return  # all of the cluster is on this machine
        await asyncio.sleep(self._search_after)
        with contextlib.suppress(SealringError):  # NO_MULTICAST: there may be a network later
            self._heard = tuple(await self._find())
        await asyncio.sleep(self._search_every)
