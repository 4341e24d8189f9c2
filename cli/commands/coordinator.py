"""`sealring coordinator`: make a cluster's authority and run it."""

from __future__ import annotations

import typer

from cli.output import print_json, say
from cli.processes import LogFile, LogLevel, ParentPipe, run_daemon
from cli.settings_flags import load_settings, settings_command
from cli.words import AsJson

app = typer.Typer(name="coordinator", help="The cluster's authority.", no_args_is_help=True)


@app.command(cls=settings_command("coordinator"))
def init(context: typer.Context, as_json: AsJson = False) -> None:
    """Make keys, certificates, database and the operator bundle of a new cluster."""
    settings = load_settings(context, "coordinator").settings
    from coordinator.init import init as initialise

    initialise(settings)
    state = settings.state_dir
    if as_json:
        print_json({"state_dir": str(state), "operator": str(state / "operator")})
    say(f"made the coordinator's state in {state}; the operator bundle is {state / 'operator'}")
    say("next: sealring coordinator run, then sealring token create --role node")


@app.command(cls=settings_command("coordinator"))
def run(
    context: typer.Context,
    log_level: LogLevel = "info",
    log_file: LogFile = None,
    parent_pipe: ParentPipe = None,
) -> None:
    """Run the coordinator until SIGTERM."""
    settings = load_settings(context, "coordinator").settings

    async def serve() -> None:
        from coordinator.main import run as run_component

        await run_component(settings)

    run_daemon(
        "coordinator",
        serve,
        log_level=log_level,
        log_file=log_file,
        parent_pipe=parent_pipe,
    )
