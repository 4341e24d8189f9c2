"""Every setting of a component as a flag of its commands, made from the settings model when it is needed.

The model is imported only when such a command runs or shows its help, so that `sealring --help` stays quick.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from sealring.mesh.errors import ConfigError
from sealring.mesh.system.paths import default_config_file

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from sealring.mesh.system.config import Loaded

MODELS = {
    "coordinator": ("sealring.coordinator.settings", "CoordinatorSettings"),
    "node": ("sealring.node.settings", "NodeSettings"),
    "gateway": ("sealring.gateway.settings", "GatewaySettings"),
    "cli": ("sealring.cli.settings", "CliSettings"),
}
_FLAGS = "sealring.flags"


def settings_model(section: str) -> type[BaseModel]:
    """The settings model of a section of the config file."""
    module, name = MODELS[section]
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


def settings_command(section: str) -> type[TyperCommand]:
    """A command class whose options also are the settings of `section`; read them with `load_settings`."""

    class SettingsCommand(TyperCommand):
        def get_params(self, ctx: Any) -> list[Any]:
            own = super().get_params(ctx)
            taken = {param.name for param in own}
            return [*(flag for flag in _flags(section) if flag.name not in taken), *own]

    return SettingsCommand


def load_settings(context: typer.Context, section: str) -> Loaded[Any]:
    """The settings of `section` for this call: config file, then environment, then flags.

    Raises ConfigError.
    """
    from sealring.mesh.system.config import load

    root = context.find_root()
    flags = context.meta.get(_FLAGS, {})
    return load(settings_model(section), section, file=config_file(root.params.get("config")), flags=flags)


def same_settings(context: typer.Context, command: str) -> str:
    """A command line of `sealring COMMAND` with the settings that this call was given as flags."""
    words = ["sealring", *command.split()]
    config = context.find_root().params.get("config")
    if config is not None:
        words[1:1] = ["--config", str(config)]
    for name, value in context.meta.get(_FLAGS, {}).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            for one in value if isinstance(value, list) else [value]:
                words += [f"--{flag}", str(one)]
    return shlex.join(words)


def config_file(named: Path | None) -> Path | None:
    """The config file to read: the one named, that of SEALRING_CONFIG, or the user's own if there is one."""
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


def _flags(section: str) -> Iterator[Any]:
    def command() -> None: ...

    model = settings_model(section)
    command.__annotations__ = {name: _kind(field) for name, field in model.model_fields.items()}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(None, help=_help(field), metavar=_metavar(field), show_default=False),
                annotation=command.__annotations__[name],
            )
            for name, field in model.model_fields.items()
        ]
    )
    made = typer.Typer(add_completion=False)
    made.command(add_help_option=False)(command)
    for flag in get_command(made).params:
        flag.expose_value = False
        flag.callback = _remember
        yield flag


def _remember(context: Any, parameter: Any, value: Any) -> None:
    if value is not None and value != () and value != []:
        given = list(value) if isinstance(value, tuple | list) else value
        context.meta.setdefault(_FLAGS, {})[parameter.name] = given


def _plain_kinds(field: FieldInfo) -> set[Any]:
    from sealring.mesh.system.config import kinds_of

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
    kinds = _plain_kinds(field)
    if bool in kinds:
        return None
    for kind, shown in ((Path, "PATH"), (int, "NUMBER"), (float, "NUMBER")):
        if kind in kinds:
            return shown
    return "TEXT"


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or default in (None, "", [], ()) or isinstance(default, bool):
        return text
    return f"{text} [default: {default}]".strip()
