"""Driving launchctl: small verbs, each awaited until what it asked for has happened (launchctl(1))."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sealring.cli.terminal.host import Host
from sealring.mesh.errors import DeadlineExceeded, FailedPrecondition, PermissionDenied
from sealring.mesh.system.starting import starting

_DOMAIN = "system"
_SECONDS = 30.0
_POLL_SECONDS = 0.2
_NOT_FOUND = frozenset({113, 3})
_STATE = re.compile(r"^\s*state = ([a-z ]+)$", re.MULTILINE)
_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_LAST_EXIT = re.compile(r"^\s*last exit code = (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class ServiceStatus:
    """A service's state in launchd; `loaded` is false for an unknown one."""

    label: str
    loaded: bool
    state: str = ""
    pid: int | None = None
    last_exit: str = ""


class Launchctl:
    """launchd's system domain. Raises FailedPrecondition (NOT_MACOS, LAUNCHCTL_FAILED), PermissionDenied."""

    def __init__(self, host: Host) -> None:
        program = shutil.which("launchctl")
        if program is None:
            raise FailedPrecondition(
                "services are managed by launchd, which only macOS has",
                hint=f"this is {sys.platform}: run `sealring join` under its own service manager",
                reason="NOT_MACOS",
            )
        self._program = program
        self._host = host

    def bootstrap(self, label: str, plist: Path) -> None:
        """Loads a service, enabled from now on and over reboots; a loaded one is left as it is."""
        self._run("enable", f"{_DOMAIN}/{label}")
        if not self.status(label).loaded:
            self._run("bootstrap", _DOMAIN, str(plist))

    def bootout(self, label: str) -> None:
        """Unloads a service and waits until it is gone: launchctl itself returns before that.

        Raises DeadlineExceeded (SERVICE_STILL_THERE).
        """
        if not self.status(label).loaded:
            return
        self._run("bootout", f"{_DOMAIN}/{label}", also=_NOT_FOUND | {36})
        deadline = self._host.monotonic() + _SECONDS + 30
        while self.status(label).loaded:
            if self._host.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{label} has not ended", hint="see sealring logs", reason="SERVICE_STILL_THERE"
                )
            self._host.pause(_POLL_SECONDS)

    def kickstart(self, label: str) -> None:
        """Starts a loaded service now."""
        self._run("kickstart", f"{_DOMAIN}/{label}")

    def status(self, label: str) -> ServiceStatus:
        """What launchd knows of a service."""
        done = self._call("print", f"{_DOMAIN}/{label}")
        if done.returncode in _NOT_FOUND:
            return ServiceStatus(label, loaded=False)
        self._check(done, "print")
        state, pid, last = (found.search(done.stdout) for found in (_STATE, _PID, _LAST_EXIT))
        return ServiceStatus(
            label,
            loaded=True,
            state=state[1] if state else "unknown",
            pid=int(pid[1]) if pid else None,
            last_exit=last[1] if last else "",
        )

    def _run(self, *arguments: str, also: frozenset[int] | set[int] = frozenset()) -> None:
        done = self._call(*arguments)
        if done.returncode not in also:
            self._check(done, arguments[0])

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            with starting():
                return subprocess.run(  # noqa: S603 - a fixed program with checked labels and paths
                    [self._program, *arguments],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_SECONDS,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(
                f"launchctl {arguments[0]} did not answer", reason="LAUNCHCTL_SLOW"
            ) from None

    def _check(self, done: subprocess.CompletedProcess[str], verb: str) -> None:
        if done.returncode == 0:
            return
        said = (done.stderr or done.stdout).strip().splitlines()
        detail = said[0][:200] if said else "it said nothing"
        if (done.returncode in (1, 150) and "permitted" in detail.lower()) or "root" in detail.lower():
            raise PermissionDenied(
                f"launchctl {verb} is not allowed: {detail}", hint="run it with sudo", reason="NEEDS_ROOT"
            )
        raise FailedPrecondition(
            f"launchctl {verb} failed with {done.returncode}: {detail}",
            hint="see sealring logs",
            reason="LAUNCHCTL_FAILED",
        )
