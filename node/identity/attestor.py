"""Facts of this machine for an attestation. An unknown fact is null, never true.

The tools are macOS's own, by absolute path, with a deadline. The verifier derives the trust level; an
identity key in a file never earns more than `software`, whatever is said here.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sealring.mesh.crypto.keys import KeyType
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.system.starting import starting
from sealring.mesh.trust.attestation import Posture

SECONDS = 20.0
"""Time for all tools together: the coordinator waits 30 s for the answer to a challenge. `system_profiler`
takes 0.2 s on an idle Mac, and has been seen to take more than 10 s on a busy one."""

_POLITELY = ("/usr/bin/nice", "-n", "10")
_MAX_OUTPUT = 4096
_MAX_TEXT = 128
_MAX_TABLE_BYTES = 4 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SECURE_BOOT = {
    "Full Security": True,
    "Reduced Security": False,
    "Permissive Security": False,
    "Medium Security": False,
    "No Security": False,
}
_TRANSLATIONS = (
    "System/Library/SystemProfiler/SPiBridgeReporter.spreporter/Contents/Resources/Localizable.loctable"
)
_UNTIL_RESTART = frozenset(
    ("hardware_model", "chip", "boot_session", "serial", "sip", "secure_boot", "authenticated_root")
)
"""Facts that only a restart of the machine changes. FileVault can be turned off at any time."""

Fact = str | bool | None


class Attestor:
    """Measures this machine; safe to use from several threads.

    A fact that only a restart of the machine can change is measured until it is known, and remembered then:
    the tools may hang for a minute on a Mac that is short of memory. `root` is the folder that holds the
    tools, by default the system's.
    """

    def __init__(self, *, system: str = sys.platform, root: Path = Path("/")) -> None:
        self._system = system
        self._root = root
        self._known: dict[str, Fact] = {}
        self._turn = threading.Lock()

    def measure(self, *, serial: bool = False) -> Posture:
        """The facts of this machine; blocks for up to 20 s on a Mac.

        The serial number is included only where it is asked for: a device attestation has to agree with it.
        """
        if self._system != "darwin":
            return _other_posture()
        tools = _Tools(self._root, time.monotonic() + SECONDS)
        facts: dict[str, Callable[[], Fact]] = {
            "hardware_model": lambda: tools.sysctl("hw.model"),
            "chip": lambda: tools.sysctl("machdep.cpu.brand_string"),
            "os_version": tools.os_version,
            "boot_session": lambda: tools.sysctl("kern.bootsessionuuid"),
            "sip": tools.sip,
            "secure_boot": tools.secure_boot,
            "authenticated_root": tools.authenticated_root,
            "filevault": tools.filevault,
        }
        if serial:
            facts["serial"] = tools.serial
        with self._turn, ThreadPoolExecutor(len(facts)) as pool:
            found = dict(zip(facts, pool.map(self._fact, facts, facts.values()), strict=True))
        return Posture(**found)  # type: ignore[arg-type]

    def _fact(self, name: str, ask: Callable[[], Fact]) -> Fact:
        """One fact; one that is unknown is asked for once more, if there is time."""
        known = self._known.get(name)
        if known is not None:
            return known
        answer = ask()
        if answer is None:
            answer = ask()
        if name in _UNTIL_RESTART:
            self._known[name] = answer
        return answer


def measure_posture(*, serial: bool = False) -> Posture:
    """The facts of this machine, for a process that asks once; see `Attestor.measure`."""
    return Attestor().measure(serial=serial)


def require_software_allowed(key_type: str, *, allowed: bool) -> None:
    """Raises PermissionDenied (SOFTWARE_IDENTITY) for a key in a file unless this node's owner allows it."""
    if key_type == KeyType.SOFTWARE and not allowed:
        raise PermissionDenied(
            "the identity key is in a file, and this node does not allow that",
            hint="allow it: --software-identity-allowed, or software_identity_allowed under [node]; "
            "its trust level is then software",
            reason="SOFTWARE_IDENTITY",
        )


class _Tools:
    """The tools of macOS that need no root, until a point of the monotonic clock; none is started later."""

    def __init__(self, root: Path, until: float) -> None:
        self._root = root
        self._until = until

    def sysctl(self, name: str) -> str | None:
        return _text(self._output("usr/sbin/sysctl", "-n", name))

    def os_version(self) -> str | None:
        """Not by Python, which takes macOS 26 for 16 if it was built before there was one."""
        return _text(self._output("usr/bin/sw_vers", "-productVersion"))

    def sip(self) -> bool | None:
        status = "System Integrity Protection status: "
        return self._flag("usr/bin/csrutil", "status", on=f"{status}enabled", off=f"{status}disabled")

    def authenticated_root(self) -> bool | None:
        command, status = ("usr/bin/csrutil", "authenticated-root", "status"), "Authenticated Root status: "
        return self._flag(*command, on=f"{status}enabled", off=f"{status}disabled")

    def filevault(self) -> bool | None:
        return self._flag("usr/bin/fdesetup", "status", on="FileVault is On", off="FileVault is Off")

    def secure_boot(self) -> bool | None:
        """The boot policy. `bputil` needs root, `system_profiler` does not, and speaks the account's
        language: it refuses `-AppleLanguages`."""
        policy = self._profile("SPiBridgeDataType").get("ibridge_secure_boot")
        if not isinstance(policy, str):
            return None
        return _SECURE_BOOT[policy] if policy in _SECURE_BOOT else _translated(policy, self._root)

    def serial(self) -> str | None:
        serial = self._profile("SPHardwareDataType").get("serial_number")
        return _text(serial) if isinstance(serial, str) else None

    def _profile(self, kind: str) -> dict[str, object]:
        """The one entry of a report in JSON; nothing unless it has exactly that form."""
        try:
            report = json.loads(self._output("usr/sbin/system_profiler", "-json", kind))
            (entry,) = report[kind]
        except (ValueError, TypeError, KeyError, RecursionError):
            return {}
        return entry if isinstance(entry, dict) else {}

    def _flag(self, *command: str, on: str, off: str) -> bool | None:
        """Only the exact words count: any other answer, a custom configuration too, is unknown."""
        first = self._output(*command).strip().partition("\n")[0].rstrip(".")
        return {on: True, off: False}.get(first)

    def _output(self, tool: str, *arguments: str) -> str:
        try:
            with starting():
                done = subprocess.run(  # noqa: S603 - fixed commands by absolute path
                    (*_POLITELY, str(self._root / tool), *arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    timeout=max(0.0, self._until - time.monotonic()),
                    check=False,
                    env={"LC_ALL": "C"},
                )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout[:_MAX_OUTPUT].decode("utf-8", errors="replace") if done.returncode == 0 else ""


def _translated(policy: str, root: Path) -> bool | None:
    """The boot policy by its words in any language, from the table of translations that macOS prints from.

    The table is on the sealed system volume, as the tool is: a dictionary of English words by language. Words
    that stand for more than one policy, or for anything else as well, are unknown.
    """
    import plistlib  # here alone: few machines need it, and it brings an XML parser

    try:
        with (root / _TRANSLATIONS).open("rb") as file:
            table = plistlib.loads(file.read(_MAX_TABLE_BYTES))
        languages = [words for words in table.values() if isinstance(words, dict)]
    except Exception:  # plistlib raises whatever struct, expat and it itself raise
        return None
    meanings = {
        _SECURE_BOOT.get(english)
        for words in languages
        for english, translated in words.items()
        if translated == policy
    }
    return meanings.pop() if len(meanings) == 1 else None


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


def _text(value: str) -> str | None:
    """A fact as the statement takes it: one line of bounded length, or unknown."""
    cleaned = value.strip()
    return cleaned if 0 < len(cleaned) <= _MAX_TEXT and cleaned.isprintable() else None
