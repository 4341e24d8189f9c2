"""Machines of a cluster as people make one: `sealring` with a home of its own for each, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
from kernels import share_kernels

from sealring.mesh.system.paths import state_root_of

_STARTED = {"up": ("sealring join", "goes on as a member"), "join": ("the node runs until",)}
"""The words of a command that listens at the ports that it has chosen."""

_PORTS = os.path.join(tempfile.gettempdir(), f"sealring-tests-ports-{os.getuid()}")

SEALRING = str(Path(sys.executable).with_name("sealring"))


class Machine:
    """A machine on which `sealring` is typed. `within` are the words before a command that lead there."""

    def __init__(self, folder: Path, within: Sequence[str] = ()) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self.within = within
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SEALRING_")}
        self.environment = kept | {"HOME": str(folder), "XDG_STATE_HOME": "", "XDG_CONFIG_HOME": ""}
        share_kernels(self.state)

    @property
    def state(self) -> Path:
        """The folder in which `sealring` keeps everything."""
        return state_root_of(self.folder)

    def run(self, *words: str, status: int | None = 0) -> str:
        """The standard output of a command that ends by itself, with this exit status, or any for None."""
        command = [*self.within, SEALRING, *words]
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert status is None or done.returncode == status, done.stderr
        return done.stdout

    def said(self, *words: str) -> str:
        """The words of a command for people, whatever its exit status."""
        command = [*self.within, SEALRING, *words]
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.stderr

    @contextmanager
    def running(self, *words: str, stdin: str = "", typed: str = "") -> Iterator[Running]:
        """A command that goes on until it is interrupted, as Ctrl-C does; it has to end well then.

        With `typed` it has a terminal, on which a person types that.
        """
        with contextlib.ExitStack() as choosing:
            if words[0] in _STARTED and not self.within:  # else another test chooses the same
                fcntl.flock(choosing.enter_context(open(_PORTS, "w")), fcntl.LOCK_EX)
            running = Running(self._start(words, stdin, typed))
            try:
                if words[0] in _STARTED and not self.within:
                    started = _STARTED[words[0]]
                    running.wait_for(lambda line: any(one in line for one in started))
                choosing.close()
                yield running
                running.stop()
            finally:
                running.process.kill()
                running.close()

    def _start(self, words: Sequence[str], stdin: str, typed: str) -> subprocess.Popen[str]:
        own, its = os.openpty() if typed else (None, subprocess.PIPE)
        process = subprocess.Popen(
            [*self.within, SEALRING, *words],
            env=self.environment,
            stdin=its,
            stdout=its,
            stderr=its if typed else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if own is not None:
            os.close(its)
            os.write(own, typed.encode())
            process.stdout = open(own, errors="replace")  # noqa: SIM115 - Running closes it
        else:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
        return process


class Running:
    """A command and the lines that it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, what: Callable[[str], bool] | str) -> str:
        """The first line with these words, said or to come."""
        wanted = what if callable(what) else lambda line: what in line

        def find() -> str | None:
            return next((line for line in self.lines if wanted(line)), None)

        with self._said:
            self._said.wait_for(lambda: find() is not None or not self._reader.is_alive() or self._ended)
            found = find()
        assert found is not None, "it ended before it said so:\n" + "\n".join(self.lines)
        return found

    def family(self) -> list[psutil.Process]:
        """The command and all that it has started."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> None:
        """Ctrl-C; nothing of it is left then. It ends with status 0. Once more does nothing."""
        if self.process.returncode is not None:
            return
        family = self.family()
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait() == 0, "\n".join(self.lines)
        psutil.wait_procs(family)
        assert not any(one.is_running() for one in family)

    def close(self) -> None:
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    _ended = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):  # the end of a terminal on Linux
            for line in self.process.stdout:
                with self._said:
                    self.lines.append(line.rstrip("\n"))
                    self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()
