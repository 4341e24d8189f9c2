"""What a member says of its cluster while the coordinator does not answer."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from sealring.cli.calls.away import while_away
from sealring.coordinator.init import init
from sealring.coordinator.settings import CoordinatorSettings
from sealring.coordinator.store import Store
from sealring.mesh.member import ROSTER
from sealring.mesh.pki import PeerIdentity, Role
from sealring.testing.authority import Authority, make_member, make_roster

FIRST, STANDBY = "10.0.0.1", "10.0.0.2"
PROMOTE = "sealring coordinator promote"


def said(folder: Path, coordinators: tuple[str, ...], *, passed: float = 0.0) -> str:
    """By the roster of a first machine with two addresses and of a second one, in a state folder of this."""
    now = time.time()
    authority = Authority.create("demo", now=now)
    members = (
        make_member(addresses=(f"{FIRST}:7710", "192.168.0.1:7710")),
        make_member(addresses=(f"{STANDBY}:7710",)),
    )
    peer = PeerIdentity("demo", Role.MEMBER, members[1].id)
    node = folder / "node"
    authority.enrol(node, peer, authority.material(peer, now=now), name="two", coordinator=f"{FIRST}:7700")
    roster = make_roster("demo", members, (), now=now, coordinators=coordinators)
    (node / ROSTER).write_bytes(authority.sign(roster))
    return "\n".join(while_away(node, now + passed))


def test_the_rosters_life_is_counted_down(tmp_path: Path) -> None:
    assert "for 10 min 0 s at most" in said(tmp_path / "a", (f"{FIRST}:7700",)).replace(
        "9 min 59", "10 min 0"
    )
    assert "for 1 min " in said(tmp_path / "b", (f"{FIRST}:7700",), passed=500)
    assert "have ended" in said(tmp_path / "c", (f"{FIRST}:7700",), passed=700)


@pytest.mark.parametrize("own", [(f"{FIRST}:7700",), (f"{FIRST}:7700", "192.168.0.1:7700")])
def test_the_standby_is_told_from_another_address_of_the_first_machine(
    tmp_path: Path, own: tuple[str, ...]
) -> None:
    none = said(tmp_path / "none", own)
    assert PROMOTE not in none
    assert "nobody is answered until then" in none, "its gateway was on the first machine"
    there = said(tmp_path / "there", (*own, f"{STANDBY}:7700"))
    assert PROMOTE in there
    assert f"the machine at {STANDBY}" in there


def test_a_first_machine_from_which_a_standby_has_taken_over_knows_it(tmp_path: Path) -> None:
    for name in ("runs", "deposed"):
        init(CoordinatorSettings(state_dir=tmp_path / name / "coordinator", cluster="demo"))
    with closing(Store.open(tmp_path / "deposed" / "coordinator")) as store:
        store.set_meta("deposed", b"4")
    with closing(Store.open(tmp_path / "runs" / "coordinator")):
        assert "there is no standby" in said(tmp_path / "runs", (f"{FIRST}:7700",))
    assert "goes on here as a member" in said(tmp_path / "deposed", (f"{FIRST}:7700",))


def test_a_machine_without_a_node_says_nothing_of_rings(tmp_path: Path) -> None:
    assert not list(while_away(tmp_path, 0.0))


def test_on_the_standby_it_is_typed_here(tmp_path: Path) -> None:
    bundle = tmp_path / "coordinator" / "operator"
    bundle.mkdir(parents=True)
    (bundle / "member.json").write_text("{}")
    assert "the machine at" in said(tmp_path, (f"{FIRST}:7700", f"{STANDBY}:7700")), "it was promoted once"
    (bundle.parent / "standby").touch()
    assert f"on this machine: {PROMOTE}" in said(tmp_path, (f"{FIRST}:7700", f"{STANDBY}:7700"))
