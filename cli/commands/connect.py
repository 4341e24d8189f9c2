"""`sealring connect`: the settings that make a tool work with a running gateway or proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Annotated

import typer

from sealring.cli.here.found import cluster_here
from sealring.cli.setup.tools import TOOLS, Settings, filled, shown, values_of
from sealring.cli.terminal.command import command, load_settings
from sealring.cli.terminal.host import host_of
from sealring.cli.terminal.output import say, write
from sealring.mesh.errors import InvalidInput
from sealring.mesh.system.paths import default_state_root, gateway_key_file, proxy_key_file

app = typer.Typer()


@command(
    app,
    example="sealring connect codex --write",
    section="cli",
    fields=("api_key_file",),
    rich_help_panel="Start",
)
def connect(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(TOOLS), show_default=False)] = "",
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="of a proxy or a gateway's HTTP edge, without /v1 [default: of the proxy here, else of the "
            "gateway here]",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="[default: the only one that is not named small]")] = "",
    to_file: Annotated[bool, typer.Option("--write", help="write them into the tool's own file")] = False,
) -> None:
    """Print the settings that make a tool work with a running gateway or proxy.

    They keep the tool's prefix cache alive. The proxy seals prompts; a gateway's own address does not.
    """
    tool = TOOLS.get(name)
    if tool is None:
        what = f"no tool {name!r} is known" if name else "which tool is to be set up?"
        raise InvalidInput(what, hint=f"give {', '.join(TOOLS)}", reason="BAD_TOOL")
    below = tool.file_on_macs if host_of(context).platform == "darwin" and tool.file_on_macs else tool.file
    if to_file and not below:
        raise InvalidInput(
            f"{name} has no file to be written", hint="enter them by hand", reason="BAD_OPTION"
        )

    from sealring.cli.calls.doors import open_doors
    from sealring.cli.calls.gateway import read_api_key
    from sealring.cli.calls.models import NO_KEY, key_for, served

    here = cluster_here()
    url = url or next(iter(open_doors(here.edges)), here.edges[0])
    url = url.rstrip("/").removesuffix("/v1")
    key = read_api_key(load_settings(context).settings.api_key_file)
    gateways = url == here.http and here.member is None and gateway_key_file().exists()
    key = key or key_for(url, gateway_key_file() if gateways else proxy_key_file())
    main, small = served(url, key, model)
    values = values_of(url, main, small, key or NO_KEY, Path.home())
    parts = [(file, replace(tool, content=one, kind="own")) for file, one in tool.beside.items()]
    for file, part in (*parts, (below, tool)):
        content = filled(part.content, values)
        if to_file:
            with _file_of(file):
                back = _settings(file, below, name).write(part, content)
            say(f"wrote ~/{file}; to take the settings out: {back}")
        else:
            if file:
                say(f"~/{file}:")
            write(shown(content))
    if url == here.http and here.member is None:
        say(f"the gateway at {url} can read prompts; to seal them: sealring proxy, and connect again")
    say(filled(tool.then, values))
    if warning := tool.too_long(main):
        say(f"warning: {warning}")


def _settings(file: str, main: str, name: str) -> Settings:
    """A tool's file, and where earlier versions noted what was in it."""
    record = f"{name}.json" if file == main else f"{name}.{PurePath(file).stem}.json"
    return Settings(Path.home() / file, default_state_root() / "connect" / record)


@contextmanager
def _file_of(below: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInput(
            f"~/{below} cannot be read or written: {error.strerror}",
            hint="enter the settings by hand",
            reason="BAD_FILE",
        ) from None
