"""`sealring` without a word: where this machine stands, and what to type next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sealring.cli.terminal.host import Host
from sealring.mesh.errors import PermissionDenied, SealringError

_SECONDS = 5.0
Line = tuple[str, str]
"""A command, and what it does; or words without a command."""


def standing(host: Host, file: Path | None) -> Iterator[Line]:
    """What to say. `file` is the user's settings file.

    Raises nothing: what cannot be found out is said.
    """
    from sealring.cli.here.found import cluster_here, require_account
    from sealring.cli.settings import CliSettings
    from sealring.cli.setup.choices import settings_given
    from sealring.coordinator.backup import STANDBY_MARK
    from sealring.mesh.settings.config import load
    from sealring.mesh.system.paths import CLIENT_FOLDER, is_enrolled

    here = cluster_here()
    root = here.root
    try:
        bundle = load(CliSettings, "cli", file=file).settings.operator
        node = Path(settings_given("node", file).get("state_dir", root / "node"))
        require_account(bundle)
    except PermissionDenied as error:
        yield f"launchd runs sealring here: {error}", ""
        return
    except SealringError as error:
        yield f"the settings cannot be used: {error}", ""
        yield "sealring config show", "where each setting comes from"
        return
    if not here.own:
        yield f"a demo runs here, with its state in {root}", ""
    own = is_enrolled(bundle) and bundle != node / CLIENT_FOLDER
    stands_by = own and (bundle.parent / STANDBY_MARK).exists()
    if own and not stands_by:
        yield from _first_machine(host, root, bundle)
    elif is_enrolled(node):
        yield from _other_machine(host, root, node, ", and its standby" if stands_by else "")
    else:
        yield "this machine is in no cluster yet", ""
        yield "sealring up", "make it the first machine of one"
        yield "sealring join", "join a cluster of this network"
        yield "sealring demo", "only try it here, with a small model"


def _first_machine(host: Host, root: Path, bundle: Path) -> Iterator[Line]:
    from sealring.cli.calls.operator import connect, read_bundle

    async def look() -> tuple[Any, Any]:
        async with host.reach(connect, bundle, seconds=_SECONDS) as admin:
            return await admin.call("ListNodes"), await admin.call("ListDeployments")

    try:
        cluster = read_bundle(bundle).peer.cluster
        nodes, deployments = host.run(look())
    except SealringError as error:
        stopped = error.reason == "UNREACHABLE"
        what = (
            "this first machine of a cluster does not run"
            if stopped
            else f"the cluster cannot be asked: {error}"
        )
        yield what, ""
        yield "sealring up", "start it"
        yield "sealring doctor", "look for what is wrong here"
        return
    yield from _running(root, cluster, nodes.nodes, deployments.deployments)


def _running(root: Path, cluster: str, nodes: Any, deployments: Any) -> Iterator[Line]:
    from sealring.cli.calls.happenings import deployment_states
    from sealring.cli.here.settings_files import read_settings, settings_file_of
    from sealring.v1 import admin_pb2, membership_pb2

    online = [one.name for one in nodes if one.state == admin_pb2.NODE_STATE_ONLINE]
    yield f"cluster {cluster}: {len(online)} of {len(nodes)} nodes online ({', '.join(online) or 'none'})", ""
    for state in deployment_states(deployments).values():
        yield state, ""
    serves = [
        one
        for one in deployments
        if one.rings and all(ring.phase == membership_pb2.RING_PHASE_SERVING for ring in one.rings)
    ]
    if not deployments:
        yield "no model is served yet", ""
        yield "sealring deploy MODEL", "serve one: a folder, a hub id, or `demo`, the bundled one"
        yield "sealring token code", "let another machine join"
        return
    if not serves and not any(one.plan.spec.on_demand for one in deployments):
        yield "sealring status --watch", "watch it load"
        yield "sealring doctor --cluster", "look for what is wrong"
        return
    yield 'sealring chat "..."', "ask it"
    at = read_settings(settings_file_of(root, "gateway"), "gateway").get("http_listen")
    if at:
        yield f"http://{at}/v1", "for any OpenAI client on this machine"
    yield "sealring connect NAME", "set a program up to use it"
    yield "sealring status", "nodes, rings and models"


def _other_machine(host: Host, root: Path, node: Path, more: str) -> Iterator[Line]:
    from sealring.cli.calls.away import while_away
    from sealring.cli.here.settings_files import proxy_port
    from sealring.mesh.member.state import load_machine_state

    try:
        state = load_machine_state(node)
        places = own_places(host, root, node)
    except SealringError as error:
        yield f"this machine's enrolment cannot be used: {error}", ""
        yield "sealring doctor", "look for what is wrong here"
        return
    yield f"this machine is the node {state.name} of cluster {state.peer.cluster}{more}", ""
    if not places:
        yield "it does not run, or only as a service", ""
        yield "sealring join", "start it"
        yield "sealring service status node", "see whether a service runs it"
        return
    for line in places:
        yield line, ""
        if "does not answer" in line:
            yield from ((one, "") for one in while_away(node, host.now()))
    if port := proxy_port(root):
        yield 'sealring chat "..."', "ask the cluster"
        yield f"http://127.0.0.1:{port}/v1", "for programs here; sealring connect NAME sets one up"
    yield "sealring status", "nodes, rings and models"
    yield "sealring doctor", "look for what is wrong here"


def own_places(host: Host, root: Path, node: Path) -> list[str]:
    """Whether the coordinator answers, and what the node of this machine serves, by its own state folder
    `node`; none where it does not run. Raises ConfigError."""
    from sealring.cli.here.settings_files import read_settings, settings_file_of
    from sealring.cli.local.machines import OtherMachine
    from sealring.mesh.system.addresses import parse_address

    listen = read_settings(settings_file_of(root, "node"), "node").get("listen")
    if listen is None or not host.listens(*parse_address(str(listen))):
        return []
    machine = host.reach(OtherMachine, root, {"node": {"state_dir": str(node)}})
    return list(filter(None, machine.look()))
