"""Announces the cluster on the local network for as long as somebody can join it with a code."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
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
    """Announces `offer` at `port` of `hosts()`, the IPv4 addresses of this machine that others reach."""

    def __init__(self, codes: JoinCodes, offer: Offer, hosts: Callable[[], Sequence[str]], port: int) -> None:
        self._codes = codes
        self._offer = offer
        self._hosts = hosts
        self._port = port

    async def run(self) -> NoReturn:
        """Never returns. Without a network it tries again later."""
        while True:
            changed = asyncio.ensure_future(self._codes.changed())
            try:
                hosts = tuple(self._hosts())
                if self._codes.open_until() is None:
                    await changed
                elif not hosts:
                    await asyncio.wait((changed,), timeout=LOOK_SECONDS)
                else:
                    await self._announce(hosts)
            finally:
                changed.cancel()

    async def _announce(self, hosts: tuple[str, ...]) -> None:
        """Returns once nobody can join with a code, or these are not the addresses any more."""
        from sealring.mesh.member.discovery import announced  # zeroconf takes a tenth of a second

        try:
            async with announced(self._offer, hosts, self._port):
                log.info("cluster_announced", hosts=list(hosts))
                while self._codes.open_until() is not None and tuple(self._hosts()) == hosts:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await self._codes.changed()
        except SealringError as error:
            log.warning("cluster_not_announced", reason=error.reason, why=error.message, hint=error.hint)
            await asyncio.sleep(LOOK_SECONDS)


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
