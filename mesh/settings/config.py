"""Settings from a TOML file, then the environment, then the command line, each value with its origin.

A file has one table per section; an environment variable is `SEALRING_<SECTION>_<FIELD>`. An unknown name is
refused with the nearest known one, so that a typo never means the default.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from sealring.mesh.errors import ConfigError, SealringError
from sealring.mesh.system.files import read_bounded

SECTIONS = ("coordinator", "node", "gateway", "cli")
PREFIX = "SEALRING"

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """Validated settings; `origin[field]` is "default", "file:PATH", "env:NAME", "flag --set FIELD" or
    "flag --FIELD"."""

    settings: M
    origin: Mapping[str, str]


def load(
    model: type[M],
    section: str,
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    said: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Loaded[M]:
    """The settings of `section`: each of these sources overrides those before it.

    `said` are texts KEY=VALUE of `--set`. `flags` has values by field, of which None is
    not said.

    Raises ConfigError: CONFIG_FILE_MISSING, BAD_CONFIG_FILE, UNKNOWN_SETTING, BAD_SETTING.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(model.model_fields, "default")
    sources = (
        _from_file(model, section, file),
        _from_environment(model, section, os.environ if environment is None else environment),
        _from_set(model, section, said),
        {
            name: (value, f"flag --{name.replace('_', '-')}")
            for name, value in (flags or {}).items()
            if value is not None
        },
    )
    for source in sources:
        for name, (value, where) in source.items():
            _check_path(model, section, name, value, where)
            values[name] = value
            origin[name] = where
    try:
        settings = model.model_validate(values)
    except ValidationError as error:
        raise _bad_setting(error, model, section, origin) from None
    except SealringError as error:
        raise ConfigError(
            f"section [{section}]: {error.message}", hint=error.hint, reason=error.reason, **error.metadata
        ) from None
    return Loaded(settings, origin)


def read_toml(file: Path) -> dict[str, dict[str, Any]]:
    """The tables of a settings file, all of known sections.

    Raises ConfigError: CONFIG_FILE_MISSING, BAD_CONFIG_FILE, UNKNOWN_SETTING.
    """
    try:
        text = read_bounded(file).decode("utf-8")
        tables = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {file}", reason="CONFIG_FILE_MISSING") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {file}: {error.strerror}", reason="BAD_CONFIG_FILE"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"the config file {file} is not UTF-8 text", reason="BAD_CONFIG_FILE") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the config file {file} is not TOML: {_lower_first(str(error))}", reason="BAD_CONFIG_FILE"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(
            f"the config file {file} has too long a number or is nested too deeply", reason="BAD_CONFIG_FILE"
        ) from None
    for name, table in tables.items():
        if name not in SECTIONS:
            raise unknown(f"section [{name[:40]}] in {file}", name, SECTIONS)
        if not isinstance(table, dict):
            raise ConfigError(f"[{name}] in {file} is not a table", reason="BAD_CONFIG_FILE")
    return tables


def unknown(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for an unknown name, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names)
    hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(names)}"
    return ConfigError(f"unknown {what}", hint=hint, reason="UNKNOWN_SETTING", name=name[:80])


def environment_name(section: str, field: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}_{section}_{field}".upper()


def _from_file(model: type[BaseModel], section: str, file: Path | None) -> dict[str, tuple[Any, str]]:
    if file is None:
        return {}
    table = read_toml(file).get(section, {})
    for name in table:
        if name not in model.model_fields:
            raise unknown(f"setting {name[:40]!r} in section [{section}] of {file}", name, model.model_fields)
    return {name: (_expand(model, name, value), f"file:{file}") for name, value in table.items()}


def _from_environment(
    model: type[BaseModel], section: str, environment: Mapping[str, str]
) -> dict[str, tuple[Any, str]]:
    known = {environment_name(section, name): name for name in model.model_fields}
    prefix = environment_name(section, "")
    found: dict[str, tuple[Any, str]] = {}
    for variable, text in environment.items():
        if not variable.startswith(prefix):
            continue
        if variable not in known:
            raise unknown(f"environment variable {variable[:80]}", variable, known)
        where = f"env:{variable}"
        found[known[variable]] = (_parsed(model, known[variable], text, where), where)
    return found


def _from_set(model: type[BaseModel], section: str, said: Sequence[str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for one in said:
        name, equals, text = one.partition("=")
        where = f"flag --set {name}"
        if name not in model.model_fields:
            raise unknown(f"setting {name[:40]!r} of [{section}] in --set", name, model.model_fields)
        if not equals:
            raise ConfigError(f"{where} has no value", hint="write: --set KEY=VALUE", reason="BAD_SETTING")
        found[name] = (_parsed(model, name, text, where), where)
    return found


def _parsed(model: type[BaseModel], name: str, text: str, where: str) -> Any:
    """Lists are JSON or separated by commas; the rest is left to the model's own parser."""
    if list not in kinds_of(model.model_fields[name].annotation):
        return _expand(model, name, text)
    items = [item.strip() for item in text.split(",") if item.strip()]
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"the list from {where} is not JSON", reason="BAD_SETTING") from None
    return _expand(model, name, items)


def _expand(model: type[BaseModel], name: str, value: Any) -> Any:
    """Replaces `~/` in a path by the home folder: no shell has done so in a file or the environment."""
    if Path not in kinds_of(model.model_fields[name].annotation):
        return value
    return [_expanded(one) for one in value] if isinstance(value, list) else _expanded(value)


def _expanded(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) and value[:2] == "~/" else value


def _check_path(model: type[BaseModel], section: str, name: str, value: Any, where: str) -> None:
    """Refuses an empty path, which would be the working folder: mostly a variable was not set.

    Raises ConfigError (BAD_SETTING).
    """
    if Path in kinds_of(model.model_fields[name].annotation) and "" in (
        value if isinstance(value, list) else [value]
    ):
        raise ConfigError(
            f"setting {name!r} of section [{section}], from {where}, is refused: it is empty",
            hint="name a place, or leave it out",
            reason="BAD_SETTING",
            param=name,
        )


def kinds_of(annotation: Any) -> set[Any]:
    """Every plain type that an annotation mentions."""
    origin = typing.get_origin(annotation)
    if origin is None:
        return {annotation}
    found = set() if origin in (typing.Union, types.UnionType, typing.Annotated) else {origin}
    return found.union(*(kinds_of(part) for part in typing.get_args(annotation)))


def _bad_setting(
    error: ValidationError, model: type[BaseModel], section: str, origin: Mapping[str, str]
) -> ConfigError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    path = ".".join(str(part) for part in first["loc"])
    said = _lower_first(first["msg"].removeprefix("Value error, "))
    if not name:  # settings that exclude each other; the model's own check names them
        return ConfigError(f"section [{section}] is refused: {said}", reason="BAD_SETTING")
    cause = getattr(first.get("ctx", {}).get("error"), "__cause__", None)
    return ConfigError(
        f"setting {path!r} of section [{section}], from {origin.get(name, 'default')}, is refused: {said}",
        hint=cause.hint if isinstance(cause, SealringError) else model.model_fields[name].description or "",
        reason="BAD_SETTING",
        param=name,
    )


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
