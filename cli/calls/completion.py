"""Names that a shell completes: of deployments, models and nodes, as the cluster has them now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer

_SECONDS = 2.0
"""The longest that the Tab key waits for a cluster."""


def completes(kind: str) -> Callable[[typer.Context, str], list[str]]:
    """Completes names of `kind`, one of _NAMES. Without a cluster it has none."""

    def names(context: typer.Context, incomplete: str) -> list[str]:
        with contextlib.suppress(Exception):  # whatever is wrong is said by the command itself
            return sorted({one for one in _NAMES[kind](context) if one.startswith(incomplete)})
        return []

    return names


def _ask(context: typer.Context, method: str) -> Any:
    from sealring.cli.calls.operator import connect
    from sealring.cli.settings import CliSettings
    from sealring.cli.terminal.command import config_file
    from sealring.cli.terminal.host import host_of
    from sealring.mesh.settings.config import load

    file = config_file(context.find_root().params.get("config"))
    settings = load(CliSettings, "cli", file=file).settings
    host = host_of(context)

    async def ask() -> Any:
        async with host.reach(
            connect, settings.operator, address=settings.coordinator, seconds=_SECONDS
        ) as admin:
            return await admin.call(method)

    return host.run(ask())


def _deployments(context: typer.Context) -> Iterable[str]:
    return (one.plan.spec.name for one in _ask(context, "ListDeployments").deployments)


def _nodes(context: typer.Context) -> Iterable[str]:
    return (one.name for one in _ask(context, "ListNodes").nodes)


def _models(context: typer.Context) -> Iterable[str]:
    nodes = _ask(context, "ListNodes").nodes
    return (one.name for node in nodes for one in node.heartbeat.models)


def _listed(context: typer.Context) -> Iterable[str]:
    from sealring.cli.fitting.known import known_models

    return (one.name for one in known_models())


_NAMES: Mapping[str, Callable[[typer.Context], Iterable[str]]] = {
    "deployment": _deployments,
    "model": _models,
    "node": _nodes,
    "listed model": _listed,
    "component": lambda context: ("coordinator", "gateway", "node"),
}
