"""Announces the cluster on the local network: to newcomers while it has a join code, to members that are
away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from ipaddress import AddressValueError, IPv4Address
from typing import NoReturn

import structlog

from sealring.coordinator.members.joincodes import JoinCodes
from sealring.mesh.errors import SealringError
from sealring.mesh.member.joincode import Offer
from sealring.mesh.system.networks import own_addresses

LOOK_SECONDS = 10.0
"""How often the interfaces are looked at: one may come, go, or get another address."""

_MAX_HOSTS = 8
log = structlog.get_logger()


class Announcer:
    """Announces while it is `wanted`, at `hosts()`, the IPv4 addresses of this machine that others reach.

    `announced` announces at these within its block, as those of `mesh/member/discovery.py` do. `changed`
    returns when `wanted` may have another answer; the question is asked every ten seconds too.
    """

    def __init__(
        self,
        announced: Callable[[Sequence[str]], AbstractAsyncContextManager[None]],
        wanted: Callable[[], bool],
        hosts: Callable[[], Sequence[str]],
        changed: Callable[[], Awaitable[object]] = asyncio.Future,
    ) -> None:
        self._announced = announced
        self._wanted = wanted
        self._hosts = hosts
        self._changed = changed

    async def run(self) -> NoReturn:
        """Never returns. Without a network it tries again later."""
        while True:
            hosts = tuple(self._hosts())
            if hosts and self._wanted():
                await self._announce(hosts)
            else:
                await self._pause()

    async def _announce(self, hosts: tuple[str, ...]) -> None:
        """Returns once it is not wanted, or these are not the addresses any more."""
        try:
            async with self._announced(hosts):
                log.info("cluster_announced", hosts=list(hosts))
                while self._wanted() and tuple(self._hosts()) == hosts:
                    await self._pause()
        except SealringError as error:
            log.warning("cluster_not_announced", reason=error.reason, why=error.message, hint=error.hint)
            await asyncio.sleep(LOOK_SECONDS)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._changed()


def to_newcomers(codes: JoinCodes, offer: Offer, hosts: Callable[[], Sequence[str]], port: int) -> Announcer:
    """Announces the cluster at its join port while it has a join code."""

    def announced(hosts: Sequence[str]) -> AbstractAsyncContextManager[None]:
        from sealring.mesh.member import discovery  # zeroconf takes a tenth of a second

        return discovery.announced(offer, hosts, port)

    return Announcer(announced, lambda: codes.open_until() is not None, hosts, codes.changed)


def to_members(
    root_sha256: bytes, away: Callable[[], bool], hosts: Callable[[], Sequence[str]], port: int
) -> Announcer:
    """Announces the coordinator's main port while a member is `away`, since it may have an old address.

    Not at other times: the announcement tells a network that there is a coordinator.
    """

    def announced(hosts: Sequence[str]) -> AbstractAsyncContextManager[None]:
        from sealring.mesh.member import discovery

        return discovery.announced_to_members(root_sha256, hosts, port)

    return Announcer(announced, away, hosts)


def announced_hosts(listen: str) -> list[str]:
    """The addresses to announce for a port that listens at the host `listen`; none for loopback."""
    try:
        host = IPv4Address(listen)
    except AddressValueError:
        return []
    found = [one.host for one in own_addresses()]
    if not host.is_unspecified:
        found = [one for one in found if one == listen]
    return found[:_MAX_HOSTS]
