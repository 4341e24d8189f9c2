"""Clocks: rosters, certificates and attestations are refused where two machines' clocks stand apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from sealring.doctor.report import Finding, note, ok, problem, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.mesh.clock import SKEW_SECONDS

_NOTABLE_SECONDS = 5.0
_FIX = "sudo sntp -sS time.apple.com"


def check(system: System, view: View) -> Iterator[Finding]:
    """This clock against the times in the newest roster; the coordinator measures the offset itself."""
    if view.roster is None:
        return
    ahead = view.roster.issued - system.now()
    if ahead > SKEW_SECONDS:
        yield problem(
            "clock.offset",
            f"this clock is at least {ahead:.0f} s behind the coordinator's",
            "rosters and certificates seem to be from the future, and are refused",
            "set the clock",
            _FIX,
        )
    elif view.session and system.now() > view.roster.expires + SKEW_SECONDS:
        yield problem(
            "clock.offset",
            f"the newest roster ended {system.now() - view.roster.expires:.0f} s ago by this clock",
            "the daemon has a session, so newer ones should come: this clock is ahead, or they are refused",
            "set the clock, and see the daemon's log",
            _FIX,
        )
    else:
        yield ok("clock.offset", "this clock agrees with the newest roster")


def compare_all(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Each node's clock against the coordinator's, by name: offset and error in seconds. If the nodes agree
    with each other and not with the coordinator, the coordinator's clock is wrong."""
    found = [offset for offset, _ in offsets.values()]
    apart = all(abs(offset) - error > SKEW_SECONDS for offset, error in offsets.values())
    if len(found) > 1 and apart and max(found) - min(found) <= SKEW_SECONDS:
        offset = median(found)
        away = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'}"
        yield problem(
            "clock.offset",
            f"the coordinator's clock is {away} all nodes'",
            f"more than {SKEW_SECONDS} s apart, nodes refuse its rosters, and it their attestations",
            "set the clock of the coordinator's machine; its log tells when it was set: clock_stepped",
            _FIX,
        )
        return
    for name, (offset, error) in offsets.items():
        yield compare(name, offset, error)


def compare(name: str, offset: float, error: float) -> Finding:
    """A node's clock against the coordinator's; both in seconds, positive where it is ahead."""
    away = abs(offset) - error
    shown = (
        f"{name}'s clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the coordinator's"
    )
    if away > SKEW_SECONDS:
        why = f"more than {SKEW_SECONDS} s apart, its rosters and attestations are refused"
        return problem("clock.offset", shown, why, f"set the clock of {name}", _FIX)
    if away > _NOTABLE_SECONDS:
        why = f"beyond {SKEW_SECONDS} s nothing is accepted any more"
        return warning("clock.offset", shown, why, f"set the clock of {name}", _FIX)
    if error > SKEW_SECONDS:
        return note("clock.offset", f"could not tell: {name}'s clock", "its answer took too long")
    return ok("clock.offset", f"{name}'s clock agrees with the coordinator's")
