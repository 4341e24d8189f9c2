"""How a command is declared: with an example, and with the settings that it reads as its options.

A command names the fields that it reads of a section of the settings. Each is an option, and `load_settings`
hands out these fields and no others: an option without a reader, or a setting that is read without an option,
cannot be. The settings model is imported only when such a command runs or shows its help, so that
`sealring --help` stays quick.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shlex
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import typer
from typer.core import TyperCommand
from typer.main import get_command

from sealring.mesh.errors import ConfigError
from sealring.mesh.system.paths import default_config_file

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from sealring.mesh.settings.config import Loaded
    from sealring.mesh.settings.types import Written

F = TypeVar("F", bound=Callable[..., None])

MODELS = {
    "coordinator": ("sealring.coordinator.settings", "CoordinatorSettings"),
    "node": ("sealring.node.settings", "NodeSettings"),
    "gateway": ("sealring.gateway.settings", "GatewaySettings"),
    "cli": ("sealring.cli.settings", "CliSettings"),
}
ADMIN = ("operator", "coordinator", "timeout")
"""The settings of section `cli` that reach the coordinator's Admin service."""

_FLAGS = "sealring.flags"
_METAVARS = {"str": "TEXT", "int": "N", "float": "N", "path": "PATH", "file": "PATH", "datetime": "TIME"}


def command(
    app: typer.Typer,
    name: str | None = None,
    *,
    example: str,
    section: str = "",
    fields: Sequence[str] = (),
    **more: Any,
) -> Callable[[F], F]:
    """Makes a function a command of `app`, with options for `fields` of the settings section `section`.

    `example` is a command line that its help shows.
    """
    kind = type("Command", (Command,), {"section": section, "fields": tuple(fields)})
    return app.command(name, cls=kind, epilog=example, **more)


class Command(TyperCommand):
    """A command with settings; its help fits 80 columns and begins with its own options."""

    section: ClassVar[str] = ""
    fields: ClassVar[tuple[str, ...]] = ()

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's own arguments and options, then its settings."""
        own = super().get_params(ctx)
        settings = _options(self.section, self.fields) if self.fields else []
        return [*own[:-1], *settings, own[-1]]  # the last is --help

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
    """The settings of this call's command: settings file, then environment, then options.

    They have the fields that the command declares; any other raises AttributeError. A command with a state
    folder may write there, so that has to be its own.

    Raises ConfigError, PermissionDenied (OTHERS_STATE).
    """
    from sealring.mesh.settings.config import load
    from sealring.mesh.system.lock import require_own_state

    declared: Any = context.command
    file = config_file(context.find_root().params.get("config"))
    flags = context.meta.get(_FLAGS, {})
    loaded = load(settings_model(declared.section), declared.section, file=file, flags=flags)
    for name in type(loaded.settings).model_fields.keys() - set(declared.fields):
        del loaded.settings.__dict__[name]
    if "state_dir" in declared.fields:
        require_own_state(loaded.settings.__dict__["state_dir"], line=context.command_path)
    return loaded


def same_settings(context: typer.Context, line: str, fields: Sequence[str]) -> str:
    """The command line `sealring LINE` with those of this call's settings that it has as well."""
    words = ["sealring", *line.split()]
    config = context.find_root().params.get("config")
    if config is not None:
        words[1:1] = ["--config", str(config)]
    for name, value in context.meta.get(_FLAGS, {}).items():
        if name not in fields:
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
def _options(section: str, fields: tuple[str, ...]) -> list[Any]:
    """An option for each field; its value goes to `load_settings` and not to the command."""

    def function() -> None: ...

    described = settings_model(section).model_fields
    function.__annotations__ = {name: _kind(described[name]) for name in fields}
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(None, help=_help(described[name]), metavar=_metavar(described[name])),
                annotation=function.__annotations__[name],
            )
            for name in fields
        ]
    )
    made = typer.Typer(add_completion=False)
    made.command(add_help_option=False)(function)
    options: list[Any] = get_command(made).params
    for option in options:
        option.expose_value = False
        option.callback = _remember
    return options


def _remember(context: Any, parameter: Any, value: Any) -> None:
    if value is not None and value != () and value != []:
        given = list(value) if isinstance(value, tuple | list) else value
        context.meta.setdefault(_FLAGS, {})[parameter.name] = given


def _plain_kinds(field: FieldInfo) -> set[Any]:
    from sealring.mesh.settings.config import kinds_of

    return kinds_of(field.annotation)


def _kind(field: FieldInfo) -> Any:
    """Text, which the model validates itself; a switch for booleans; repeatable for lists."""
    kinds = _plain_kinds(field)
    if bool in kinds:
        return typing.Optional[bool]  # noqa: UP045 - typer reads it at run time
    if kinds & {list, tuple, set, frozenset}:
        return typing.Optional[list[str]]  # noqa: UP045
    return typing.Optional[str]  # noqa: UP045


def _metavar(field: FieldInfo) -> str | None:
    written = _written(field)
    if written is not None:
        return written.metavar
    kinds = _plain_kinds(field)
    if bool in kinds:
        return None
    for kind, shown in ((Path, "PATH"), (int, "N"), (float, "N")):
        if kind in kinds:
            return shown
    return "TEXT"


def _written(field: FieldInfo) -> Written | None:
    """How a value of the field is written, where its type says so, by itself or in a list or a union."""
    from sealring.mesh.settings.types import Written

    return next(
        (one for one in [*field.metadata, *_extras(field.annotation)] if isinstance(one, Written)), None
    )


def _extras(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for part in typing.get_args(annotation):
        yield from _extras(part)


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or default in (None, "", [], ()) or isinstance(default, bool):
        return text
    written = _written(field)
    show = _short if written is None else written.show
    shown = ", ".join(map(show, default if isinstance(default, list | tuple) else [default]))
    return f"{text} [default: {shown}]".strip()


def _short(value: object) -> str:
    """A path below the home folder with `~`."""
    if isinstance(value, Path) and value.is_relative_to(Path.home()):
        return f"~/{value.relative_to(Path.home())}"
    return str(value)


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
