"""Rosters that anybody can verify and compare from files; what is shown is in `tests/cli/transcripts`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.calls.verified import describe_roster
from sealring.cli.commands.roster import compare_rosters
from sealring.testing import PaperCluster

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


@pytest.mark.parametrize("how", ["pin", "roster", "root", "expired"])
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
    else:
        arguments = verify(
            paper, "--at", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
        )
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
