"""Whether the daemon reaches its peers, by connections that it made itself, and whether they can reach it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from sealring.doctor.report import Finding, TriedConnection, note, ok, problem, warning
from sealring.doctor.system import System
from sealring.doctor.view import View
from sealring.mesh.errors import SealringError
from sealring.mesh.system.addresses import is_loopback, parse_address
from sealring.mesh.system.networks import ALLOW_LOCAL_NETWORK, LOCAL_NETWORK, LOCAL_NETWORK_DENIED

DENIED = errno.errorcode[LOCAL_NETWORK_DENIED]
AS_SERVICE = "sudo sealring service install node"

_ENOUGH_FILES = 2048


def loopback_only(addresses: Sequence[str]) -> bool:
    """Whether all of these addresses lead to the machine itself."""
    return bool(addresses) and all(_is_loopback(address) for address in addresses)


def denied(connections: Sequence[TriedConnection]) -> bool:
    """Whether they fail as macOS fails them without Local Network access: all that leave the machine."""
    leaving = [one for one in connections if not _is_loopback(one.address)]
    return bool(leaving) and all(one.error == DENIED for one in leaving)


def check(system: System, view: View) -> Iterator[Finding]:
    """The daemon, its coordinator and its peers. Nothing of the peers where no daemon was asked."""
    if view.trouble:
        yield problem(
            "enrolment.state",
            "this machine's enrolment cannot be read",
            view.trouble,
            "run this as the account that the node runs as",
            f"sudo -u {system.owner(view.settings.state_dir)} sealring doctor",
        )
        return
    if view.state is None:
        yield note(
            "enrolment.state",
            f"there is no enrolment in {view.settings.state_dir}",
            "this machine is in no cluster yet, or its node keeps its state elsewhere",
            "make it the first machine of a cluster, or join one: sealring join",
            "sealring up",
        )
        return  # `up` and `join` choose a port that is free
    if view.connections is None:
        yield warning(
            "daemon.answers",
            "no daemon of this node answers",
            "it is not running, so nothing can be said of what it reaches",
            "start it",
            "sudo sealring service start node" if system.has_service("node") else view.start,
        )
        yield from _ports(system, view)
        return
    if view.session is False:
        yield problem(
            "reach.coordinator",
            "the daemon has no session with the coordinator",
            f"it is in no ring until it has one; it tries {_coordinators(view)}, and asks its network",
            "see whether the coordinator runs on the first machine, and the log of this node",
        )
    elif view.session:
        yield ok("reach.coordinator", "the daemon has a session with the coordinator")
    yield from _peers(system, view, view.connections)
    yield from _own_addresses(view)


def check_open_files(system: System, view: View) -> Iterator[Finding]:
    """The daemon's limit on open files and connections, or else that of this process: 256 if a terminal of
    macOS starts it."""
    limit = view.file_limit or system.file_limit()
    if limit < 0:
        yield ok("files.limit", "any number of files may be open")
    elif limit >= _ENOUGH_FILES:
        yield ok("files.limit", f"up to {limit} files may be open")
    else:
        yield warning(
            "files.limit",
            f"only {limit} files may be open",
            "connections count as files; beyond the limit they are refused at random",
            "raise it in the shell that starts the daemon; launchd's property list of sealring does so",
            "ulimit -n 8192",
        )


def _peers(system: System, view: View, connections: Sequence[TriedConnection]) -> Iterator[Finding]:
    failed = [one for one in connections if one.error]
    if view.left_out:
        yield note("reach.peers", f"{view.left_out} addresses of peers were not tried", "there are too many")
    if not connections:
        yield ok("reach.peers", "the roster has no other member to reach")
    elif not failed:
        shown = "the one address" if len(connections) == 1 else f"all {len(connections)} addresses"
        yield ok("reach.peers", f"the daemon reaches {shown} of its peers")
    elif system.platform == "darwin" and denied(connections):
        yield problem(
            "reach.local_network",
            f"the daemon reaches no peer: {DENIED} (errno 65, No route to host)",
            LOCAL_NETWORK,
            ALLOW_LOCAL_NETWORK,
            AS_SERVICE,
        )
    else:
        severity = problem if len(failed) == len(connections) else warning
        shown = ", ".join(f"{one.address} {one.error}" for one in failed[:8])
        yield severity(
            "reach.peers",
            f"the daemon does not reach {len(failed)} of {len(connections)} addresses of its peers: {shown}",
            "no ring forms over them: they are off, behind a firewall, or announced with a wrong address",
            "compare with what the others reach",
            "sealring doctor --cluster",
        )


def _own_addresses(view: View) -> Iterator[Finding]:
    peers = [one for one in view.roster.members if one is not view.member] if view.roster else []
    far = any(not loopback_only(one.addresses) for one in peers)
    if far and loopback_only(view.addresses):
        yield problem(
            "reach.address",
            f"this node is announced at {', '.join(view.addresses)}, where only this machine reaches it",
            "the other members are elsewhere",
            "start it with this machine's address in the network (settings listen, advertise and ring_host)",
            f"{view.start} --address ADDRESS",
        )
    if far and _is_loopback(f"{view.settings.ring_host}:0"):
        yield problem(
            "reach.ring_host",
            f"ring_host is {view.settings.ring_host}, where only this machine reaches it",
            "the neighbours in a ring are elsewhere",
            "start it with the address of the interface that carries the ring (setting ring_host)",
            f"{view.start} --address ADDRESS",
        )


def _ports(system: System, view: View) -> Iterator[Finding]:
    """Whether the daemon could listen, where it is not running."""
    host, port = parse_address(view.settings.listen)
    for identifier, where, number in (
        ("ports.listen", host, port),
        ("ports.ring_host", view.settings.ring_host, 0),
    ):
        error = system.bind_error(where, number)
        if not error:
            yield ok(identifier, f"the daemon can listen on {where}" + (f":{number}" if number else ""))
        elif error == "EADDRINUSE":
            yield problem(
                identifier,
                f"port {number} of {where} is in use by another process",
                "the daemon cannot start",
                "find out which, and stop it or set listen",
                f"sudo lsof -nP -iTCP:{number} -sTCP:LISTEN",
            )
        else:
            yield problem(
                identifier,
                f"the daemon cannot listen on {where}: {error}",
                "the address is of no interface of this machine, or is not allowed",
                "set listen and ring_host to addresses that it has",
                "ifconfig",
            )


def _coordinators(view: View) -> str:
    known = view.roster.coordinators if view.roster else ()
    own = (view.state.coordinator,) if view.state else ()
    return ", ".join(dict.fromkeys((*known, *own)))


def _is_loopback(address: str) -> bool:
    try:
        return is_loopback(parse_address(address)[0])
    except SealringError:
        return False
