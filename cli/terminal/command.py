"""How a command is declared: with an example, and with the settings that it reads as its options.

A command names those fields of a section of the settings that are its options. If it runs a component, it
takes all others by `--set KEY=VALUE`. The settings model is imported only when such a command runs or shows
its help, so that `sealring --help` stays quick.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import typer
from typer.core import TyperCommand
from typer.main import get_command

from sealring.mesh.errors import ConfigError
from sealring.mesh.system.paths import default_config_file

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from sealring.cli.here.found import Here
    from sealring.mesh.settings.config import Loaded

F = TypeVar("F", bound=Callable[..., None])

MODELS = {
    "coordinator": ("sealring.coordinator.settings", "CoordinatorSettings"),
    "node": ("sealring.node.settings", "NodeSettings"),
    "gateway": ("sealring.gateway.settings", "GatewaySettings"),
    "cli": ("sealring.cli.settings", "CliSettings"),
}
ADMIN = ("operator", "coordinator", "timeout")
"""The settings of section `cli` that reach the coordinator's Admin service."""

_FLAGS, _TOLD = "sealring.flags", "sealring.told"
_SET = "set"
_SET_OPTION = "--set"
_METAVARS = {"str": "TEXT", "int": "N", "float": "N", "path": "PATH", "file": "PATH", "datetime": "TIME"}


def command(
    app: typer.Typer,
    name: str | None = None,
    *,
    example: str,
    section: str = "",
    fields: Sequence[str] = (),
    every: bool = False,
    **more: Any,
) -> Callable[[F], F]:
    """Makes a function a command of `app`, with options for `fields` of the settings section `section`.

    `every` says that it takes any other setting too, by `--set`. `example` is a command line that its help
    shows.
    """
    kind = type("Command", (Command,), {"section": section, "fields": tuple(fields), "every": every})
    return app.command(name, cls=kind, epilog=example, **more)


class Command(TyperCommand):
    """A command with settings; its help fits 80 columns and begins with its own options."""

    section: ClassVar[str] = ""
    fields: ClassVar[tuple[str, ...]] = ()
    every: ClassVar[bool] = False

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's own arguments and options, then its settings."""
        own = super().get_params(ctx)
        settings = _options(self.section, self.fields, self.every) if self.fields else []
        return [*own[:-1], *settings, own[-1]]  # the last is --help

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does; for an option that is a setting, the error names `--set`."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            given = str(getattr(error, "option_name", None) or "")
            name = given.removeprefix("--").removeprefix("no-").replace("-", "_")
            if self.every and name in settings_model(self.section).model_fields:
                vars(error)["possibilities"] = [f"{_SET_OPTION} {name}=VALUE"]
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as their names, in brackets where they may be left out."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_argument_name, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the example, the arguments, the options by groups, and the settings."""
        if self.epilog:
            with formatter.section("Example"):
                formatter.write(f"  {self.epilog}\n")
        settings = f"Settings (also in [{self.section}] of the settings file)"
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False):
                continue
            if param.param_type_name == "argument":
                group = "Arguments"
            elif param.callback is _remember:
                group = settings
            else:
                group = getattr(param, "rich_help_panel", None) or "Options"
            groups.setdefault(group, []).append(_row(param, ctx))
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows, col_max=28)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Nothing: the example stands above the options."""


def settings_model(section: str) -> type[BaseModel]:
    """The settings model of a section of the settings file."""
    module, name = MODELS[section]
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


def load_settings(context: typer.Context) -> Loaded[Any]:
    """The settings of this call's command: settings file, then environment, then `--set` and options.

    A command with a state folder may write there, so that has to be its own.

    Raises ConfigError, PermissionDenied (OTHERS_STATE).
    """
    from sealring.mesh.settings.config import load
    from sealring.mesh.system.lock import require_own_state

    declared: Any = context.command
    file = config_file(context.find_root().params.get("config"))
    flags = dict(context.meta.get(_FLAGS, {}))
    said = flags.pop(_SET, ())
    loaded = load(settings_model(declared.section), declared.section, file=file, said=said, flags=flags)
    if "state_dir" in declared.fields:
        require_own_state(getattr(loaded.settings, "state_dir"), line=context.command_path)  # noqa: B009 - not of all
    if declared.section == "cli" and not context.meta.setdefault(_TOLD, False):
        context.meta[_TOLD] = True
        _tell_demo(loaded)
    return loaded


def state_here(context: typer.Context) -> Path:
    """The state folder that the settings of this call name, else that of this machine's cluster.

    Raises as `load_settings`.
    """
    from sealring.cli.here.found import require_account

    loaded, section = load_settings(context), cast("Any", context.command).section
    if loaded.origin["state_dir"] != "default":
        return cast("Path", loaded.settings.state_dir)
    folder = demo_told().folder(section)
    require_account(folder)
    return folder


def _tell_demo(loaded: Loaded[Any]) -> None:
    if loaded.origin["operator"] == loaded.origin["gateway"] == "default":
        demo_told()


def demo_told() -> Here:
    """The cluster of this machine. It says that a demo was found, if that is meant."""
    from sealring.cli.here.found import cluster_here
    from sealring.cli.terminal.output import say

    here = cluster_here()
    if not here.own:
        say(f"found the demo in {here.root}")
    return here


def same_settings(context: typer.Context, line: str, fields: Sequence[str]) -> str:
    """The command line `sealring LINE` with those of this call's settings that it has as well."""
    words = ["sealring", *line.split()]
    config = context.find_root().params.get("config")
    if config is not None:
        words[1:1] = ["--config", str(config)]
    for name, value in context.meta.get(_FLAGS, {}).items():
        if name not in (*fields, _SET):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{flag}", str(one)]
    return shlex.join(words)


def config_file(named: Path | None) -> Path | None:
    """The settings file to read: the one named, that of SEALRING_CONFIG, or the user's own if it is there."""
    if named is not None:
        return named
    variable = os.environ.get("SEALRING_CONFIG")
    if variable:
        return Path(variable)
    own = default_config_file()
    try:
        return own if own.is_file() else None
    except OSError as error:
        raise ConfigError(f"cannot read {own}: {error.strerror}", reason="BAD_CONFIG_FILE") from None


@functools.cache
def _options(section: str, fields: tuple[str, ...], every: bool) -> list[Any]:
    """An option for each field, and `--set`; their values go to `load_settings` and not to the command."""
    described = settings_model(section).model_fields
    given = [_parameter(name, _kind(described[name]), _option(described[name])) for name in fields]
    if every:
        text = f"any other of docs/settings.md; may be repeated (values: sealring config show {section})"
        option = typer.Option(None, _SET_OPTION, help=text, metavar="KEY=VALUE")
        given.append(_parameter(_SET, list[str] | None, option))

    def function() -> None: ...

    function.__annotations__ = {one.name: one.annotation for one in given}
    # Typer makes options of what `inspect.signature` says, which reads this first
    function.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    made = typer.Typer(add_completion=False)
    made.command(add_help_option=False)(function)
    options: list[Any] = get_command(made).params
    for option in options:
        option.expose_value = False
        option.callback = _remember
    return options


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def _remember(context: Any, parameter: Any, value: Any) -> None:
    if value is not None and value != () and value != []:
        given = list(value) if isinstance(value, tuple | list) else value
        context.meta.setdefault(_FLAGS, {})[parameter.name] = given


def _kind(field: FieldInfo) -> Any:
    """Text, which the model validates itself; a switch for booleans; repeatable for lists."""
    from sealring.mesh.settings.config import kinds_of

    kinds = kinds_of(field.annotation)
    return bool | None if bool in kinds else list[str] | None if list in kinds else str | None


def _option(field: FieldInfo) -> Any:
    from sealring.cli.terminal.described import default_of, value_of

    value, default = value_of(field), default_of(field)
    shown = f" [default: {default}]" if value and default else ""
    return typer.Option(None, help=f"{field.description}{shown}", metavar=value or None)


def _argument_name(param: Any) -> str:
    name = f"{param.metavar or param.name.upper()}{'...' if param.nargs == -1 else ''}"
    return name if param.required else f"[{name}]"


def _row(param: Any, context: Any) -> tuple[str, str]:
    """Names, kind of value, help and default of an argument or option."""
    text = param.help
    if param.param_type_name == "argument":
        return _argument_name(param), text
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        names = f"--[no-]{param.opts[0].removeprefix('--')}"
    elif not param.is_flag:
        kind = param.display_type(context).strip("<>").removesuffix(" range")
        kind = kind.removeprefix("list[").removesuffix("]")
        names += f" {param.metavar or _METAVARS.get(kind, kind)}"
    notes = []
    if getattr(param, "required", False):
        notes.append("required")
    default = param.default
    if param.show_default and not param.is_flag and default not in (None, "", 0, 0.0, [], ()):
        notes.append(f"default: {getattr(default, 'value', default)}")
    elif param.secondary_opts and default is not None:
        chosen = param.opts if default else param.secondary_opts
        notes.append(f"default: {chosen[0].lstrip('-')}")
    return names, " ".join(part for part in (text, f"[{', '.join(notes)}]" if notes else "") if part)
