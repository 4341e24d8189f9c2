"""Findings for people: what is wrong first, with what to do."""

from __future__ import annotations

from collections.abc import Iterable

from sealring.doctor.report import Finding, Severity


def lines(findings: Iterable[Finding]) -> list[str]:
    """The worst first, and of one kind in the order in which they were found."""
    order = list(Severity)
    shown: list[str] = []
    for one in sorted(findings, key=lambda found: -order.index(found.severity)):
        shown.append(f"{one.severity:8} {one.what}")
        if one.why:
            shown.append(f"         why: {one.why}")
        if one.fix:
            shown.append(f"         do:  {one.fix}")
        if one.command:
            shown.append(f"           $ {one.command}")
    return shown


def summary(findings: Iterable[Finding]) -> str:
    """How many of each kind, such as: 1 problem, 2 warnings, 3 notes, 12 ok."""
    counts = dict.fromkeys(reversed(Severity), 0)
    for one in findings:
        counts[one.severity] += 1
    words = {Severity.PROBLEM: "problem", Severity.WARNING: "warning", Severity.NOTE: "note"}
    parts = [f"{counts[kind]} {word}{'' if counts[kind] == 1 else 's'}" for kind, word in words.items()]
    return ", ".join([*parts, f"{counts[Severity.OK]} ok"])
