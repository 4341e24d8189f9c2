"""`sealring coordinator`: what each command does to a state folder, and what is said to come next."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.member import load_machine_state

KEY = "ab" * 32


def run(here: Any, *arguments: str) -> Any:
    return here("coordinator", *arguments, "--state-dir", "state")


def test_a_cluster_is_made_backed_up_and_put_back(here: Any, home: Path) -> None:
    state = home / "state"
    done = run(here, "init", "--json")
    assert done.data == {"state_dir": "state", "operator": "state/operator"}
    said = done.err.splitlines()
    assert "root.key stands above everything" in said[1]
    assert said[2:] == ["next: sealring coordinator run, then sealring token create"]
    first = load_machine_state(state / "operator")
    done = run(here, "new-operator")
    assert "the old one opens nothing" in done.err
    assert load_machine_state(state / "operator").tls.certificate != first.tls.certificate
    done = run(here, "backup", "b")
    assert "wrote b: keep it as safe" in done.err
    assert (home / "b").stat().st_mode & 0o077 == 0
    for command, said_first, undone in (
        (("restore", "b"), "restored ", True),
        (("recover",), "goes on above what members may have seen", True),
        (("standby", "b"), "coordinator promote", False),
        (("promote",), "the standby takes over: `sealring join`", False),
    ):
        if command[-1] == "b":
            state.rename(home / f"before-{command[0]}")
        done = run(here, *command)
        assert (done.status, said_first in done.err) == (0, True), done.err
        assert ("what was done after this copy is undone" in done.err) == undone
        assert ("sealring operator list" in done.err) == (undone or command == ("promote",))


@pytest.mark.parametrize(("size", "reason"), [(128 << 10, "PREPARED"), ((128 << 10) + 1, "FILE_TOO_LARGE")])
def test_a_draft_is_so_long_at_most(here: Any, home: Path, size: int, reason: str) -> None:
    (home / "draft").write_bytes(bytes(size))
    done = run(here, "init", "--root-metadata", "draft")
    assert (done.status != 0, reason in done.err) == (True, True), done.err


def test_thresholds_have_bounds(here: Any) -> None:
    for beyond in ("0", "17"):
        assert run(here, "prepare", "--root-key", KEY, "--out", "d", "--root-threshold", beyond).status == 2
        assert run(here, "init", "--roster-threshold", beyond).status == 2


def test_a_draft_and_keys_that_a_backup_has_not_are_named(here: Any, home: Path) -> None:
    keys = ("--roster-key-files", "second.key")
    done = run(here, "prepare", "--root-key", KEY, "--out", "draft", *keys)
    assert done.out.strip() == hashlib.sha256((home / "draft").read_bytes()).hexdigest()
    made = here("coordinator", "init", "--state-dir", "c", "--roster-key-files", "other.key")
    assert made.status == 0, made.err
    done = here("coordinator", "backup", "b", "--state-dir", "c", "--roster-key-files", "other.key")
    assert "not in it, and needed beside it: " in done.err, done.err
