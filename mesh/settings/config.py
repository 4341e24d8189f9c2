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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from sealring.mesh.errors import ConfigError, SealringError
from sealring.mesh.system.files import read_bounded

SECTIONS = ("coordinator", "node", "gateway", "cli")
PREFIX = "SEALRING"

M = TypeVar("M", bound=BaseModel)
Given = tuple[str, Any, str]
"""A setting's name, its value, and where it comes from."""


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

    `said` are texts KEY=VALUE of `--set`. `flags` has values by field, where None is no value.

    Raises ConfigError: CONFIG_FILE_MISSING, BAD_CONFIG_FILE, UNKNOWN_SETTING, BAD_SETTING.
    """
    values: dict[str, Any] = {}
    origin = dict.fromkeys(model.model_fields, "default")
    variables = os.environ if environment is None else environment
    for source in (
        _from_file(model, section, file),
        _from_environment(model, section, variables),
        _from_set(model, section, said),
        ((name, value, f"flag --{name.replace('_', '-')}") for name, value in (flags or {}).items()),
    ):
        for name, value, where in source:
            if value is not None:
                values[name], origin[name] = _placed(model, section, name, value, where), where
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


def _from_file(model: type[BaseModel], section: str, file: Path | None) -> Iterator[Given]:
    for name, value in (read_toml(file).get(section, {}) if file is not None else {}).items():
        if name not in model.model_fields:
            raise unknown(f"setting {name[:40]!r} in section [{section}] of {file}", name, model.model_fields)
        yield name, value, f"file:{file}"


def _from_environment(
    model: type[BaseModel], section: str, environment: Mapping[str, str]
) -> Iterator[Given]:
    known = {environment_name(section, name): name for name in model.model_fields}
    for variable, text in environment.items():
        if variable in known:
            where = f"env:{variable}"
            yield known[variable], _parsed(model, known[variable], text, where), where
        elif variable.startswith(environment_name(section, "")):
            raise unknown(f"environment variable {variable[:80]}", variable, known)


def _from_set(model: type[BaseModel], section: str, said: Sequence[str]) -> Iterator[Given]:
    for one in said:
        name, equals, text = one.partition("=")
        where = f"flag --set {name}"
        if name not in model.model_fields:
            raise unknown(f"setting {name[:40]!r} of [{section}] in --set", name, model.model_fields)
        if not equals:
            raise ConfigError(f"{where} has no value", hint="write: --set KEY=VALUE", reason="BAD_SETTING")
        yield name, _parsed(model, name, text, where), where


def _parsed(model: type[BaseModel], name: str, text: str, where: str) -> Any:
    """Lists are JSON or separated by commas; the rest is left to the model's own parser."""
    if list not in kinds_of(model.model_fields[name].annotation):
        return text
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigError(f"the list from {where} is not JSON", reason="BAD_SETTING") from None
    return [item.strip() for item in text.split(",") if item.strip()]


def _placed(model: type[BaseModel], section: str, name: str, value: Any, where: str) -> Any:
    """A path with the home folder for `~/`, which a shell replaces only in some places.

    Raises ConfigError (BAD_SETTING) for an empty path, which would be the working folder: mostly a variable
    was not set.
    """
    if Path not in kinds_of(model.model_fields[name].annotation):
        return value
    paths = value if isinstance(value, list) else [value]
    if "" in paths:
        raise ConfigError(
            f"setting {name!r} of section [{section}], from {where}, is refused: it is empty",
            hint="name a place, or leave it out",
            reason="BAD_SETTING",
            param=name,
        )
    paths = [Path(one).expanduser() if str(one).startswith("~/") else one for one in paths]
    return paths if isinstance(value, list) else paths[0]


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
