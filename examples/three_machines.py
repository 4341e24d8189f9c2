"""Records how three machines come to an answer on the third, by four commands.

    sudo .venv/bin/python examples/three_machines.py [MODEL [QUESTION]] > docs/three-machines.txt

Each machine is a network namespace of this Linux machine. It has a host name and a home folder of its own.
The switch between them carries real multicast. On the first one `sealring up --model` is typed, on the others
`sealring join` and the code that the first one shows, on the third `sealring connect --write`. Then Claude
Code answers there; or curl, if no `claude` is in the PATH, and for the demo model, whose context is too short
for agents. Every line is printed behind its machine and the seconds since the start. Nothing is left
afterwards. It needs root, `ip` and `unshare`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NAMES = ("studio", "mini", "book")
SEALRING = str(Path(sys.executable).with_name("sealring"))
_CODE = re.compile(r"[0-9]{3}-[0-9]{4}\Z")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|[\r\x00-\x08\x0b-\x1f]")
_BAR = re.compile(r"[\u2800-\u28ff] +(.*?) *━+ *[0-9:]+\Z")
"""A progress bar, which is drawn ten times a second."""

_PATIENCE = 300.0
_OWN_HOST_NAME = 'hostname "$1" && shift && exec "$@"'


class Recording:
    """Prints each line of each machine once, behind the time since the start."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    def say(self, name: str, line: str) -> None:
        with self._lock:
            print(f"{time.monotonic() - self._begun:6.1f} s  {name:<6}  {line}", flush=True)


class Typed:
    """A command that somebody has typed on a machine, on a terminal."""

    def __init__(self, machine: Machine, words: Sequence[str]) -> None:
        self._machine = machine
        self.lines: list[str] = []
        self._asks = ""
        self._said = threading.Condition()
        self._terminal, its = os.openpty()
        self.process = subprocess.Popen(
            [*machine.inside, SEALRING if words[0] == "sealring" else words[0], *words[1:]],
            env=machine.environment,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        os.close(its)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text: str) -> None:
        os.write(self._terminal, f"{text}\n".encode())

    def wait_for(self, wanted: Callable[[str], object]) -> str:
        """The first line of which this is true, said or to come, or a question behind which it waits. Exits
        where none comes."""

        def found() -> str | None:
            return next((line for line in (*self.lines, self._asks) if wanted(line)), None)

        with self._said:
            self._said.wait_for(lambda: found() is not None or not self._reader.is_alive(), _PATIENCE)
            line = found()
        if line is None:
            raise SystemExit(f"{self._machine.name} did not say what was waited for")
        return line

    def end(self) -> None:
        """What is left of it after Ctrl-C is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(_PATIENCE)

    def _read(self) -> None:
        left = b""
        with contextlib.suppress(OSError):  # Linux: the terminal's other end is closed
            while part := os.read(self._terminal, 1 << 16):
                *whole, left = (left + part).replace(b"\r", b"\n").split(b"\n")
                for line in whole:
                    self._take(line)
                with self._said:
                    self._asks = _ESCAPES.sub("", left.decode(errors="replace"))
                    self._said.notify_all()
        self._take(left)
        os.close(self._terminal)

    def _take(self, line: bytes) -> None:
        text = _ESCAPES.sub("", line.decode(errors="replace")).rstrip()
        bar = _BAR.match(text)
        if bar is not None:
            text = f"... {bar[1]}" if bar[1] else ""
        if text and (not self.lines or self.lines[-1] != text):
            self._machine.say(text)
            with self._said:
                self.lines.append(text)
                self._said.notify_all()


class Machine:
    """A network namespace with a home folder."""

    def __init__(self, name: str, space: str, home: Path, recording: Recording) -> None:
        self.name, self.recording = name, recording
        home.mkdir()
        self.home = home
        self.inside = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            _OWN_HOST_NAME,
            "sh",
            name,
            "ip",
            "netns",
            "exec",
            space,
        ]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SEALRING_")}
        self.environment = kept | {
            "HOME": str(home),
            "XDG_STATE_HOME": "",
            "XDG_CONFIG_HOME": "",
            "COLUMNS": "120",
            "NO_PROXY": "*",
        }

    def say(self, text: str) -> None:
        self.recording.say(self.name, text.replace(str(self.home), "~"))

    @contextlib.contextmanager
    def typed(self, *words: str) -> Iterator[Typed]:
        shown = " ".join(f'"{word}"' if " " in word else word for word in words)
        first, *more = shown.splitlines()
        self.say(f"$ {first}{' ...' if more else ''}")
        command = Typed(self, words)
        try:
            yield command
        finally:
            command.end()

    def run(self, *words: str) -> list[str]:
        """The lines of a command that ends by itself. Exits where it fails."""
        with self.typed(*words) as command:
            if command.process.wait(_PATIENCE):
                raise SystemExit(f"{self.name}: {words[0]} failed")
        return command.lines


@contextlib.contextmanager
def network(spaces: Sequence[str]) -> Iterator[None]:
    """The namespaces on one switch, at 10.77.0.1, 10.77.0.2 and so on."""
    first = spaces[0]
    with contextlib.ExitStack() as stack:
        for space in spaces:
            ip("netns", "add", space)
            stack.callback(ip, "netns", "delete", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", first, "link", "add", "net0", "type", "bridge")
        for number, space in enumerate(spaces[1:], 1):
            port = f"port{number}"
            ip("-n", first, *("link", "add", port, "type", "veth", "peer", "name", "net0", "netns", space))
            ip("-n", first, "link", "set", port, "master", "net0", "up")
        for number, space in enumerate(spaces, 1):
            ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "net0")
            ip("-n", space, "link", "set", "net0", "up")
        yield


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main(model: str = "demo", question: str = "What is the capital of France?") -> None:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        raise SystemExit("this needs root on Linux, with ip, unshare and hostname")
    recording = Recording()
    spaces = [f"three-{os.getpid()}-{name}" for name in NAMES]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(network(spaces))
        studio, mini, book = (
            Machine(name, space, folder / name, recording) for name, space in zip(NAMES, spaces, strict=True)
        )
        up = stack.enter_context(studio.typed("sealring", "up", "--model", model))
        code = up.wait_for(lambda line: _CODE.match(line.strip())).strip()
        for machine in (mini, book):
            join = stack.enter_context(machine.typed("sealring", "join"))
            join.wait_for(lambda line: line.startswith("The code that"))
            join.type(f"{code}\n")  # and no standby
            up.wait_for(lambda line, name=machine.name: f"{name} is online" in line)
            join.wait_for(lambda line: "programs ask at" in line)
        up.wait_for(lambda line: "is serving" in line)
        if model != "demo" and shutil.which("claude"):
            book.run("sealring", "connect", "claude", "--write")
            book.run("claude", "-p", "--allowedTools", "Read", "--", question)
        else:
            book.run("sh", "-c", "\n".join(book.run("sealring", "connect", "curl")[:3]))
        recording.say("", "Ctrl-C on each")


if __name__ == "__main__":
    main(*sys.argv[1:])
