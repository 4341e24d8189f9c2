"""`sealring key`, as a user runs it."""

from __future__ import annotations

import getpass
import os
import pwd
import stat
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.here.leftovers import temporary_folder


def test_keys_are_made_listed_and_revoked(here: Any, home: Path) -> None:
    state = home / "gw"
    made = here("key", "create", "--state-dir", str(state), "--label", "laptop", "--lifetime", "3d")
    assert made.status == 0, made.err
    text = made.out.strip()
    assert text.startswith("srk_")
    assert text not in made.err
    assert "no gateway has been enrolled" in made.err
    assert "from now on it answers no request without one" in made.err
    key_id = text.split("_")[1]
    both = ("--scope", "inference", "--scope", "read")
    second = here("key", "create", "--state-dir", str(state), *both, "--json")
    assert "from now on" not in second.err
    other = second.data
    assert other["scopes"] == ["inference", "read"]
    assert "hash" not in other
    listed = here("key", "list", "--state-dir", str(state), "--json").data
    assert [one["id"] for one in listed] == [key_id, other["id"]]
    assert listed[0]["label"] == "laptop"
    assert listed[0]["expires"] - listed[0]["created"] == 3 * 86_400
    assert listed[1]["expires"] == 0
    revoked = here("key", "revoke", key_id, "--state-dir", str(state))
    assert (revoked.status, "no key is usable" in revoked.err) == (0, False)
    table = here("key", "list", "--state-dir", str(state)).out.splitlines()
    assert table[1].endswith("revoked")
    assert table[2].endswith("usable")
    assert "no key is usable" in here("key", "revoke", other["id"], "--state-dir", str(state)).err
    assert stat.S_IMODE((state / "keys.json").stat().st_mode) == 0o600
    assert text.encode() not in b"".join(file.read_bytes() for file in state.iterdir())


def test_a_key_may_use_so_many_tokens_a_day(here: Any, home: Path) -> None:
    at = ("--state-dir", str(home / "gw"))
    made = here("key", "create", *at, "--tokens-a-day", "200000", "--json").data
    assert made["tokens_a_day"] == 200_000
    assert "200,000" in here("key", "list", *at).out
    assert "may use 5,000 tokens a day" in here("key", "limit", made["id"], *at, "--tokens-a-day", "5000").err
    assert here("key", "list", *at, "--json").data[0]["tokens_a_day"] == 5000
    assert "any number of tokens" in here("key", "limit", made["id"], *at, "--tokens-a-day", "0").err
    assert here("key", "limit", "nobody", *at, "--tokens-a-day", "1").status == 3


def test_how_long_a_key_is_good_for_is_said(here: Any, host: Any, home: Path) -> None:
    state = home / "gw"
    state.mkdir()
    (state / "member.json").write_text("{}")
    at = ("--state-dir", str(state))
    made = here("key", "create", *at)
    assert made.err.splitlines() == [
        "good for inference until it is revoked; use: authorization: Bearer KEY",
        "this is the gateway's first key: from now on it answers no request without one",
    ]
    first = made.out.split("_")[1]
    made = here("key", "create", *at, "--lifetime", "1h", "--scope", "read", "--scope", "admin")
    second = here("key", "list", *at, "--json").data[1]
    assert second["expires"] - second["created"] == 3600
    assert made.err == "good for admin, read, and ends in 60 minutes; use: authorization: Bearer KEY\n"
    host.now = lambda: second["expires"] + 1.0
    rows = here("key", "list", *at).out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [first, second["id"]]
    assert [row.split()[-1] for row in rows[1:]] == ["usable", "expired"]
    assert here("key", "revoke", first, *at).err.splitlines() == [
        f"revoked {first}",
        "no key is usable now: the gateway answers no request until you create one",
    ]


def test_a_key_of_the_lan_door_is_found_by_who_looks_at_the_other_list(here: Any, home: Path) -> None:
    state = ("--state-dir", str(home / "gw"))
    assert "LAN" not in here("key", "list", *state).err
    here("key", "create", "--lan", *state)
    (made,) = here("key", "list", "--lan", "--json", *state).data
    assert "of 1: sealring key list --lan" in here("key", "list", *state).err
    assert "--lan" in here("key", "limit", made["id"], "--tokens-a-day", "9", *state).err


def test_what_is_refused(here: Any, home: Path) -> None:
    state = str(home / "gw")
    unknown = here("key", "revoke", "nothing", "--state-dir", state)
    assert unknown.status != 0
    assert "[NO_SUCH_KEY]" in unknown.err
    assert here("key", "create", "--scope", "root", "--state-dir", state).status == 2
    for lifetime, status in (("0.5s", 2), ("1s", 0), ("315360000s", 0), ("315360001s", 2)):
        assert here("key", "create", "--state-dir", state, "--lifetime", lifetime).status == status
    assert "[BAD_LABEL]" in here("key", "create", "--label", "x" * 99, "--state-dir", state).err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can work in another account's folder")
@pytest.mark.parametrize(
    "line",
    [
        "key create",
        "key list",
        "gateway leave",
        "node nonce",
        "coordinator promote",
        "coordinator new-operator",
    ],
)
def test_root_writes_nothing_into_a_services_folder(here: Any, home: Path, line: str) -> None:
    """The service could not read it: one key that root makes would lock the gateway out."""
    state = home / "service"
    state.mkdir()
    (state / "member.json").write_text("{}")
    os.chown(state, pwd.getpwnam("nobody").pw_uid, -1)
    refused = here(*line.split(), "--state-dir", str(state))
    assert (refused.status, "[OTHERS_STATE]" in refused.err, refused.out) == (6, True, "")
    assert f"sudo -H -u nobody sealring {line}" in refused.err
    assert [file.name for file in state.iterdir()] == ["member.json"]


def test_the_lan_door_has_keys_of_its_own_and_loses_all_by_one_command(here: Any, home: Path) -> None:
    """They ask nothing of programs on loopback."""
    at = ("--state-dir", str(home / "gw"))
    first, second = (here("key", "create", "--lan", *at, "--label", name) for name in ("anna", "ben"))
    assert "from now on" not in first.err
    assert here("key", "list", *at, "--json").data == []
    listed = here("key", "list", "--lan", *at, "--json").data
    assert [one["label"] for one in listed] == ["anna", "ben"]
    ids = [one["id"] for one in listed]
    assert second.out.split("_")[1] == ids[1]
    assert here("key", "limit", "--lan", ids[0], *at, "--tokens-a-day", "5").status == 0
    for words in ((), (ids[0], "--all")):
        assert "name the ID of one key, or --all" in here("key", "revoke", "--lan", *words, *at).err
    done = here("key", "revoke", "--lan", "--all", *at)
    assert [line for line in done.err.splitlines() if "note" not in line] == [
        f"revoked {ids[0]}",
        f"revoked {ids[1]}",
        "no key is usable now: the LAN door closes",
    ]
    again = here("key", "revoke", "--lan", "--all", *at)
    assert (again.status, "revoked" in again.err) == (0, False)


def test_keys_stored_prompts_and_the_doctor_are_those_of_a_demo_that_runs(
    here: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "own"))
    monkeypatch.setenv("SEALRING_CONFIG", "")
    with temporary_folder() as folder:
        (folder / "ports.json").write_text('{"gateway": 4712}')
        (folder / "gateway").mkdir()
        made = here("key", "create")
        assert f"found the demo in {folder}" in made.err
        assert (folder / "gateway" / "keys.json").is_file()
        (listed,) = here("key", "list", "--json").data
        assert listed["label"] == f"key 1 of {getpass.getuser()}", "whose it is"
        assert here("key", "list", "--state-dir", str(home / "gw"), "--json").data == []
        for words in (("cache", "list"), ("doctor", "--json")):
            assert f"found the demo in {folder}" in here(*words).err
    assert "found the demo" not in here("key", "list").err
