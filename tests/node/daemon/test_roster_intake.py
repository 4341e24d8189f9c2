import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.clock import wall_clock
from sealring.mesh.errors import PermissionDenied, RosterError
from sealring.mesh.member import RosterKeeper
from sealring.node.daemon.roster_intake import RosterIntake
from sealring.v1 import membership_pb2


class World:
    """An intake over a real roster keeper, and what reaches the parts behind it."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster, self.party = cluster, cluster.party()
        envelope, _ = cluster.roster(members=[self.party])
        state = cluster.enrol(self.party, folder, "127.0.0.1:1", envelope)
        self.sent: list[membership_pb2.MemberMessage] = []
        self.done: list[Any] = []
        self.removed = 0
        self.ahead = 0.0
        self.intake = RosterIntake(
            RosterKeeper(folder, state, clock=lambda: wall_clock() + self.ahead),
            self.newer_root,
            self.sent.append,
            self.remove,
            unsealer=SimpleNamespace(learn=lambda roster: self.done.append("learn")),  # type: ignore[arg-type]
            handshakes=SimpleNamespace(  # type: ignore[arg-type]
                close_revoked=lambda: self.done.append(f"close, {len(self.sent)} sent")
            ),
            seats=SimpleNamespace(  # type: ignore[arg-type]
                own_id=self.party.id, follow=lambda roster: self.done.append("follow")
            ),
            awake=SimpleNamespace(follow=self.hold),  # type: ignore[arg-type]
        )

    async def newer_root(self) -> None: ...

    def remove(self) -> None:
        self.removed += 1

    async def hold(self, wanted: bool) -> None:
        self.done.append(wanted)


@pytest.fixture
def make_world(cluster: Any, tmp_path: Path) -> Callable[[], World]:
    return lambda: World(cluster, tmp_path / "node")


async def test_an_accepted_roster_reaches_every_part_before_it_is_reported_as_seen(
    make_world: Callable[[], World],
) -> None:
    world = make_world()
    envelope, roster = world.cluster.roster((world.party,))
    await world.intake.accept(envelope)
    assert world.done == ["learn", "close, 0 sent", "follow", True]
    assert [one.roster_seen.version for one in world.sent] == [roster.version]


async def test_a_mac_is_held_awake_only_while_its_node_is_in_a_ring(make_world: Callable[[], World]) -> None:
    world = make_world()
    for ring in ((), (world.party,), ()):
        envelope, _ = world.cluster.roster(ring, members=[world.party])
        await world.intake.accept(envelope)
    assert [one for one in world.done if isinstance(one, bool)] == [False, True, False]


async def test_a_roster_waits_for_room_on_the_disk(
    make_world: Callable[[], World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Used before it is remembered, it could be rolled back."""
    world = make_world()
    envelope, roster = world.cluster.roster(members=[world.party])

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(RosterError):
            await world.intake.accept(envelope)
        await world.intake.retry()
    world.ahead = (
        3600.0  # it expires meanwhile by a wrong clock, which is no reason to forget what it forbids
    )
    await world.intake.retry()
    world.ahead = 0.0
    error = world.intake.error
    assert error is not None
    assert error.reason == "ROSTER_STATE_UNWRITABLE"
    assert f"{tmp_path}/" in error.message
    assert "No space left on device" in error.message
    assert "free space" in error.hint
    with pytest.raises(RosterError, match="No space left"):
        world.intake.plan(membership_pb2.PrepareEpoch())
    assert world.done == world.sent == []

    await world.intake.retry()
    assert world.sent[-1].roster_seen.version == roster.version
    assert world.intake.error is None


async def test_a_roster_that_came_while_the_clock_was_wrong_is_used_once_it_is_right(
    make_world: Callable[[], World],
) -> None:
    """The coordinator sends it once, and forms no epoch by an older one."""
    world = make_world()
    envelope, roster = world.cluster.roster(members=[world.party])
    world.ahead = 3600.0
    with pytest.raises(RosterError, match="expired"):
        await world.intake.accept(envelope)
    await world.intake.retry()
    assert world.intake.error is None
    assert world.sent == []

    world.ahead = 0.0
    await world.intake.retry()
    assert world.sent[-1].roster_seen.version == roster.version


async def test_a_roster_without_this_node_removes_it(make_world: Callable[[], World]) -> None:
    world = make_world()
    envelope, _ = world.cluster.roster(members=[world.cluster.party()])
    with pytest.raises(PermissionDenied):
        await world.intake.accept(envelope)
    assert (world.removed, world.done) == (1, [])
