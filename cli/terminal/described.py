"""What a setting is, in the words of a command's help and of docs/settings.md."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealring.mesh.settings.config import kinds_of
from sealring.mesh.settings.types import Written

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_VALUES = ((Path, "PATH"), (int, "N"), (float, "N"))


def value_of(field: FieldInfo) -> str:
    """The name of the field's value, `TIME` for example; empty for a switch."""
    written, kinds = _written(field), kinds_of(field.annotation)
    if written is not None:
        return written.metavar
    return "" if bool in kinds else next((shown for kind, shown in _VALUES if kind in kinds), "TEXT")


def default_of(field: FieldInfo) -> str:
    """The default as it is written, of a list with commas; empty where there is none."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required() or default in (None, "", [], ()):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return ", ".join(show_value(field, one) for one in (default if isinstance(default, list) else [default]))


def show_value(field: FieldInfo, value: Any) -> str:
    """A value of the field as it is written; a path below the home folder begins with `~`."""
    if isinstance(value, Path) and value.is_relative_to(Path.home()):
        return f"~/{value.relative_to(Path.home())}"
    written = _written(field)
    return str(value) if written is None else written.show(value)


def _written(field: FieldInfo) -> Written | None:
    """How a value of the field is written, where its type says so, by itself or in a list or a union."""
    return next(
        (one for one in [*field.metadata, *_extras(field.annotation)] if isinstance(one, Written)), None
    )


def _extras(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for part in typing.get_args(annotation):
        yield from _extras(part)
