from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.mesh.errors import FailedPrecondition
from sealring.node.daemon.epoch import Phase
from sealring.node.daemon.watch import DOING, Doing, Watch, read_doing


class World:
    """A watch, and what it looks at."""

    def __init__(self, folder: Path) -> None:
        self.connected = False
        self.faults: list[str] = []
        self.retries = 0
        self.seats: Any = Seats(self.faults)
        self.rosters: Any = SimpleNamespace(
            expired=False, lapse=lambda: FailedPrecondition("expired", reason="ROSTER_EXPIRED")
        )
        self.intake: Any = SimpleNamespace(error=None, retry=self.retry)
        self.looks = 0
        awake: Any = SimpleNamespace(look=self.look)
        self.watch = Watch(folder, lambda: self.connected, self.rosters, self.intake, self.seats, awake)

    async def look(self) -> None:
        self.looks += 1

    async def retry(self) -> None:
        self.retries += 1


class Seats(list[Any]):
    """Seats that note their faults."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__()
        self._faults = faults

    def fault(self, error: Any) -> None:
        self._faults.append(error.reason)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_the_terminal_reads_what_the_daemon_does(world: World, tmp_path: Path) -> None:
    assert read_doing(tmp_path) is None
    await world.watch.check()
    assert read_doing(tmp_path) == Doing(coordinator=False, phases={})
    assert world.looks == 1, "whether the machine may sleep changes without a message"
    world.connected = True
    up, ended = (SimpleNamespace(ring="a", phase=Phase.UP), SimpleNamespace(ring="b", phase=Phase.ENDED))
    up.work, ended.work = "", "b: loading 1 of 2 GiB"
    world.seats[:] = [up, ended]
    await world.watch.check()
    assert read_doing(tmp_path) == Doing(True, {"a": "up", "b": "ended"}, "b: loading 1 of 2 GiB")


async def test_epochs_end_with_an_expired_roster_also_without_a_coordinator(world: World) -> None:
    await world.watch.check()
    assert world.faults == []
    world.rosters.expired = True
    await world.watch.check()
    world.intake.error = FailedPrecondition("no space", reason="ROSTER_STATE_UNWRITABLE")
    await world.watch.check()
    assert world.faults == ["ROSTER_EXPIRED", "ROSTER_STATE_UNWRITABLE"]
    assert world.retries == 3


@pytest.mark.parametrize("junk", ["", "[]", "{}", '{"coordinator": 1, "phase": "", "more": 2}', "x" * 2000])
def test_a_damaged_state_file_reads_as_absent(tmp_path: Path, junk: str) -> None:
    (tmp_path / DOING).write_text(junk)
    assert read_doing(tmp_path) is None
