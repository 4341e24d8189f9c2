"""`sealring config`: what is set, and by whom."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sealring.cli.terminal.command import MODELS, command, config_file, settings_model
from sealring.cli.terminal.options import AsJson
from sealring.cli.terminal.output import print_json, print_table, say

app = typer.Typer(name="config", help="Settings and where they come from.", no_args_is_help=True)


@command(app, example="sealring config show node")
def show(
    context: typer.Context,
    sections: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION", help="coordinator, node, gateway, cli [default: all]"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show every setting with its value and its source: default, file, environment."""
    from sealring.mesh.settings.config import load, unknown

    file = config_file(context.find_root().params.get("config"))
    shown: dict[str, dict[str, Any]] = {}
    for section in sections or MODELS:
        if section not in MODELS:
            raise unknown(f"section {section[:40]!r}", section, MODELS)
        loaded = load(settings_model(section), section, file=file)
        values = loaded.settings.model_dump(mode="json")
        shown[section] = {
            name: {"value": values[name], "origin": origin} for name, origin in loaded.origin.items()
        }
    if as_json:
        print_json(shown)
        return
    rows = [
        [f"{section}.{name}", _text(one["value"]), one["origin"]]
        for section, fields in shown.items()
        for name, one in fields.items()
    ]
    print_table(["setting", "value", "from"], rows)
    if file is None:
        say("no config file is read")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
