"""What happens after a power cut: whether the Mac starts, and whether its disk opens without a person."""

from __future__ import annotations

from collections.abc import Iterator

from sealring.doctor.power import PMSET, parse_settings
from sealring.doctor.report import Finding, note, ok, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View

FDESETUP = "/usr/bin/fdesetup"


def parse_filevault(text: str) -> bool | None:
    """From `fdesetup status`; while it encrypts or decrypts, what it says first counts."""
    first = text.strip().partition("\n")[0]
    return {"FileVault is On": True, "FileVault is Off": False}.get(first.partition(".")[0].partition(",")[0])


def check(system: System, view: View) -> Iterator[Finding]:
    """FileVault and starting by itself, which are at odds with each other."""
    settings = parse_settings(system.run(PMSET, "-g").text)
    if settings.get("autorestart") == 0:
        yield warning(
            "restarts.power",
            "this Mac stays off after a power cut",
            "its ring waits until somebody presses the button",
            "let it start by itself",
            f"sudo {PMSET} -a autorestart 1",
        )
    elif "autorestart" in settings:
        yield ok("restarts.power", "this Mac starts by itself after a power cut")
    answer = system.run(FDESETUP, "status")
    on = parse_filevault(answer.text)
    if on is None:
        why = answer.why or "fdesetup answered in words that are not known here"
        yield unknown("restarts.filevault", "FileVault", why, f"{FDESETUP} status")
    elif on:
        yield note(
            "restarts.filevault",
            "FileVault is on: after a restart no service runs before somebody unlocks the disk",
            "trust above software needs it, but a ring of such Macs does not survive a power cut by itself",
            "before a restart that you plan, let it unlock once",
            f"sudo {FDESETUP} authrestart",
        )
    else:
        yield ok("restarts.filevault", "FileVault is off: services start without a person")
