"""The gateway's stream from the coordinator: it comes back, and what watches over rosters is never lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest

from gateway import watch as watch_module
from gateway.watch import Watch
from mesh.errors import PermissionDenied
from mesh.rpc import Server
from sealring.v1 import membership_pb2 as membership
from sealring.v1 import membership_pb2_grpc as membership_grpc


class Coordinator(membership_grpc.SchedulingServicer):
    def __init__(self) -> None:
        self.watched: asyncio.Queue[None] = asyncio.Queue()
        self.refusal: Exception | None = None

    async def Follow(self, requests: Any, context: Any) -> AsyncIterator[membership.WatchResponse]:
        if self.refusal is not None:
            raise self.refusal
        self.watched.put_nowait(None)
        yield membership.WatchResponse(ring=membership.RingState(ring="ring-0"))
        await asyncio.Event().wait()


class Rings:
    """What the watch tells its rings."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[str] = asyncio.Queue()
        self.rosters: list[Any] = []
        self.on_tick: Callable[[], None] = lambda: None

    def use_roster(self, roster: Any) -> None:
        self.rosters.append(roster)

    def ring_state(self, state: membership.RingState) -> None:
        self.states.put_nowait(state.ring)

    def tick(self) -> None:
        self.on_tick()


class Introduction:
    """One that is over at once."""

    async def exchange(self, call: Any, ask: Any) -> Any:
        return None


class Keeper:
    """Has a roster as long as `valid` is one."""

    valid: Any = "roster"


class Channel:
    """A channel that is made anew when it was closed."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    def get(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self._address)
        return self._channel

    async def retire(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class Watching:
    def __init__(self, coordinator: Coordinator, rings: Rings, channel: Channel, task: Any) -> None:
        self.coordinator, self.rings, self.channel, self.task = coordinator, rings, channel, task
        self.keeper = Keeper()


@pytest.fixture
async def watching(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watching]:
    monkeypatch.setattr(watch_module, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(watch_module, "_FIRST_BACKOFF", 0.01)
    coordinator, rings = Coordinator(), Rings()
    server = Server([(membership_grpc.add_SchedulingServicer_to_server, coordinator, "x")])
    channel = Channel(f"127.0.0.1:{server.listen('127.0.0.1:0', None)}")
    await server.start()
    found = Watching(coordinator, rings, channel, None)

    async def newer_root() -> None: ...

    watch: Any = Watch
    found.task = asyncio.create_task(watch(channel, Introduction(), found.keeper, rings, newer_root).run())
    yield found
    found.task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await found.task
    await channel.retire()
    await server.stop(0)


async def test_a_channel_that_is_replaced_does_not_end_the_watch(watching: Watching) -> None:
    """Its certificate has ended; the gateway went down with it once."""
    for _ in range(2):
        async with asyncio.timeout(10):
            await watching.coordinator.watched.get()
            await watching.rings.states.get()
        await watching.channel.retire()
    async with asyncio.timeout(10):
        await watching.coordinator.watched.get()
    assert not watching.task.done()


async def test_a_watch_that_is_cancelled_ends(watching: Watching) -> None:
    await watching.rings.states.get()
    watching.task.cancel()
    done, _ = await asyncio.wait((watching.task,), timeout=10)
    assert done
    assert watching.task.cancelled()


async def test_a_roster_that_has_expired_is_not_served(watching: Watching) -> None:
    await watching.rings.states.get()
    assert watching.rings.rosters == ["roster"]
    watching.keeper.valid = None
    async with asyncio.timeout(10):
        while watching.rings.rosters[-1] is not None:
            await asyncio.sleep(0.01)


async def test_the_gateway_does_not_go_on_without_its_clock(watching: Watching) -> None:
    """Nobody would see that a roster has expired."""

    def broken() -> None:
        raise RuntimeError("a fault")

    await watching.rings.states.get()
    watching.rings.on_tick = broken
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(watching.task, 10)


async def test_a_gateway_that_is_not_enrolled_any_more_ends(watching: Watching) -> None:
    await watching.rings.states.get()
    watching.coordinator.refusal = PermissionDenied("no", reason="EVICTED")
    await watching.channel.retire()
    with pytest.raises(PermissionDenied) as raised:
        await asyncio.wait_for(watching.task, 10)
    assert raised.value.reason == "REMOVED"
