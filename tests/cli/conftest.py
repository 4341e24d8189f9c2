from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import Coordinator, FakeHost


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="writes what comes out into transcripts")


@dataclass(frozen=True)
class Done:
    """A finished command."""

    status: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Sealring = Callable[..., Done]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))  # no other demo runs
    return folder


@pytest.fixture
def sealring(home: Path) -> Sealring:
    """Runs the command as a process of its own, in an empty home folder."""

    def run(*arguments: str, stdin: str = "", **environment: str) -> Done:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
        given = {"HOME": str(home), "XDG_STATE_HOME": "", "XDG_CONFIG_HOME": "", **environment}
        done = subprocess.run(
            [sys.executable, "-m", "sealring.cli", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            cwd=home,
            env=kept | given,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def umask() -> Iterator[None]:
    """Daemons and `up` tighten it for their process, which here is the tests'."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def signals() -> Iterator[None]:
    """Commands that clean up after themselves take the signals that end them."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.fixture
def host() -> FakeHost:
    """What commands that run in this process reach."""
    return FakeHost()


@pytest.fixture
def here(
    home: Path,
    host: FakeHost,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    umask: None,
    signals: None,
) -> Sealring:
    """Runs the command in this process, which is quicker, in an empty home folder."""
    for name in [name for name in os.environ if name.startswith("SEALRING_")]:
        monkeypatch.delenv(name)
    for name, value in (("HOME", str(home)), ("XDG_STATE_HOME", ""), ("XDG_CONFIG_HOME", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(home)

    def run(*arguments: str, stdin: str = "", **environment: str) -> Done:
        from sealring.cli.main import main

        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        collected = gc.get_threshold()
        with pytest.raises(SystemExit) as ended:
            main(arguments, host)
        gc.set_threshold(*collected)
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def coordinator(host: FakeHost) -> Coordinator:
    """What commands call instead of a coordinator, in this process."""
    host.coordinator = Coordinator()
    return host.coordinator
