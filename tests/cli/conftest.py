from __future__ import annotations

import asyncio
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
from google.protobuf.message_factory import GetMessageClass

from sealring.cli.calls import members, operator
from sealring.v1 import admin_pb2

ROOT = Path(__file__).resolve().parents[2]


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
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
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
def here(
    home: Path,
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
        monkeypatch.setattr(sys, "argv", ["sealring", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        collected = gc.get_threshold()
        with pytest.raises(SystemExit) as ended:
            main()
        gc.set_threshold(*collected)
        captured = capsys.readouterr()
        return Done(int(ended.value.code or 0), captured.out, captured.err)

    return run


class Coordinator:
    """A stand-in for the Admin service: remembers the requests, and answers each method as it was told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.seconds: float | None = None
        self.answers: dict[str, Any] = {}

    async def call(self, method: str, *, seconds: float | None = None, **fields: Any) -> Any:
        asked = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods_by_name[method]
        self.asked.append((method, GetMessageClass(asked.input_type)(**fields)))
        self.seconds = seconds
        return self.answers.get(method) or GetMessageClass(asked.output_type)()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    """What commands call instead of a coordinator, in this process."""
    stand_in: Any = Coordinator()
    for module in (operator, members):
        monkeypatch.setattr(module, "run_admin", lambda context, work: asyncio.run(work(stand_in)))
    return stand_in


@pytest.fixture
def launchctl(tmp_path: Path) -> Launchctl:
    """A stand-in for launchctl on PATH that records what it is asked and answers as launchd would."""
    return Launchctl(tmp_path / "launchctl")


class Launchctl:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "loaded").mkdir()
        script = folder / "bin" / "launchctl"
        script.write_text(_SCRIPT.format(python=sys.executable, folder=str(folder)))
        script.chmod(0o755)
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def verbs(self) -> list[str]:
        """What was asked, without the questions."""
        return [call[0] for call in self.calls if call[0] != "print"]

    def fail(self, verb: str, status: int, words: str) -> None:
        (self.folder / f"fail-{verb}").write_text(json.dumps([status, words]))


_SCRIPT = """#!{python}
import json, pathlib, plistlib, sys
folder = pathlib.Path({folder!r})
verb, *rest = sys.argv[1:]
with (folder / "calls").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
failure = folder / f"fail-{{verb}}"
if failure.exists():
    status, words = json.loads(failure.read_text())
    sys.stderr.write(words + "\\n")
    sys.exit(status)
def service(target):
    return folder / "loaded" / target.split("/")[-1]
if verb == "bootstrap":
    domain, plist = rest
    label = plistlib.loads(pathlib.Path(plist).read_bytes())["Label"]
    if service(label).exists():
        sys.stderr.write("Bootstrap failed: 5: Input/output error\\n")
        sys.exit(5)
    service(label).write_text("0")
elif verb == "bootout":
    if not service(rest[0]).exists():
        sys.stderr.write("Boot-out failed: 3: No such process\\n")
        sys.exit(3)
    service(rest[0]).write_text("3")
elif verb == "print":
    file = service(rest[0])
    if file.exists() and file.read_text() in "321":
        left = int(file.read_text()) - 1
        file.write_text(str(left)) if left else file.unlink()
    if not file.exists():
        sys.stderr.write('Could not find service in domain for system\\n')
        sys.exit(113)
    print("system/" + file.name + " = {{")
    print("\\tactive count = 1\\n\\tstate = running\\n\\n\\tpid = 4711\\n\\tlast exit code = (never exited)")
    print("}}")
elif verb == "kickstart":
    if not service(rest[-1]).exists():
        sys.exit(113)
elif verb != "enable":
    sys.exit(64)
"""
