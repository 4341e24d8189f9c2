"""Rosters that anybody can verify and compare from files, and the coordinator's own."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundles import SigningCluster

from sealring.cli.calls.verified import describe_roster
from sealring.cli.commands.roster import compare_rosters
from sealring.cli.terminal.output import moment
from sealring.mesh.pki import Role
from sealring.mesh.trust.levels import level_of
from sealring.testing import PaperCluster
from sealring.v1 import admin_pb2

Sealring = Callable[..., Any]


@pytest.fixture
def paper(home: Path) -> PaperCluster:
    made = PaperCluster()
    write(home, made)
    return made


def write(home: Path, paper: PaperCluster, name: str = "roster.dsse") -> None:
    (home / name).write_bytes(paper.envelope)
    (home / "root.dsse").write_bytes(paper.root_chain)


def verify(paper: PaperCluster, *more: str, pin: str = "") -> tuple[str, ...]:
    chain = ("--root-chain", "root.dsse", "--root-sha256", pin or paper.pin)
    return ("roster", "verify", "roster.dsse", *chain, *more)


def test_a_roster_is_verified_from_files_and_the_roots_hash(here: Sealring, paper: PaperCluster) -> None:
    done = here(*verify(paper, "--json"))
    assert (done.status, done.data["hash"]) == (0, paper.roster.hash.hex())
    shown = here(*verify(paper))
    assert "holds" in shown.err
    for one in paper.roster.rings[0].members:
        place = rf" {one.rank} +{one.layers[0]}-{one.layers[1] - 1} "
        assert re.search(rf"^{one.id} .*{place}", shown.out, re.MULTILINE)


@pytest.mark.parametrize("how", ["pin", "roster", "root", "expired", "not hex", "missing"])
def test_a_roster_that_does_not_hold_is_refused(
    here: Sealring, paper: PaperCluster, home: Path, how: str
) -> None:
    arguments = verify(paper)
    if how == "pin":
        arguments = verify(paper, pin="ab" * 32)
    elif how == "roster":
        spoiled = bytearray(paper.envelope)
        spoiled[60] ^= 1
        (home / "roster.dsse").write_bytes(spoiled)
    elif how == "root":
        (home / "root.dsse").write_bytes(PaperCluster().root_chain)
    elif how == "expired":
        arguments = verify(
            paper, "--at", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
        )
    elif how == "not hex":
        arguments = verify(paper, pin="xyz")
    else:
        (home / "root.dsse").unlink()
    done = here(*arguments)
    assert done.status != 0
    assert done.out == ""


@pytest.mark.parametrize(("size", "large"), [(2 << 20, False), ((2 << 20) + 1, True)])
def test_files_of_no_end_are_not_read(
    here: Sealring, paper: PaperCluster, home: Path, size: int, large: bool
) -> None:
    with (home / "roster.dsse").open("wb") as file:
        file.truncate(size)
    assert ("[FILE_TOO_LARGE]" in here(*verify(paper)).err) == large


def test_the_coordinators_roster_is_shown_once_it_is_verified(
    here: Sealring, paper: PaperCluster, home: Path, coordinator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = admin_pb2.GetAdminRosterResponse(root_metadata=paper.root_chain, roster=paper.envelope)
    coordinator.answers["GetRoster"] = answer
    signed = SigningCluster(home / "signed")
    other, signed.authority.root = signed.bundle, paper.root
    signed.save(home / "bundle", Role.OPERATOR)
    monkeypatch.setenv("SEALRING_CLI_OPERATOR", str(home / "bundle"))
    found = paper.roster
    lines = here("roster", "show").out.splitlines()
    assert lines[:6] == [
        f"root {paper.pin}",
        f"cluster {found.cluster}, roster version {found.version}, {found.hash.hex()[:16]}",
        f"issued {moment(found.issued)}, expires {moment(found.expires)}",
        f"minimum trust {level_of(found.min_trust)}, floor {level_of(found.trust_floor)}",
        f"suites allowed: {', '.join(map(str, found.suites))}",
        "",
    ]
    members = len(found.members)
    assert [line.split()[0] for line in lines[6 : 7 + members]] == [
        "member",
        *(one.id for one in found.members),
    ]
    gone = [f"revoked {one.id} at {moment(one.at)}" for one in found.revoked]
    assert lines[7 + members :] == [*(f"gateway {one.id}" for one in found.gateways), *gone]
    assert not (home / "kept").exists()
    assert here("roster", "show", "--save", "below/kept").status == 0
    assert (home / "below" / "kept" / "root.dsse").exists()
    for _ in range(2):
        saved = here("roster", "show", "--json", "--save", "kept")
    assert (saved.data["root_sha256"], saved.data["hash"]) == (paper.pin, found.hash.hex())
    assert (home / "kept" / "roster.dsse").read_bytes() == paper.envelope
    assert (home / "kept" / "root.dsse").read_bytes() == paper.root_chain
    assert "[BAD_FILE]" in here("roster", "show", "--save", "kept/root.dsse").err
    done = here("roster", "show", "--save", "other", "--operator", str(other))
    assert (done.status, done.out, "[ROOT_PIN]" in done.err) == (6, "", True)
    assert not (home / "other").exists()


def test_two_rosters_are_compared(here: Sealring, paper: PaperCluster, home: Path) -> None:
    first = paper.roster
    (home / "old.dsse").write_bytes(paper.envelope)
    paper.publish(members=tuple(dataclasses.replace(one, trust=10) for one in paper.draft.members))
    write(home, paper)
    chain = ("--root-chain", "root.dsse", "--root-sha256", paper.pin)
    files = ("roster", "diff", "old.dsse", "roster.dsse", *chain)
    done = here(*files, "--json")
    assert (done.data["from"], done.data["to"]) == (first.version, first.version + 1)
    changed = [one for one in done.data["changes"] if one["kind"] == "members"]
    assert {(one["field"], one["value"]) for one in changed} == {("trust", "hardware -> software")}
    lines = here(*files).out.splitlines()
    assert lines[0] == f"version {first.version} -> {first.version + 1}"
    identifiers = sorted(one.id for one in first.members if one.trust != 10)
    assert [line for line in lines if " members " in line] == [
        f"changed members {one} trust hardware -> software" for one in identifiers
    ]


def test_entries_that_come_and_go_are_named(paper: PaperCluster) -> None:
    known = describe_roster(paper.roster)
    member, revoked = known["members"][0]["id"], "ab" * 16
    later = {**known, "members": known["members"][1:], "revoked": [*known["revoked"], revoked]}
    assert [(one["what"], one["kind"], one["id"]) for one in compare_rosters(known, later)] == [
        ("removed", "members", member),
        ("added", "revoked", revoked),
    ]


def test_two_histories_are_found_out(here: Sealring, paper: PaperCluster, home: Path) -> None:
    (home / "old.dsse").write_bytes(paper.envelope)
    first = paper.roster
    paper.publish(version=first.version, previous=paper.draft.previous, expires=paper.draft.expires - 1)
    write(home, paper)
    command = (
        *("roster", "diff", "old.dsse", "roster.dsse"),
        *("--root-chain", "root.dsse", "--root-sha256", paper.pin),
    )
    assert "ROSTER_EQUIVOCATION" in here(*command).err
    paper.publish()
    write(home, paper)
    assert paper.roster.version == first.version + 1
    assert "ROSTER_EQUIVOCATION" in here(*command).err, "it follows another of that version"
    paper.publish()
    write(home, paper)
    assert here(*command).status == 0, "what lies between is not known"
    (home / "old.dsse").write_bytes(paper.envelope)
    assert here(*command).out == f"version {first.version + 2} -> {first.version + 2}\n"
