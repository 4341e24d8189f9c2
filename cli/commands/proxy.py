"""`sealring proxy`: an OpenAI-compatible address on this machine that seals everything beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sealring.cli.here.found import PROXY_PORT, cluster_here
from sealring.cli.local.processes import Level, LogFile, LogLevel, ParentPipe, run_daemon
from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.options import MinTrust, RootHash
from sealring.cli.terminal.output import say
from sealring.mesh.trust.levels import SCORES, TrustLevel

app = typer.Typer()


@command(
    app,
    example="sealring proxy --gateway 10.0.0.1:7780 --gateway-ca edge.pem",
    section="cli",
    fields=("operator", "gateway", "gateway_ca", "api_key_file"),
    rich_help_panel="Start",
)
def proxy(
    context: typer.Context,
    root_sha256: RootHash = None,
    min_trust: MinTrust = TrustLevel.NONE,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="where it listens, on loopback; port 0 takes any")
    ] = f"127.0.0.1:{PROXY_PORT}",
    state_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="remembers the newest roster [default: below the user's state folder]"
        ),
    ] = None,
    member: Annotated[Path | None, typer.Option(metavar="DIR", hidden=True)] = None,
    key_sha256: Annotated[str | None, typer.Option(metavar="HEX", hidden=True)] = None,
    log_level: LogLevel = Level.INFO,
    log_file: LogFile = None,
    parent_pipe: ParentPipe = None,
) -> None:
    """Serve the OpenAI HTTP API here and seal every prompt for its ring.

    On a member it needs no --gateway, and `sealring join` runs it already. The gateway passes on what it
    cannot read. Any OpenAI client works: its base URL is http://LISTEN/v1, its API key the one that only your
    own account can read; `sealring connect` sets both.
    """
    from sealring.cli.calls.gateway import gateway_access
    from sealring.cli.calls.pin import root_pin, roster_file
    from sealring.cli.proxy import digest_of, own_key, serve, serve_member
    from sealring.client import AsyncClient
    from sealring.mesh.system.addresses import require_loopback
    from sealring.mesh.system.paths import proxy_key_file

    require_loopback(listen)
    loaded = load_settings(context)
    settings = loaded.settings

    def key() -> str:
        return key_sha256 or digest_of(own_key(proxy_key_file()).text)

    folder = member or (
        cluster_here().member if root_sha256 is None and loaded.origin["gateway"] == "default" else None
    )
    if folder is not None:
        run_daemon(
            "proxy",
            lambda: serve_member(folder, listen, key(), SCORES[min_trust], say=say),
            log_level=log_level,
            log_file=log_file,
            parent_pipe=parent_pipe,
        )
        return
    pin = root_pin(root_sha256, loaded)

    async def work() -> None:
        client = AsyncClient(
            settings.gateway,
            root_sha256=pin,
            min_trust=SCORES[min_trust],
            state_file=state_file or roster_file(pin, settings.gateway),
            timeout=3600.0,
            **gateway_access(loaded),
        )
        await serve(client, listen, key(), say=say)

    run_daemon("proxy", work, log_level=log_level, log_file=log_file, parent_pipe=parent_pipe)
