"""A cluster is announced while it has an open code, on loopback here, and nowhere by default there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import multicast
import pytest

from sealring.coordinator.members.announcer import announced_hosts, to_members, to_newcomers
from sealring.coordinator.members.joincodes import JoinCodes
from sealring.mesh.member import Offer, hear_of_coordinator
from sealring.mesh.member.discovery import listen
from sealring.mesh.system.networks import own_addresses
from tests.coordinator.members.test_joincodes import PIN, Bed

LOOPBACK = ["127.0.0.1"]


@pytest.fixture(autouse=True)
def on_a_network_of_its_own() -> Iterator[None]:
    """Most of these tests announce on loopback or listen there."""
    with multicast.alone():
        yield


@pytest.fixture
def codes(tmp_path: Path) -> JoinCodes:
    return Bed(tmp_path).codes


async def heard() -> list[Offer]:
    return await listen(LOOPBACK, seconds=0.7)


async def until(expected: list[Offer]) -> None:
    """Returns once this is announced."""
    async with asyncio.timeout(200):
        while await heard() != expected:
            pass


async def test_a_cluster_is_announced_as_long_as_its_code_is_open(codes: JoinCodes) -> None:
    offer = Offer(PIN, "home", ("127.0.0.1:7701",))
    task = asyncio.create_task(to_newcomers(codes, offer, lambda: LOOPBACK, 7701).run())
    try:
        assert await heard() == []
        codes.create("me", seconds=600, uses=1)
        await until([offer])
        codes.create("me", seconds=600, uses=1)  # another, and it goes on
        await until([offer])
        codes.revoke("me")
        await until([])
    finally:
        task.cancel()
        await asyncio.wait((task,))
    with pytest.raises(asyncio.CancelledError):
        task.result()


async def test_a_coordinator_is_announced_while_a_member_is_away() -> None:
    away, root = True, os.urandom(32)
    task = asyncio.create_task(to_members(root, lambda: away, lambda: LOOPBACK, 7700).run())
    try:
        async with asyncio.timeout(200):
            while await hear_of_coordinator(root, LOOPBACK) != ("127.0.0.1:7700",):
                pass
            away = False
            while await hear_of_coordinator(root, LOOPBACK):
                pass
    finally:
        task.cancel()
        await asyncio.wait((task,))


def test_only_addresses_that_others_can_reach_are_announced() -> None:
    own = [one.host for one in own_addresses()]
    assert announced_hosts("0.0.0.0") == own[:8]
    assert announced_hosts("127.0.0.1") == []
    assert announced_hosts("192.0.2.1") == announced_hosts("studio.local") == announced_hosts("::") == []
    assert all(announced_hosts(one) == [one] for one in own)
