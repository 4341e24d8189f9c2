"""What is installed: sealring, its protocol, mlx and the system's build."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

from sealring.cli.doctor.report import Finding, ok, problem
from sealring.cli.doctor.system import System
from sealring.cli.doctor.view import View

SW_VERS = "/usr/bin/sw_vers"
PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm")
_VERSION = re.compile(r"^(ProductVersion|BuildVersion):\s*(\S{1,40})\s*$", re.MULTILINE)


def parse_sw_vers(text: str) -> tuple[str, str]:
    """Version and build of macOS; empty where they are not said."""
    found = {match[1]: match[2] for match in _VERSION.finditer(text)}
    return found.get("ProductVersion", ""), found.get("BuildVersion", "")


def os_version(system: System) -> str:
    """The system's version, such as 26.2."""
    if system.platform == "darwin":
        return parse_sw_vers(system.run(SW_VERS).text)[0]
    return platform.release()


def os_build(system: System) -> str:
    """macOS's build, such as 25C56."""
    return parse_sw_vers(system.run(SW_VERS).text)[1] if system.platform == "darwin" else ""


def packages(system: System) -> dict[str, str]:
    """The versions of what a node computes with, and of the interpreter."""
    found = {name: system.package(name) for name in PACKAGES}
    return {"python": platform.python_version(), **{name: one for name, one in found.items() if one}}


def check(system: System, view: View) -> Iterator[Finding]:
    """Whether what a node needs is there; the machines are compared in `cluster`."""
    own, installed = system.package("sealring"), packages(system)
    missing = [name for name in ("mlx", "mlx-lm") if name not in installed]
    if not own:
        missing.append("sealring")
    if missing:
        yield problem(
            "versions.installed",
            f"not installed: {', '.join(missing)}",
            "a node computes with them",
            "install sealring again, as the README says",
        )
        return
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    build = os_build(system)
    where = f"{system.platform} {os_version(system)}" + (f" ({build})" if build else "")
    yield ok("versions.installed", f"sealring {own} with {shown} on {where}")
