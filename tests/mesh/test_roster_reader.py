"""The reader of rosters: every check, its reason, its place in the order, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mesh.identity import member_id
from mesh.roster_reader import RosterReader
from mesh.roster_state import RosterStateFile

NOW = 1_800_000_000


def test_a_good_roster_is_accepted_and_remembered(cluster: Any, clock: Any, tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    RosterStateFile(path).create("demo")
    own = member_id(cluster.signers[1].public_key)
    reader = RosterReader(cluster.authority.root, path, own, clock=clock)
    roster = reader.accept(cluster.sign())
    assert reader.current is roster
    assert roster.min_trust == 10
    assert roster.ring_of(own) == roster.rings[0]
    assert RosterStateFile(path).load().hash == roster.hash
