"""Sleep, Low Power Mode, heat and power cuts, which make a Mac leave the ring or slow it down."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sealring.doctor.report import Finding, note, ok, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View

PMSET, FDESETUP = "/usr/bin/pmset", "/usr/bin/fdesetup"
_SETTING = re.compile(r"^\s*([A-Za-z][A-Za-z ]{0,40}?)\s+([0-9]{1,9})(?:\s+\(.*\))?\s*$")
_SPEED = re.compile(r"CPU_(?:Speed|Scheduler)_Limit\s*=\s*([0-9]{1,9})")
_LEVEL = re.compile(
    r"(?:thermal|performance) warning level(?: set to)?\s*[:=]?\s*([0-9]{1,9})", re.IGNORECASE
)


def parse_settings(text: str) -> dict[str, int]:
    """The numbers of `pmset -g` by their names; those that are words are left out."""
    found = (_SETTING.match(line) for line in text.splitlines())
    return {match[1].lower(): int(match[2]) for match in found if match is not None}


def parse_thermal(text: str) -> bool | None:
    """Whether the machine is slowed down by heat. From `pmset -g therm`; None for output without either."""
    speeds, levels = _SPEED.findall(text), _LEVEL.findall(text)
    if any(int(speed) < 100 for speed in speeds) or any(int(level) > 0 for level in levels):
        return True
    known = speeds or levels or "warning level has been recorded" in text
    return False if known else None


def parse_filevault(text: str) -> bool | None:
    """Whether FileVault is on, by `fdesetup status`; while it encrypts or decrypts, its first line counts."""
    first = text.strip().partition("\n")[0]
    return {"FileVault is On": True, "FileVault is Off": False}.get(first.partition(".")[0].partition(",")[0])


def check(system: System, view: View) -> Iterator[Finding]:
    """The power settings that matter on a machine that others wait for."""
    answer = system.run(PMSET, "-g")
    settings = parse_settings(answer.text)
    if "sleep" not in settings and "sleepdisabled" not in settings:
        why = answer.why or "pmset named no setting for sleep"
        yield unknown("power.sleep", "whether this Mac sleeps", why, f"{PMSET} -g")
    else:
        yield _sleep(settings)
    if settings.get("lowpowermode") == 1 or settings.get("powermode") == 1:
        yield warning(
            "power.low_power_mode",
            "Low Power Mode is on",
            "a ring is as fast as its slowest member",
            "turn it off",
            f"sudo {PMSET} -a lowpowermode 0",
        )
    if settings.get("powernap") == 1 and settings.get("sleep"):
        yield note(
            "power.nap", "Power Nap is on", "it wakes a sleeping Mac for Apple's services, not for a ring"
        )
    yield _heat(system)


def check_restarts(system: System, view: View) -> Iterator[Finding]:
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


def _sleep(settings: dict[str, int]) -> Finding:
    minutes = settings.get("sleep", 0)
    if minutes == 0 or settings.get("sleepdisabled") == 1:
        return ok("power.sleep", "this Mac does not sleep by itself")
    return warning(
        "power.sleep",
        f"this Mac sleeps after {minutes} min without use",
        "asleep it leaves its ring, and no ring can be formed with it",
        "keep it awake; on a laptop with a closed lid also: sudo pmset -a disablesleep 1",
        f"sudo {PMSET} -a sleep 0 disksleep 0 womp 1",
    )


def _heat(system: System) -> Finding:
    answer = system.run(PMSET, "-g", "therm")
    hot = parse_thermal(answer.text)
    if hot is None:
        why = answer.why or "pmset answered in words that are not known here"
        return unknown("power.heat", "whether heat slows this Mac down", why, f"{PMSET} -g therm")
    if not hot:
        return ok("power.heat", "no heat slows this Mac down")
    return warning(
        "power.heat",
        "heat slows this Mac down at the moment",
        "a ring is as fast as its slowest member",
        "give it air, and see whether it lasts",
        f"{PMSET} -g therm",
    )
