"""`sealring doctor`: what keeps this machine, or a whole cluster, from serving, and what to do about it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.calls.operator import Admin, run_admin
from sealring.cli.here.found import Here
from sealring.cli.terminal.command import ADMIN, command, config_file, demo_told
from sealring.cli.terminal.exit_codes import CHECK_FAILED
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import moment, print_data, print_json, printable, progress, say
from sealring.mesh.system.paths import default_state_root

if TYPE_CHECKING:
    from sealring.doctor.cluster import MeasuredLink, Node
    from sealring.doctor.report import Finding, Report
    from sealring.node.settings import NodeSettings

app = typer.Typer()

_AT_ONCE = 8
_NODE_SECONDS = 120.0


@command(app, example="sealring doctor --cluster", section="cli", fields=ADMIN, rich_help_panel="Look")
def doctor(
    context: typer.Context,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="all nodes and how they fit together; needs an operator's bundle"),
    ] = False,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="state folder of this machine's node")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find what keeps this machine from serving, and what to do about it.

    Asks the running node daemon whom it reaches. Changes nothing. Exits with 13 when there is a problem.
    """
    if cluster:
        findings = _cluster(context, as_json=as_json)
    else:
        findings = _machine(context, state_dir, as_json=as_json)
    from sealring.doctor.report import Severity, summary, worst

    say(summary(findings))
    if worst(findings) is Severity.PROBLEM:
        raise typer.Exit(CHECK_FAILED)


def _node_settings(context: typer.Context, state_dir: Path | None) -> NodeSettings:
    """The node's settings: as a file that was named has them, else as `up` and `join` left them beside its
    folder, else the user's own. Without a folder here, that of a service."""
    from sealring.cli.service.launchd import STATE_FOLDER
    from sealring.mesh.settings.config import load
    from sealring.node.settings import NodeSettings

    named = context.find_root().params.get("config")
    folder = state_dir or (demo_told() if named is None else Here(default_state_root())).folder("node")
    service = Path(STATE_FOLDER) / "node"
    if state_dir is None and named is None and not _is_there(folder) and _is_there(service):
        folder = state_dir = service
    kept = folder.parent / "config" / f"{folder.name}.toml"
    file = kept if named is None and _is_there(kept) else config_file(named)
    return load(NodeSettings, "node", file=file, flags={"state_dir": state_dir}).settings


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a folder of somebody else's
        return False


def examine_machine(context: typer.Context, state_dir: Path | None) -> Report:
    """What there is to say of this machine. Raises ConfigError."""
    from sealring.doctor.daemon import ask_daemon
    from sealring.doctor.local import examine
    from sealring.doctor.view import read_view

    view = asyncio.run(ask_daemon(read_view(_node_settings(context, state_dir))))
    return examine(host_of(context).system(), view)


def _machine(context: typer.Context, state_dir: Path | None, *, as_json: bool) -> list[Finding]:
    from sealring.doctor.report import lines, plain

    with progress("looking at this machine"):
        report = examine_machine(context, state_dir)
    if as_json:
        print_json(plain(report))
    else:
        _print(lines(report.findings))
    return list(report.findings)


def _cluster(context: typer.Context, *, as_json: bool) -> list[Finding]:
    from sealring.doctor.cluster import examine
    from sealring.doctor.report import lines, plain, summary

    with progress("asking every node"):
        nodes, links = run_admin(context, _diagnose)
    together = examine(nodes, links)
    if as_json:
        print_json({"findings": [plain(one) for one in together], "nodes": [*map(_plain_node, nodes)]})
    else:
        _print(lines(together))
        for node in nodes:
            if node.report is not None:
                print_data(f"\n{node.name}: {summary(node.report.findings)}")
                _print(lines(one for one in node.report.findings if one.severity != "ok"))
    own = [one for node in nodes if node.report is not None for one in node.report.findings]
    return [*together, *own]


async def _diagnose(admin: Admin) -> tuple[list[Node], list[MeasuredLink]]:
    """Every node with its report, and the links between them."""
    from sealring.doctor.cluster import MeasuredLink

    nodes = await diagnose_all(admin)
    listed = await admin.call("ListNodes")
    names = {node.id: node.name for node in listed.nodes}
    links = [
        MeasuredLink(
            names.get(one.caller, one.caller),
            names.get(one.called, one.called),
            one.host,
            one.round_trip_us,
            one.bytes_per_second,
            moment(one.measured),
        )
        for one in listed.links
    ]
    return nodes, links


async def diagnose_all(admin: Admin) -> list[Node]:
    """Every node with its report; those that are asked are asked a few at once."""
    from sealring.doctor.cluster import Node, PlannedStage
    from sealring.v1 import admin_pb2

    listed = await admin.call("ListNodes")
    deployed = await admin.call("ListDeployments")
    stages: dict[str, list[PlannedStage]] = {}
    for deployment in deployed.deployments:
        for ring in deployment.plan.rings:
            for stage in ring.stages:
                planned = PlannedStage(ring.ring, stage.weight_bytes, stage.kv_bytes)
                stages.setdefault(stage.member, []).append(planned)
    few = asyncio.Semaphore(_AT_ONCE)

    async def one(node: Any) -> Node:
        online = node.state in (admin_pb2.NODE_STATE_ONLINE, admin_pb2.NODE_STATE_DRAINING)
        known: dict[str, Any] = {"failure": "it is offline"}
        if online:
            async with few:
                known = await _ask(admin, node.id)
        return Node(
            node.id,
            node.name,
            online,
            trouble=node.trouble,
            memory_usable=node.heartbeat.memory_usable,
            stages=tuple(stages.get(node.id, ())),
            **known,
        )

    return await asyncio.gather(*map(one, listed.nodes))


async def _ask(admin: Admin, member: str) -> dict[str, Any]:
    from sealring.doctor.cluster import without_commands
    from sealring.doctor.report import decode
    from sealring.mesh.errors import SealringError

    try:
        answer = await admin.call("DiagnoseNode", id=member, seconds=_NODE_SECONDS)
        report: Report = without_commands(decode(answer.report))
    except SealringError as error:
        return {"failure": str(error)}
    return {
        "report": report,
        "offset": answer.clock_offset / 1e9,
        "offset_error": answer.clock_error / 1e9,
    }


def _plain_node(node: Node) -> dict[str, Any]:
    from sealring.doctor.report import plain

    return {
        "name": node.name,
        "member": node.member,
        "online": node.online,
        "clock_offset_s": node.offset,
        "clock_error_s": node.offset_error,
        "failure": node.failure,
        "report": None if node.report is None else plain(node.report),
    }


def _print(shown: list[str]) -> None:
    for line in shown:
        print_data(printable(line))
