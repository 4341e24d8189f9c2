"""The node of this machine as the doctor knows it: its settings, its enrolment, and what its daemon said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.doctor.report import TriedConnection
from sealring.mesh.errors import SealringError
from sealring.mesh.roster.model import Ring, Roster, RosterMember

if TYPE_CHECKING:
    from sealring.mesh.member.state import MachineState
    from sealring.mesh.pki.root import RootMetadata
    from sealring.node.settings import NodeSettings

_MAX_ENVELOPE = 2 << 20


@dataclass(frozen=True)
class View:
    """`connections` and `session` are None where no daemon was asked.

    `session` says whether the daemon's stream to the coordinator is open, `launchd` whether launchd started
    the daemon, `left_out` how many addresses it did not try, `executable` what program it is; `trouble` is
    why the enrolment could not be read; where there is none, `state` is None without it.
    """

    settings: NodeSettings
    state: MachineState | None = None
    roster: Roster | None = None
    trouble: str = ""
    connections: tuple[TriedConnection, ...] | None = None
    left_out: int = 0
    session: bool | None = None
    launchd: bool = False
    executable: str = ""
    file_limit: int = 0
    first: bool = False
    """Whether this is the first machine of a cluster: it has the coordinator's state."""

    @property
    def start(self) -> str:
        """The command that starts this machine's node where no service does."""
        return "sealring up" if self.first else "sealring join"

    @property
    def member(self) -> RosterMember | None:
        """This node in the roster."""
        if self.state is None or self.roster is None:
            return None
        return next((one for one in self.roster.members if one.id == self.state.peer.id), None)

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The rings that this node is planned into."""
        if self.state is None or self.roster is None:
            return ()
        return self.roster.rings_of(self.state.peer.id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which other members look for this node."""
        return self.member.addresses if self.member else self.settings.advertised()


def read_view(settings: NodeSettings) -> View:
    """The view from the node's folder alone. Nothing is written, and the memory of rosters is left alone."""
    from sealring.mesh.member.state import load_machine_state
    from sealring.mesh.system.paths import is_enrolled

    folder = settings.state_dir
    try:
        first = is_enrolled(folder.parent / "coordinator" / "operator")
        if not is_enrolled(folder):
            return View(settings, first=first)
        state = load_machine_state(folder)
    except (OSError, SealringError) as error:
        return View(settings, trouble=str(error))
    return View(settings, state, _roster(folder, state.root), first=first)


def _roster(folder: Path, root: RootMetadata) -> Roster | None:
    """The stored roster where its signatures hold, though its time may be over."""
    from sealring.mesh.member.state import ROSTER
    from sealring.mesh.roster.codec import issued_unverified
    from sealring.mesh.roster.reader import check_roster
    from sealring.mesh.system.files import read_bounded

    try:
        envelope = read_bounded(folder / ROSTER, max_bytes=_MAX_ENVELOPE)
        return check_roster(envelope, root, now=issued_unverified(envelope))
    except (OSError, SealringError, ValueError):
        return None
