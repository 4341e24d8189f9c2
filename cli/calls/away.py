"""A member's own knowledge of its cluster while the coordinator does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.mesh.errors import SealringError
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.files import read_bounded
from sealring.mesh.system.paths import is_enrolled

if TYPE_CHECKING:
    from sealring.mesh.roster.model import Roster


def while_away(folder: Path, now: float) -> Iterator[str]:
    """Lines on how long rings go on by the roster in a node's state `folder`, and on what takes over; none
    where no node is enrolled."""
    from sealring.coordinator.backup import STANDBY_MARK
    from sealring.coordinator.standby.terms import deposed_by
    from sealring.mesh.member.state import ROSTER, load_machine_state
    from sealring.mesh.roster.reader import check_roster

    if not is_enrolled(folder):
        return
    coordinator = folder.parent / "coordinator"
    try:
        state = load_machine_state(folder)
        roster = check_roster(read_bounded(folder / ROSTER), state.root, now=now)
    except (OSError, SealringError):
        yield "rings have ended here: the roster is over, and the coordinator signs the next one"
        return
    left = max(0, int(roster.expires - now))
    yield f"rings that serve go on for {left // 60} min {left % 60} s at most, until the roster is over"
    standby = _standby(roster)
    if standby is None:
        with suppress(OSError, SealringError):  # no coordinator is here, or it runs and has locked its store
            if deposed_by(coordinator):
                yield "a standby has taken over from this machine: `sealring up` goes on here as a member"
                return
        lost = " and no other gateway, so nobody is answered until then" if len(roster.gateways) < 2 else ""
        yield f"there is no standby{lost}: start `sealring up` on the first machine"
        return
    here = (coordinator / STANDBY_MARK).exists()
    where = "on this machine" if here else f"on the standby, the machine at {parse_address(standby)[0]}"
    yield f"if the first machine does not come back, type {where}: sealring coordinator promote"


def coordinates(coordinator: Path) -> bool:
    """Whether the machine with this state folder of a coordinator is its cluster's first one."""
    from sealring.coordinator.backup import STANDBY_MARK

    return is_enrolled(coordinator / "operator") and not (coordinator / STANDBY_MARK).exists()


def _standby(roster: Roster) -> str | None:
    """host:port of the standby: the last address of a coordinator that the first machine does not have."""
    if not roster.coordinators:
        return None
    host, port = parse_address(roster.coordinators[0])
    beside = (_hosts(one.addresses) for one in roster.members if host in _hosts(one.addresses))
    own = {(one, port) for one in {host, *next(beside, ())}}
    others = [one for one in roster.coordinators if parse_address(one) not in own]
    return others[-1] if others else None


def _hosts(addresses: tuple[str, ...]) -> set[str]:
    return {parse_address(one)[0] for one in addresses}
