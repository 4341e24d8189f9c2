"""`sealring coordinator`: what each command does to a state folder, and what is said to come next."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from sealring.coordinator import backup, init
from sealring.coordinator.standby import follow

KEY = "ab" * 32


@pytest.fixture
def did(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the commands would have done: the name of the function, and what it was given."""
    calls: list[Any] = []

    def stand_in(name: str, answer: bytes = b"") -> Any:
        def call(settings: Any, *given: Any, **options: Any) -> bytes:
            calls.append((name, settings.state_dir.name, *given, options))
            return answer

        return call

    for module, names in (
        (init, ("init", "complete", "new_operator")),
        (backup, ("backup", "restore", "recover")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, stand_in(name))
    monkeypatch.setattr(init, "prepare", stand_in("prepare", b"draft"))
    monkeypatch.setattr(follow, "promote", stand_in("promote"))
    return calls


def run(here: Any, *arguments: str) -> Any:
    return here("coordinator", *arguments, "--state-dir", "state")


def test_a_new_cluster_keeps_its_root_key_elsewhere(here: Any, did: list[Any], home: Path) -> None:
    done = run(here, "init", "--roster-threshold", "2")
    assert did == [("init", "state", {"roster_threshold": 2})]
    said = done.err.splitlines()
    assert said[0].endswith("state/operator")
    assert "root.key stands above everything" in said[1]
    assert said[2:] == ["next: sealring coordinator run, then sealring token create"]
    assert (done.out, run(here, "init").status, did.pop()[2]) == ("", 0, {"roster_threshold": 1})
    (home / "draft").write_bytes(b"signed")
    done = run(here, "init", "--root-metadata", "draft", "--json")
    assert did[1] == ("complete", "state", b"signed", {})
    assert "root.key" not in done.err, "it was never here"
    assert done.data["operator"].endswith("state/operator")


@pytest.mark.parametrize(("size", "status"), [(128 << 10, 0), ((128 << 10) + 1, 7)])
def test_a_draft_is_so_long_at_most(here: Any, did: list[Any], home: Path, size: int, status: int) -> None:
    (home / "draft").write_bytes(bytes(size))
    assert run(here, "init", "--root-metadata", "draft").status == status
    assert bool(did) == (status == 0)


def test_a_draft_is_written_with_the_hash_that_its_holders_compare(
    here: Any, did: list[Any], home: Path
) -> None:
    done = run(
        here, "prepare", "--root-key", KEY, "--root-key", KEY, "--root-threshold", "2", "--out", "draft"
    )
    assert did == [("prepare", "state", (bytes.fromhex(KEY),) * 2, 2, {"roster_threshold": 1})]
    assert (home / "draft").read_bytes() == b"draft"
    digest = hashlib.sha256(b"draft").hexdigest()
    assert done.out == digest + "\n"
    assert done.err.splitlines() == [
        "drafted the root metadata in draft; its holders compare that hash, look at it and sign it:",
        "  sealring root show draft; sealring root sign draft --key FILE",
        "then: sealring coordinator init --root-metadata draft",
    ]
    assert run(here, "prepare", "--root-key", KEY, "--out", "d", "--json").data == {
        "draft": "d",
        "sha256": digest,
    }
    for beyond in ("0", "17"):
        assert run(here, "prepare", "--root-key", KEY, "--out", "d", "--root-threshold", beyond).status == 2
        assert run(here, "init", "--roster-threshold", beyond).status == 2
    assert run(here, "init", "--roster-threshold", "16").status == 0


@pytest.mark.parametrize(
    ("command", "call", "said", "undone"),
    [
        (["new-operator"], ("new_operator", "state", {}), "the old one opens nothing", False),
        (["backup", "b"], ("backup", "state", Path("b"), {}), "wrote b: keep it as safe", False),
        (["restore", "b"], ("restore", "state", Path("b"), {}), "restored ", True),
        (["standby", "b"], ("restore", "state", Path("b"), {"standby": True}), "coordinator promote", False),
        (["promote"], ("promote", "state", {}), "the standby takes over", True),
        (["recover"], ("recover", "state", {}), "goes on above what members may have seen", True),
    ],
)
def test_who_puts_a_copy_back_is_told_what_is_undone(
    here: Any, did: list[Any], command: list[str], call: Any, said: str, undone: bool
) -> None:
    done = run(here, *command)
    assert done.status == 0
    assert did == [call]
    assert said in done.err
    lines = {"standby": 2, "restore": 3, "promote": 3, "recover": 3}.get(command[0], 1)
    assert len(done.err.splitlines()) == lines
    assert ("what was done since that copy is undone" in done.err) == undone
    assert ("sealring operator list" in done.err) == undone


def test_keys_that_a_backup_has_not_are_named(here: Any, did: list[Any]) -> None:
    done = run(here, "backup", "b", "--roster-key-files", "/mnt/second.key")
    assert "not in it, and needed beside it: /mnt/second.key" in done.err
