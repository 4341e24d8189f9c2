"""The real system: bounded commands, and questions that are answered whatever is asked."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from closed import closed, make_sick

from sealring.doctor import system as system_module
from sealring.doctor.system import Answer, Folder, System, _run, error_name

SHELL = "/bin/sh"


def test_a_command_prints() -> None:
    assert System().run(SHELL, "-c", "echo out; echo err >&2") == Answer("out\n")
    assert System().run(SHELL, "-c", "echo out; echo err >&2", errors=True) == Answer("out\nerr\n")


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


def test_a_command_that_prints_for_ever_is_cut() -> None:
    answer = System().run(SHELL, "-c", "while :; do echo 0123456789012345678901234567890123456789; done")
    assert answer.why == "sh printed too much"
    assert len(answer.text) == 1 << 20


@pytest.mark.parametrize(
    ("size", "why", "killed"), [(1 << 20, "", 0), ((1 << 20) + 1, "sh printed too much", 1)]
)
def test_so_much_may_be_printed_and_no_more(
    monkeypatch: pytest.MonkeyPatch, size: int, why: str, killed: int
) -> None:
    class Process:
        pid, returncode = 7, 0

        def __init__(self, *_: object, **__: object) -> None:
            self.stdout = io.BytesIO(b"x" * size)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    kills: list[Any] = []
    monkeypatch.setattr(system_module.subprocess, "Popen", Process)
    monkeypatch.setattr(system_module, "signal_group", lambda *of: kills.append(of))
    assert _run((SHELL,), 60.0, False) == Answer("x" * (1 << 20), why)
    assert kills == [(7, signal.SIGKILL)] * killed


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


def test_a_folder_that_may_not_be_read_or_holds_very_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").touch()
    tmp_path.chmod(0o700)
    entries = [SimpleNamespace(path=str(model))] * 4097
    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(iter(entries)))
    assert System().folder(tmp_path) == Folder(True, os.geteuid(), False, 4096)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert System().folder(tmp_path) == Folder(False, os.geteuid(), False, 4096, "EACCES")


def test_a_folder_that_is_closed_is_there_and_so_is_one_of_a_sick_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "models").mkdir(parents=True)
    with closed(tmp_path / "home"):
        assert System().folder(tmp_path / "home" / "models") == Folder(False, -1, False, why="EACCES")
        assert System().folder(tmp_path / "home") == Folder(False, os.geteuid(), False, why="EACCES")
        assert System().folder(tmp_path / "none") is None
    make_sick(monkeypatch, tmp_path / "home")
    assert System().folder(tmp_path / "home") == Folder(False, -1, False, why="EIO")


def test_a_folder_whose_content_is_closed_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: Path) -> bool:
        raise PermissionError

    (tmp_path / "tiny").mkdir()
    monkeypatch.setattr(Path, "is_file", closed)
    found = System().folder(tmp_path)
    assert found is not None
    assert found.models == 0


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_is_tried_in_its_family(
    monkeypatch: pytest.MonkeyPatch, host: str, family: socket.AddressFamily
) -> None:
    tried: list[Any] = []

    def create_server(address: Any, *, family: Any) -> Any:
        tried.append((address, family))
        return contextlib.nullcontext()

    monkeypatch.setattr(socket, "create_server", create_server)
    assert System().bind_error(host, 7) == ""
    assert tried == [((host, 7), family)]


def test_ports() -> None:
    system = System()
    assert system.bind_error("127.0.0.1", 0) == ""
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
