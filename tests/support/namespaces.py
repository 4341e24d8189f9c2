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
    with joined(spaces):
        yield [
            Machine(
                folder / name,
                ("unshare", "--uts", "sh", "-c", _HOST, "sh", name, "ip", "netns", "exec", space),
            )
            for name, space in zip(names, spaces, strict=True)
        ]


@contextmanager
def joined(spaces: Sequence[str]) -> Iterator[None]:
    """Network namespaces at 10.77.0.1, 10.77.0.2 and so on; "" is the caller's own.

    The first has the switch, and the other end of the n-th one's cable as `portN`.
    """
    switch = spaces[0]
    with ExitStack() as stack:
        for space in filter(None, spaces):
            ip("netns", "add", space)
            stack.callback(ip, "netns", "delete", space)
        for space in spaces:
            ip("link", "set", "lo", "up", space=space)
        ip("link", "add", "net0", "type", "bridge", space=switch)
        stack.callback(ip, "link", "delete", "net0", space=switch)
        for number, space in enumerate(spaces[1:], 1):
            cable = ("link", "add", f"port{number}", "type", "veth", "peer", "name", "net0", "netns", space)
            ip(*cable, space=switch)
            ip("link", "set", f"port{number}", "master", "net0", "up", space=switch)
        for number, space in enumerate(spaces, 1):
            ip("address", "add", f"10.77.0.{number}/24", "dev", "net0", space=space)
            ip("link", "set", "net0", "up", space=space)
        yield


def ip(*words: str, space: str = "") -> None:
    subprocess.run(["ip", *(("-n", space) if space else ()), *words], check=True)
