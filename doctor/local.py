"""All checks of one machine. A check that fails is a finding of its own, and stops no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sealring.doctor import (
    certificates,
    clocks,
    firewall,
    interpreter,
    memory,
    nvidia,
    power,
    rdma,
    reach,
    storage,
    thunderbolt,
    trust,
    versions,
)
from sealring.doctor.report import Facts, Finding, Report, note, unknown
from sealring.doctor.system import System
from sealring.doctor.view import View

Check = Callable[[System, View], Iterator[Finding]]

EVERYWHERE: dict[str, Check] = {
    "reach": reach.check,
    "versions": versions.check,
    "certificate": certificates.check,
    "clock": clocks.check,
    "storage": storage.check,
    "files": reach.check_open_files,
    "trust": trust.check,
}
MACS: dict[str, tuple[str, Check]] = {
    "interpreter": ("the interpreter's signature", interpreter.check),
    "firewall": ("the application firewall", firewall.check),
    "power": ("sleep, Low Power Mode and heat", power.check),
    "restarts": ("FileVault and restarts", power.check_restarts),
    "memory": ("the GPU's memory limit", memory.check),
    "thunderbolt": ("Thunderbolt", thunderbolt.check),
    "rdma": ("RDMA", rdma.check),
}


def examine(system: System, view: View) -> Report:
    """Looks at everything; takes some seconds on a Mac."""
    findings = [
        finding for name, check in EVERYWHERE.items() for finding in _guarded(name, check, system, view)
    ]
    if system.platform == "darwin":
        for name, (_, check) in MACS.items():
            findings += _guarded(name, check, system, view)
    else:
        findings += _guarded("nvidia", nvidia.check, system, view)
        subjects = "; ".join(subject for subject, _ in MACS.values())
        findings.append(note("system.other", f"not applicable on {system.platform}: {subjects}"))
    try:
        facts = _facts(system, view)
    except Exception as error:
        facts = Facts()
        findings.append(unknown("system.facts", "what this machine is", f"failed: {type(error).__name__}"))
    return Report(facts=facts, findings=tuple(findings))


def _guarded(name: str, check: Check, system: System, view: View) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check(system, view))
    except Exception as error:  # whatever a machine says that nobody thought of
        found.append(unknown(f"{name}.check", f"all of {name}", f"the check failed: {type(error).__name__}"))
    return found


def _facts(system: System, view: View) -> Facts:
    from sealring.mesh.rpc.protocol import PROTOCOL_VERSION

    mac = system.platform == "darwin"
    return Facts(
        name=view.settings.name if view.state is None else view.state.name,
        member="" if view.state is None else view.state.peer.id,
        system=system.platform,
        os_version=versions.os_version(system)[:200],
        os_build=versions.os_build(system),
        sealring=system.package("sealring"),
        protocol=PROTOCOL_VERSION,
        packages=versions.packages(system),
        memory=system.memory(),
        wired_limit=(memory.wired_limit(system) or 0) if mac else 0,
        addresses=view.addresses,
        connections=view.connections or (),
        ports=tuple(thunderbolt.read_ports(system) or ()) if mac else (),
        bridges=tuple(thunderbolt.read_bridges(system)) if mac else (),
        rdma=rdma.status(system) if mac else "",
    )
