"""What this machine can say about itself for an attestation; what it does not know is null, never true.

The tools are macOS's own, by absolute path, with a deadline. The verifier derives the trust level; an
identity key in a file never earns more than `software`, whatever is said here.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
from pathlib import Path

from sealring.mesh.crypto.key_type import KeyType
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.trust.attestation import Posture

_TOOL_SECONDS = 5.0
_MAX_OUTPUT = 4096
_MAX_TEXT = 128
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SECURE_BOOT = {
    "Full Security": True,
    "Reduced Security": False,
    "Permissive Security": False,
    "Medium Security": False,
    "No Security": False,
}


def measure_posture(*, serial: bool = False) -> Posture:
    """The facts of this machine; blocks for up to some seconds on a Mac.

    The serial number is told only where it is asked for: a device attestation has to agree with it.
    """
    posture = _mac_posture() if sys.platform == "darwin" else _other_posture()
    return dataclasses.replace(posture, serial=_serial()) if serial else posture


def require_software_allowed(key_type: str, *, allowed: bool) -> None:
    """Raises PermissionDenied (SOFTWARE_IDENTITY) for a key in a file unless this node's owner allows it."""
    if key_type == KeyType.SOFTWARE and not allowed:
        raise PermissionDenied(
            "the identity key is in a file, and this node does not allow that",
            hint="allow it: --software-identity-allowed, or software_identity_allowed under [node]; "
            "its trust level is then software",
            reason="SOFTWARE_IDENTITY",
        )


def _mac_posture() -> Posture:
    return Posture(
        hardware_model=_sysctl("hw.model"),
        chip=_sysctl("machdep.cpu.brand_string"),
        os_version=_text(platform.mac_ver()[0]),
        boot_session=_sysctl("kern.bootsessionuuid"),
        serial=None,
        sip=_flag(
            ("/usr/bin/csrutil", "status"),
            on="System Integrity Protection status: enabled",
            off="System Integrity Protection status: disabled",
        ),
        secure_boot=_secure_boot(),
        authenticated_root=_flag(
            ("/usr/bin/csrutil", "authenticated-root", "status"),
            on="Authenticated Root status: enabled",
            off="Authenticated Root status: disabled",
        ),
        filevault=_flag(("/usr/bin/fdesetup", "status"), on="FileVault is On", off="FileVault is Off"),
    )


def _secure_boot() -> bool | None:
    """Of the boot policy, which system_profiler tells without asking for a password (bputil needs root)."""
    policy = _profile("SPiBridgeDataType").get("ibridge_secure_boot")
    return _SECURE_BOOT.get(policy) if isinstance(policy, str) else None


def _serial() -> str | None:
    serial = _profile("SPHardwareDataType").get("serial_number")
    return _text(serial) if isinstance(serial, str) else None


def _profile(kind: str) -> dict[str, object]:
    """The one entry of a report in JSON; nothing unless it has exactly that form."""
    try:
        report = json.loads(_output(("/usr/sbin/system_profiler", "-json", kind)))
        (entry,) = report[kind]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return entry if isinstance(entry, dict) else {}


def _other_posture() -> Posture:
    try:
        boot = _BOOT_ID.read_text("ascii")
    except (OSError, ValueError):
        boot = ""
    return Posture(
        chip=_text(platform.machine()),
        os_version=_text(f"{platform.system()} {platform.release()}"),
        boot_session=_text(boot),
    )


def _sysctl(name: str) -> str | None:
    return _text(_output(("/usr/sbin/sysctl", "-n", name)))


def _flag(command: tuple[str, ...], *, on: str, off: str) -> bool | None:
    """Only the exact words count: any other answer, a custom configuration too, is unknown."""
    first = _output(command).strip().partition("\n")[0].rstrip(".")
    return {on: True, off: False}.get(first)


def _output(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands by absolute path
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TOOL_SECONDS,
            check=False,
            env={"LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout[:_MAX_OUTPUT].decode("utf-8", errors="replace") if done.returncode == 0 else ""


def _text(value: str) -> str | None:
    """A fact as the statement takes it: one line of bounded length, or unknown."""
    cleaned = value.strip()
    return cleaned if 0 < len(cleaned) <= _MAX_TEXT and cleaned.isprintable() else None
