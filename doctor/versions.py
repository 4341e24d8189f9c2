"""What is installed: sealring, its protocol, mlx and the system's build."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

from sealring.doctor.report import Finding, ok, problem, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.node.computing import COMPUTING

SW_VERS, SYSCTL = "/usr/bin/sw_vers", "/usr/sbin/sysctl"
CHIP = "machdep.cpu.brand_string"
METAL = "mlx-metal"
_MATRIX_UNITS = 5
"""The first M that has them, and with them macOS 26 and MLX's wheel for it several times as fast prefill."""
_MATRIX_SYSTEM = 26
_APPLE_CHIP = re.compile(r"Apple M([0-9]{1,2})\b")
_WHEEL_SYSTEM = re.compile(r"-macosx_([0-9]{1,3})_")
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
    found = {name: system.package(name) for name in COMPUTING}
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
    if system.platform == "darwin":
        yield from _wheel(system)


def _wheel(system: System) -> Iterator[Finding]:
    """Whether MLX was installed in the build that uses all of this Mac's GPU."""
    chip = _number(_APPLE_CHIP, system.run(SYSCTL, "-n", CHIP).text)
    tag = system.wheel_tag(METAL)
    installed, mac = _number(_WHEEL_SYSTEM, tag), _number(re.compile(r"([0-9]{1,3})\."), os_version(system))
    if chip >= _MATRIX_UNITS and mac >= _MATRIX_SYSTEM > installed > 0:
        yield warning(
            "versions.mlx_wheel",
            f"MLX was installed in its build for macOS {installed} ({tag})",
            f"only the one for macOS {_MATRIX_SYSTEM} uses the matrix units of an M{chip}: prompts are read "
            f"slower. A Python that was built before macOS {_MATRIX_SYSTEM} takes this Mac's for 16",
            "install with a newer Python: platform.mac_ver() has to say the same as sw_vers",
            "python3 -c 'import platform; print(platform.mac_ver()[0])'; sw_vers -productVersion",
        )


def _number(pattern: re.Pattern[str], text: str) -> int:
    """The first group; 0 where the text does not match."""
    found = pattern.search(text)
    return int(found[1]) if found else 0
