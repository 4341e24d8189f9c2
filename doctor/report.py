"""A machine's report on itself: findings for people, facts to compare with other machines.

A report crosses the network from a node to its operator, so everything in it is bounded when it is read.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sealring.mesh.errors import InvalidInput

MAX_REPORT_BYTES = 128 << 10
_MAX_TEXT = 1000


def _cut(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:_MAX_TEXT])


Text = Annotated[str, AfterValidator(_cut)]
Name = Annotated[str, Field(max_length=200), AfterValidator(_cut)]
Address = Annotated[str, Field(max_length=300), AfterValidator(_cut)]
"""Longer than any that a roster takes: members choose theirs, and none is to spoil another's report."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Severity(enum.StrEnum):
    """How bad it is, best first."""

    OK = "ok"
    NOTE = "note"
    """Good to know; nothing is wrong."""
    WARNING = "warning"
    """Works now, and will hurt in a case that is named."""
    PROBLEM = "problem"
    """Keeps this machine from serving, or is sure to break it."""


class Finding(_Frozen):
    """One thing that was looked at. `command` is exact: it can be pasted where the finding was made."""

    id: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.]{0,63}$")]
    severity: Severity
    what: Text
    why: Text = ""
    fix: Text = ""
    command: Text = ""


def _finding(
    severity: Severity, identifier: str, what: str, why: str = "", fix: str = "", command: str = ""
) -> Finding:
    return Finding(id=identifier, severity=severity, what=what, why=why, fix=fix, command=command)


ok = functools.partial(_finding, Severity.OK)
note = functools.partial(_finding, Severity.NOTE)
warning = functools.partial(_finding, Severity.WARNING)
problem = functools.partial(_finding, Severity.PROBLEM)


def unknown(identifier: str, subject: str, why: str, command: str = "") -> Finding:
    """A note that the state of `subject` is unknown. `command` is the one that failed, for people to try."""
    return note(identifier, f"could not tell: {subject}", why, "look yourself" if command else "", command)


class TriedConnection(_Frozen):
    """One TCP connection that the daemon tried: `error` is errno's name or TIMEOUT, empty when it came up."""

    member: Name
    address: Address
    error: Name = ""
    milliseconds: Annotated[int, Field(ge=0, le=1 << 40)] = 0


class ThunderboltPort(_Frozen):
    """A Thunderbolt port: `uuid` its own end, `peer` the other Mac's, `device` the network interface."""

    receptacle: Name = ""
    uuid: Name = ""
    peer: Name = ""
    device: Name = ""
    speed: Name = ""


class Bridge(_Frozen):
    """A network bridge over Thunderbolt ports; `enabled` unless its interface or service is off."""

    name: Name
    service: Name = ""
    members: Annotated[tuple[Name, ...], Field(max_length=64)] = ()
    enabled: bool = True


class Facts(_Frozen):
    """What is compared between machines; empty where it is not known. Memory is in bytes."""

    name: Name = ""
    member: Name = ""
    system: Name = ""
    os_version: Name = ""
    os_build: Name = ""
    sealring: Name = ""
    protocol: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    packages: Annotated[dict[Name, Name], Field(max_length=32)] = {}
    memory: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    wired_limit: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    addresses: Annotated[tuple[Address, ...], Field(max_length=64)] = ()
    connections: Annotated[tuple[TriedConnection, ...], Field(max_length=512)] = ()
    ports: Annotated[tuple[ThunderboltPort, ...], Field(max_length=64)] = ()
    bridges: Annotated[tuple[Bridge, ...], Field(max_length=64)] = ()
    rdma: Name = ""


class Report(_Frozen):
    """Everything that one machine found."""

    facts: Facts = Facts()
    findings: Annotated[tuple[Finding, ...], Field(max_length=512)] = ()


def worst(findings: Iterable[Finding]) -> Severity:
    """The worst severity, OK where nothing was found."""
    order = list(Severity)
    return max((one.severity for one in findings), key=order.index, default=Severity.OK)


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


def encode(report: Report) -> bytes:
    """One line of JSON; of very many findings the last are left out, and a note says so."""
    cut = note("report.cut", "the report was too long, and some findings are left out")
    kept = len(report.findings)
    findings = report.findings
    while True:
        data = (
            report.model_copy(update={"findings": findings}).model_dump_json(exclude_defaults=True).encode()
        )
        if len(data) <= MAX_REPORT_BYTES or not kept:
            return data
        kept //= 2
        findings = (cut, *report.findings[:kept])


def decode(data: bytes) -> Report:
    """A report that another machine made. Raises InvalidInput (BAD_REPORT)."""
    if len(data) > MAX_REPORT_BYTES:
        raise _bad()
    try:
        return Report.model_validate_json(data)
    except (ValidationError, ValueError, RecursionError):
        raise _bad() from None


def plain(found: Report | Finding) -> dict[str, Any]:
    """As JSON data."""
    return found.model_dump(mode="json")


def _bad() -> InvalidInput:
    return InvalidInput(
        "a node's report is malformed or out of bounds",
        hint="run the same release on every machine",
        reason="BAD_REPORT",
    )
