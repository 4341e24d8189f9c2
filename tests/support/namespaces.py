"""Machines in network namespaces of their own, joined by a switch, with host names of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from machines import Machine

_TOOLS = ("ip", "unshare", "hostname")
_HOST = 'hostname "$1" && shift && exec "$@"'


@contextmanager
def separate_machines(folder: Path, names: Sequence[str]) -> Iterator[list[Machine]]:
    """One machine per name, at 10.77.0.1, 10.77.0.2 and so on. Needs root; nothing of it is left."""
    if os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)):
        pytest.skip(f"network namespaces need root and {', '.join(_TOOLS)}")
    spaces = [f"sealring-{os.getpid()}-{name}" for name in names]
    with ExitStack() as stack:
        for space in spaces:
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "delete", space)
            _ip("-n", space, "link", "set", "lo", "up")
        switch = spaces[0]
        _ip("-n", switch, "link", "add", "net0", "type", "bridge")
        for number, space in enumerate(spaces[1:], 1):
            _ip(
                *("-n", switch, "link", "add", f"port{number}", "type", "veth"),
                *("peer", "name", "net0", "netns", space),
            )
            _ip("-n", switch, "link", "set", f"port{number}", "master", "net0", "up")
        for number, space in enumerate(spaces, 1):
            _ip("-n", space, "address", "add", f"10.77.0.{number}/24", "dev", "net0")
            _ip("-n", space, "link", "set", "net0", "up")
        yield [
            Machine(
                folder / name,
                ("unshare", "--uts", "sh", "-c", _HOST, "sh", name, "ip", "netns", "exec", space),
            )
            for name, space in zip(names, spaces, strict=True)
        ]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
