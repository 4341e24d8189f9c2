"""RDMA over Thunderbolt: whether it is on. Only tensor deployments with `--backend jaccl` need it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sealring.cli.doctor.report import Finding, note, ok, unknown
from sealring.cli.doctor.system import System
from sealring.cli.doctor.versions import os_version
from sealring.cli.doctor.view import View

RDMA_CTL = "/usr/bin/rdma_ctl"
IBV_DEVICES = "/usr/bin/ibv_devices"
FIRST_VERSION = (26, 2)
_DEVICE = re.compile(r"^\s*(rdma_[a-z0-9]{1,15})\s+[0-9a-f]{1,32}\s*$", re.MULTILINE)


def parse_status(text: str) -> bool | None:
    """From `rdma_ctl status`."""
    return {"enabled": True, "disabled": False}.get(text.strip().rpartition(" ")[2].rstrip(".").lower())


def parse_devices(text: str) -> tuple[str, ...]:
    """From `ibv_devices`."""
    return tuple(_DEVICE.findall(text))


def parse_version(text: str) -> tuple[int, ...]:
    """Numbers of a version such as 26.2.1; empty where it is none."""
    parts = text.strip().split(".")
    good = 0 < len(parts) <= 4 and all(re.fullmatch(r"[0-9]{1,6}", part) for part in parts)
    return tuple(map(int, parts)) if good else ()


def status(system: System) -> str:
    """enabled, disabled, or nothing where it is not known."""
    found = parse_status(system.run(RDMA_CTL, "status").text)
    return "" if found is None else "enabled" if found else "disabled"


def check(system: System, view: View) -> Iterator[Finding]:
    """A note: what most deployments do without."""
    version = parse_version(os_version(system))
    if version and version < FIRST_VERSION:
        yield ok("rdma.status", "RDMA over Thunderbolt begins with macOS 26.2")
        return
    found = status(system)
    if not found:
        why = system.run(RDMA_CTL, "status").why or "rdma_ctl answered in words that are not known here"
        yield unknown("rdma.status", "RDMA over Thunderbolt", why, f"{RDMA_CTL} status")
    elif found == "disabled":
        yield ok(
            "rdma.status",
            "RDMA over Thunderbolt is off; only --backend jaccl needs it",
        )
    else:
        devices = parse_devices(system.run(IBV_DEVICES).text)
        yield note(
            "rdma.status",
            f"RDMA over Thunderbolt is on ({', '.join(devices) or 'no device'})",
            "only --backend jaccl uses it, and needs the same build of macOS on every Mac",
        )
