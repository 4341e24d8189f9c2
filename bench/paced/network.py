"""Network namespaces of paced Macs on one switch, with links that `tc netem` delays if the kernel has it."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_QUEUE = 100_000
"""Packets that may be on their way on one link; netem drops what is beyond its default of 1,000."""


@dataclass(frozen=True)
class Network:
    """Addresses: `host` of the coordinator, in this process's namespace, and one of each node's namespace.

    `shaped`: links are delayed.
    """

    host: str
    hosts: tuple[str, ...]
    spaces: tuple[str, ...]
    shaped: bool

    @property
    def words(self) -> str:
        """What a result says of it."""
        return "namespaces, tc netem" if self.shaped else "namespaces without netem; engines add the link"


WITHOUT = "loopback; engines add the link"


@contextmanager
def network(count: int, seconds: float) -> Iterator[Network | None]:
    """Namespaces for `count` nodes, whose records take `seconds` one way; None for 0, without root or `ip`.

    Nothing of it is left.
    """
    if not count or os.geteuid() != 0 or not shutil.which("ip"):
        yield None
        return
    number = os.getpid() % 250
    switch = f"macs{number}"
    spaces = tuple(f"macs-{os.getpid()}-{node}" for node in range(count))
    hosts = tuple(f"10.78.{number}.{node + 2}" for node in range(count))
    with ExitStack() as stack:
        _do("ip", "link", "add", switch, "type", "bridge")
        stack.callback(_do, "ip", "link", "delete", switch)
        _do("ip", "address", "add", f"10.78.{number}.1/24", "dev", switch)
        _do("ip", "link", "set", switch, "up")
        for node, (space, host) in enumerate(zip(spaces, hosts, strict=True)):
            port, inside = f"{switch}p{node}", ("ip", "-n", space)
            _do("ip", "netns", "add", space)
            stack.callback(_do, "ip", "netns", "delete", space)
            _do("ip", "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", space)
            _do("ip", "link", "set", port, "master", switch, "up")
            _do(*inside, "link", "set", "lo", "up")
            _do(*inside, "address", "add", f"{host}/24", "dev", "net0")
            _do(*inside, "link", "set", "net0", "up")
        yield Network(f"10.78.{number}.1", hosts, spaces, all(_delay(space, seconds) for space in spaces))


def _do(*words: str) -> None:
    subprocess.run(words, check=True)


def _delay(space: str, seconds: float) -> bool:
    """Whether what leaves a namespace is delayed from now on: many kernels come without netem."""
    if not shutil.which("tc"):
        return False
    netem = ("netem", "delay", f"{seconds * 1e6:.0f}us", "limit", str(_QUEUE))
    command = ["tc", "-n", space, "qdisc", "add", "dev", "net0", "root", *netem]
    return subprocess.run(command, capture_output=True).returncode == 0


def enter(space: str) -> None:
    """Moves this process, which has one thread, into a namespace. Raises OSError."""
    with open(f"/run/netns/{space}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {space}")
