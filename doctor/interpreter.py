"""The Python that runs here, and the identity by which macOS knows it.

Since macOS 15 Local Network access is granted to a code identity. An interpreter that is not signed, or is
signed ad hoc without an identifier, has none that a grant could be kept for: an agent or a process without
a session is then denied without any prompt.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from sealring.doctor.report import Finding, ok, problem, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View

CODESIGN = "/usr/bin/codesign"
IDENTIFIER = "org.sealring.python"
_LINE = re.compile(r"^(Identifier|TeamIdentifier)=(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Signature:
    """A program's code signature; `identifier` is empty without one."""

    signed: bool
    identifier: str = ""
    team: str = ""


def parse_codesign(text: str) -> Signature | None:
    """The signature by `codesign -dv`, which writes to standard error. None for output without one."""
    if "code object is not signed at all" in text:
        return Signature(signed=False)
    found = {match[1]: match[2].strip() for match in _LINE.finditer(text)}
    if "Identifier" not in found:
        return None
    team = found.get("TeamIdentifier", "")
    identifier = found["Identifier"].strip("-")
    return Signature(True, identifier, "" if team == "not set" else team)


def program(system: System, view: View) -> str:
    """The image that the daemon runs, as it says, or else this process's own."""
    return view.executable if view.executable.startswith("/") else system.executable()


def check(system: System, view: View) -> Iterator[Finding]:
    """The identity of the interpreter that runs the node."""
    path = program(system, view)
    answer = system.run(CODESIGN, "-dv", path, errors=True)
    found = parse_codesign(answer.text)
    if found is None:
        why = answer.why or "codesign answered in words that are not known here"
        yield unknown(
            "interpreter.signature", f"how {path} is signed", why, f"{CODESIGN} -dv {shlex.quote(path)}"
        )
    elif found.identifier:
        kind = f"team {found.team}" if found.team else "ad hoc"
        yield ok("interpreter.signature", f"the interpreter {path} is signed as {found.identifier} ({kind})")
    else:
        severity = warning if view.launchd else problem
        yield severity(
            "interpreter.signature",
            f"the interpreter {path} is {'signed without an identifier' if found.signed else 'not signed'}",
            "macOS denies it Local Network access without a prompt, unless launchd runs it for the system",
            "give it an identity of its own, and again after every update of Python",
            f"{CODESIGN} -f -s - -i {IDENTIFIER} {shlex.quote(path)}",
        )
