"""The memory that macOS lets the GPU hold, against the memory that this node offers."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sealring.doctor.report import Finding, note, ok, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.mesh.units import size

SYSCTL = "/usr/sbin/sysctl"
WIRED_LIMIT = "iogpu.wired_limit_mb"
SYSTEM_NEEDS = 4 << 30
"""Bytes that macOS should keep for itself; with less it was seen to freeze."""

_NUMBER = re.compile(r"\s*([0-9]{1,12})\s*\Z")


def parse_number(text: str) -> int | None:
    """A number alone, as `sysctl -n` prints it."""
    found = _NUMBER.match(text)
    return int(found[1]) if found else None


def wired_limit(system: System) -> int | None:
    """The limit in bytes that was set by hand; 0 for macOS's own limit, None if it is unknown."""
    found = parse_number(system.run(SYSCTL, "-n", WIRED_LIMIT).text)
    return None if found is None else found << 20


def raise_command(wanted: int) -> str:
    """The command that sets the limit to at least `wanted` bytes."""
    return f"sudo {SYSCTL} {WIRED_LIMIT}={-(-wanted >> 20)}"


def check(system: System, view: View) -> Iterator[Finding]:
    """The limit by itself; `cluster` compares it with the plan."""
    limit, total = wired_limit(system), system.memory()
    if limit is None:
        why = system.run(SYSCTL, "-n", WIRED_LIMIT).why or "sysctl printed no number"
        yield unknown("memory.wired_limit", "the GPU's memory limit", why, f"{SYSCTL} {WIRED_LIMIT}")
    elif limit == 0:
        yield ok("memory.wired_limit", "the GPU's memory limit is macOS's own, about three quarters")
    elif limit > total - SYSTEM_NEEDS:
        yield warning(
            "memory.wired_limit",
            f"the GPU may hold {size(limit)} of {size(total)} of memory",
            "with little left for itself macOS swaps or freezes",
            "leave it at least 4 GiB",
            raise_command(max(total - SYSTEM_NEEDS, total // 2)),
        )
    else:
        yield note(
            "memory.wired_limit",
            f"the GPU may hold {size(limit)} of {size(total)} of memory, set by hand",
            "macOS forgets this limit at every restart",
        )
    own = view.settings.memory_limit
    if limit and own is not None and own > limit:
        yield warning(
            "memory.setting",
            f"memory_limit is {size(own)}, more than the {size(limit)} that the GPU may hold",
            "the smaller of the two counts",
            "raise the GPU's limit, or lower memory_limit",
            raise_command(own),
        )
