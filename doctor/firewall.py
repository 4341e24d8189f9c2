"""The application firewall. It asks on the screen before a program may listen, and nobody sees that there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from sealring.doctor.interpreter import program
from sealring.doctor.report import Finding, ok, problem, unknown, warning
from sealring.doctor.system import System
from sealring.doctor.view import View

SOCKETFILTERFW = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_STATE = re.compile(r"\(State = ([0-2])\)")
_APP = re.compile(r"^\s*(?:[0-9]+\s*:\s*)?(/.*?)\s*$")
_RULE = re.compile(r"^\s*\(\s*(Allow|Block) incoming connections\s*\)\s*$")


def parse_state(text: str) -> int | None:
    """0 off, 1 on, 2 blocks everything. From `--getglobalstate`."""
    found = _STATE.search(text)
    return int(found[1]) if found else None


def parse_block_all(text: str) -> bool | None:
    """Whether all connections are blocked, by `--getblockall` in its older and newer words."""
    lowered = text.lower()
    if re.search(r"block all (state set to )?disabled", lowered):
        return False
    if re.search(r"block all (state set to )?enabled|set to block all", lowered):
        return True
    return None


def parse_apps(text: str) -> dict[str, bool]:
    """Path to whether it may take connections. From `--listapps`."""
    apps: dict[str, bool] = {}
    path = ""
    for line in text.splitlines():
        rule = _RULE.match(line)
        if rule is not None and path:
            apps[path] = rule[1] == "Allow"
            path = ""
        elif (app := _APP.match(line)) is not None:
            path = app[1]
    return apps


def check(system: System, view: View) -> Iterator[Finding]:
    """Whether neighbours and gateways can reach this interpreter."""
    answer = system.run(SOCKETFILTERFW, "--getglobalstate")
    state = parse_state(answer.text)
    if state is None:
        why = answer.why or "it answered in words that are not known here"
        yield unknown("firewall.state", "the application firewall", why, f"{SOCKETFILTERFW} --getglobalstate")
    elif state == 0:
        yield ok("firewall.state", "the application firewall is off")
    elif state == 2 or parse_block_all(system.run(SOCKETFILTERFW, "--getblockall").text):
        yield problem(
            "firewall.state",
            "the application firewall blocks all incoming connections",
            "neighbours and gateways cannot reach this node",
            "let it ask per program",
            f"sudo {SOCKETFILTERFW} --setblockall off",
        )
    else:
        yield _rule(system, view)


def _rule(system: System, view: View) -> Finding:
    name = program(system, view)
    listed = system.run(SOCKETFILTERFW, "--listapps")
    if listed.why:
        command = f"{SOCKETFILTERFW} --listapps"
        return unknown("firewall.state", "the application firewall's rules", listed.why, command)
    apps = parse_apps(listed.text)
    rules = [allowed for path, allowed in apps.items() if path == name or name.startswith(f"{path}/")]
    if rules and all(rules):
        return ok("firewall.state", "the application firewall is on and lets this interpreter listen")
    quoted = shlex.quote(name)
    allow = f"sudo {SOCKETFILTERFW} --add {quoted} && sudo {SOCKETFILTERFW} --unblockapp {quoted}"
    if rules:
        return problem(
            "firewall.state",
            f"the application firewall blocks {name}",
            "neighbours and gateways cannot reach this node",
            "allow it",
            allow,
        )
    return warning(
        "firewall.state",
        f"the application firewall is on and has no rule for {name}",
        "unless its signature is trusted, macOS asks on the screen, which nobody may see",
        "allow it, and again when an update of Python changed the path",
        allow,
    )
