"""`sealring node` and `sealring gateway` on their own machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.member import ROSTER
from sealring.mesh.pki import PeerIdentity, Role
from sealring.mesh.system.lock import lock_state
from sealring.testing.authority import Authority, make_member, make_roster


def test_the_nonce_is_that_of_the_identity(here: Any, home: Path) -> None:
    printed = here("node", "nonce", "--state-dir", str(home)).out.strip()
    assert len(bytes.fromhex(printed)) == 32
    assert here("node", "nonce", "--state-dir", str(home), "--json").data == {"nonce": printed}


@pytest.mark.parametrize("role", ["node", "gateway"])
def test_who_runs_does_not_leave(here: Any, home: Path, role: str) -> None:
    (home / "member.json").write_text("{}")
    with lock_state(home):
        assert "[STATE_IN_USE]" in here(role, "leave", "--state-dir", str(home)).err
    assert (home / "member.json").exists()


def test_who_leaves_after_a_standby_has_taken_over_is_sent_to_it(here: Any, home: Path) -> None:
    """The machine that it once joined is a member now, and may change nothing."""
    now, member = time.time(), make_member()
    authority, peer = Authority.create("demo", now=now), PeerIdentity("demo", Role.MEMBER, member.id)
    material = authority.material(peer, now=now)
    authority.enrol(home / "node", peer, material, name="three", coordinator="10.0.0.1:7700")
    roster = make_roster("demo", (member,), (), now=now, coordinators=("10.0.0.2:7700",))
    (home / "node" / ROSTER).write_bytes(authority.sign(roster))
    said = here("node", "leave", "--state-dir", str(home / "node")).err
    assert "the machine at 10.0.0.2: sealring node evict three" in said
