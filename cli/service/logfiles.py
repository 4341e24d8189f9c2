"""The log files of the components on this machine, and their last lines as they grow."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from sealring.cli.here.leftovers import running
from sealring.cli.service.launchd import COMPONENTS, Service
from sealring.cli.terminal.output import printable
from sealring.mesh.errors import PermissionDenied

_CHUNK = 1 << 20


def find_logs(state: Path | None, components: Sequence[str]) -> dict[str, Path]:
    """Log files by the names of what writes them: of the local cluster in `state`, else of all that are here.

    `components` are the ones wanted; "node" stands for every node. None: all. Where several local clusters
    run, their folders' names go before the components'.
    """
    folders = [state] if state is not None else running()
    found = {
        file.stem if len(folders) == 1 else f"{folder.name}/{file.stem}": file
        for folder in folders
        for file in sorted((folder / "logs").glob("*.log"))
    }
    if state is None:
        services = {f"service {name}": Path(Service(name).log_file) for name in COMPONENTS}
        found |= {name: file for name, file in services.items() if file.exists()}
    return {
        name: file
        for name, file in found.items()
        if not components or any(_is(name, wanted) for wanted in components)
    }


def _is(name: str, wanted: str) -> bool:
    own = name.rpartition("/")[2].removeprefix("service ")
    return own == wanted or own.startswith(f"{wanted}-")


class Tail:
    """A log file's lines. One that was rotated away is followed under its name; half a line waits."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = 0
        self._at = 0
        self._rest = b""

    def last(self, count: int) -> list[str]:
        """The last lines; `new` goes on behind them. Raises PermissionDenied (NEEDS_ROOT)."""
        return list(deque(self.new(), maxlen=count))

    def new(self) -> Iterator[str]:
        """The lines that have come since. Raises PermissionDenied (NEEDS_ROOT)."""
        try:
            opened = self._file.open("rb")
        except FileNotFoundError:
            return
        except PermissionError:
            raise PermissionDenied(
                f"{self._file} cannot be read", hint="run it with sudo", reason="NEEDS_ROOT"
            ) from None
        with opened:
            found = os.fstat(opened.fileno())
            if found.st_ino != self._inode or found.st_size < self._at:
                self._inode, self._at, self._rest = found.st_ino, 0, b""
            opened.seek(self._at)
            while chunk := opened.read(_CHUNK):
                self._at += len(chunk)
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                for line in whole:
                    yield _printable(line)


def _printable(line: bytes) -> str:
    """The line without characters that could steer the terminal."""
    return printable(line.decode("utf-8", "replace").rstrip("\r"), keep="\t")
