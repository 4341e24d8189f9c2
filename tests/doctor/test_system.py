"""The real system: bounded commands, and questions that are answered whatever is asked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from closed import closed, make_sick

from sealring.doctor.system import Folder, Printed, System, _run, error_name

SHELL = "/bin/sh"


def test_a_command_prints() -> None:
    assert System().run(SHELL, "-c", "echo out; echo err >&2") == Printed("out\n")
    assert System().run(SHELL, "-c", "echo out; echo err >&2", errors=True) == Printed("out\nerr\n")


def test_what_was_answered_is_not_run_again(tmp_path: Path) -> None:
    system = System()
    command = (SHELL, "-c", f"echo again >> {tmp_path}/log; cat {tmp_path}/log")
    assert [system.run(*command).text for _ in range(3)] == ["again\n"] * 3


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nowhere/at/all",), "all is not on this machine"),
        (("/etc/passwd",), "passwd: Permission denied"),
        ((SHELL, "-c", "echo said; exit 3"), "sh ended with status 3"),
        ((SHELL, "-c", "echo said; kill -9 $$"), "sh ended with status -9"),
    ],
)
def test_what_goes_wrong_is_an_answer(command: tuple[str, ...], why: str) -> None:
    answer = System().run(*command)
    assert answer.why == why
    assert answer.text == ("said\n" if "said" in " ".join(command) else "")


def test_a_command_that_does_not_end_is_ended_with_what_it_started() -> None:
    answer = _run((SHELL, "-c", "echo $$; sleep 3600 & wait"), 0.2, False)
    assert answer.why == "sh did not answer in 0.2 s"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("head -c 1048576 /dev/zero", ""),
        ("head -c 1048577 /dev/zero", "sh printed too much"),
        ("exec cat /dev/zero", "sh printed too much"),
    ],
)
def test_a_mebibyte_may_be_printed_and_no_more(command: str, why: str) -> None:
    answer = System().run(SHELL, "-c", command)
    assert (len(answer.text), answer.why) == (1 << 20, why)


def test_commands_have_the_plain_locale_and_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s")
    monkeypatch.delenv("TMPDIR", raising=False)
    shown = System().run("/usr/bin/env").text.splitlines()
    assert {line.partition("=")[0] for line in shown} == {"LC_ALL", "PATH", "HOME"}
    assert "LC_ALL=C" in shown


def test_folders(tmp_path: Path) -> None:
    system = System()
    assert system.folder(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    assert system.folder(tmp_path / "file") is None
    model = tmp_path / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    (tmp_path / "models").chmod(0o755)
    assert system.folder(tmp_path / "models") == Folder(True, os.geteuid(), False, 1)
    (tmp_path / "models").chmod(0o777)
    assert system.folder(tmp_path / "models") == Folder(True, os.geteuid(), True, 1)
    (tmp_path / "models").chmod(0o720)
    assert system.folder(tmp_path / "models") == Folder(True, os.geteuid(), True, 1)
    found = system.free_space(tmp_path / "not" / "made" / "yet")
    assert found is not None
    assert 0 <= found[0] <= found[1]
    assert system.owner(tmp_path / "missing") == "OWNER"


def test_a_folder_that_holds_very_much(tmp_path: Path) -> None:
    model, folder = tmp_path / "tiny", tmp_path / "models"
    for one in (model, folder):
        one.mkdir(mode=0o700)
    (model / "config.json").touch()
    for number in range(4097):
        (folder / str(number)).symlink_to(model)
    assert System().folder(folder) == Folder(True, os.geteuid(), False, 4096)


def test_a_folder_that_is_closed_is_there_and_so_is_one_of_a_sick_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "models").mkdir(parents=True)
    tmp_path.chmod(0o700)
    with closed(tmp_path / "home"):
        assert System().folder(tmp_path / "home" / "models") == Folder(False, -1, False, why="EACCES")
        assert System().folder(tmp_path / "home") == Folder(False, os.geteuid(), False, why="EACCES")
        assert System().folder(tmp_path / "none") is None
        assert System().folder(tmp_path) == Folder(True, os.geteuid(), False, 0), "a closed one is no model"
    make_sick(monkeypatch, tmp_path / "home")
    assert System().folder(tmp_path / "home") == Folder(False, -1, False, why="EIO")


def test_ports() -> None:
    system = System()
    assert system.bind_error("127.0.0.1", 0) == ""
    assert system.bind_error("::1", 0) in ("", "EADDRNOTAVAIL"), "tried in its own family"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert system.bind_error("127.0.0.1", taken.getsockname()[1]) == "EADDRINUSE"
    assert system.bind_error("192.0.2.1", 0) == "EADDRNOTAVAIL"
    assert error_name(OSError("it has no number")) == "UNKNOWN"


def test_this_process() -> None:
    system = System()
    assert os.access(system.executable(), os.X_OK)
    assert os.access(system.python(), os.X_OK)
    assert system.memory() > 1 << 20
    assert system.file_limit() != 0
    assert system.package("sealring")
    assert system.package("no-such-package") == ""
    assert system.now() > 1e9
