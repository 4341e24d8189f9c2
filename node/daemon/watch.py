"""The daemon's regular check: a roster that waits for disk space, its end, and the state file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.mesh.errors import SealringError
from sealring.mesh.system.files import read_bounded, write_atomic

if TYPE_CHECKING:  # `sealring join` reads the state file without the daemon's modules
    from sealring.mesh.member.roster_keeper import RosterKeeper
    from sealring.node.daemon.awake import Awake
    from sealring.node.daemon.roster_intake import RosterIntake
    from sealring.node.daemon.seats import Seats

DOING = "doing.json"
_MAX_BYTES = 1024


@dataclass(frozen=True)
class Doing:
    """`coordinator` says whether it answers. `phases` are those of epochs, by the names of their rings, and
    `work` are words on how far the node is with one that it prepares."""

    coordinator: bool
    phases: dict[str, str]
    work: str = ""


def note_doing(state_dir: Path, doing: Doing) -> None:
    """Writes the state; a disk that cannot take it is ignored."""
    with suppress(OSError):
        write_atomic(state_dir / DOING, json.dumps(asdict(doing)).encode())


def read_doing(state_dir: Path) -> Doing | None:
    """The state that the daemon wrote last; None without a file that can be read."""
    try:
        return Doing(**json.loads(read_bounded(state_dir / DOING, max_bytes=_MAX_BYTES)))
    except (OSError, ValueError, TypeError, SealringError):
        return None


_CHECK_SECONDS = 2.0


class Watch:
    """Checks what changes without a message. Use it from one event loop."""

    def __init__(
        self,
        state_dir: Path,
        connected: Callable[[], bool],
        rosters: RosterKeeper,
        intake: RosterIntake,
        seats: Seats,
        awake: Awake,
    ) -> None:
        """`connected` says whether the session with the coordinator is open."""
        self._state_dir = state_dir
        self._connected = connected
        self._rosters = rosters
        self._intake = intake
        self._seats = seats
        self._awake = awake
        self._noted: Doing | None = None

    async def run(self) -> None:
        """Checks every 2 s, until it is cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Tries a roster that waits, notes the daemon's state, and ends epochs of an expired roster.

        An expired roster closes open links also while the coordinator is away.
        """
        await self._intake.retry()
        await self._awake.look()
        work = next(filter(None, (seat.work for seat in self._seats)), "")
        doing = Doing(self._connected(), {seat.ring: seat.phase.value for seat in self._seats}, work)
        if doing != self._noted:
            self._noted = doing
            await asyncio.to_thread(note_doing, self._state_dir, doing)
        if self._rosters.expired:
            self._seats.fault(self._intake.error or self._rosters.lapse())
