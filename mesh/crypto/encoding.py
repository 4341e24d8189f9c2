"""Strict codecs for outside bytes: canonical JSON, base64, base32, and length-prefixed fields.

Everything that is parsed here has one encoding only: duplicate keys, floats, NaN, padding tricks, trailing
bytes and oversized lengths are refused before anything is allocated for them.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import functools
import json
import re
import struct
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = dict[str, Json]

MAX_INTEGER = (1 << 63) - 1
_MAX_DEPTH = 16
_U32 = struct.Struct(">I")
_FORBIDDEN = re.compile(r"[\x00-\x1f\ud800-\udfff]")


class FormatError(ValueError):
    """Outside bytes do not have their one valid form. Callers turn it into an error of their own."""


def canonical_json(value: object) -> bytes:
    """`value` as JSON with sorted keys, no spaces, ASCII only: bytes in base64, dataclasses as objects of
    their fields. Floats are refused with FormatError."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":")).encode("ascii")


@functools.cache
def field_names(kind: type[Any]) -> tuple[str, ...]:
    """The names of a dataclass's fields, which are those of its JSON object."""
    return tuple(field.name for field in dataclasses.fields(kind))


def parse_json_object(data: bytes, *, max_bytes: int) -> JsonObject:
    """Parse one JSON object strictly. Raises FormatError.

    Refused: more than `max_bytes`, invalid UTF-8, duplicate keys, floats, NaN, integers beyond 63 bits, lone
    surrogates, and nesting deeper than 16.
    """
    if len(data) > max_bytes:
        raise FormatError("document is too large")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_object,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
            parse_int=_bounded_int,
        )
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError("document is not valid JSON") from error
    if not isinstance(value, dict):
        raise FormatError("document is not an object")
    _check_depth(value, 0)
    return value


class Fields:
    """Typed, exact reading of one JSON object: the keys must be exactly those that are named."""

    def __init__(self, value: Json, names: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            raise FormatError("value is not an object")
        if set(value) != set(names):
            raise FormatError("object has unknown or missing fields")
        self._value: Mapping[str, Json] = value

    def text(self, name: str, *, max_length: int = 256, min_length: int = 1) -> str:
        """A string of bounded length without control characters or lone surrogates."""
        value = self._value[name]
        if not isinstance(value, str) or not min_length <= len(value) <= max_length:
            raise FormatError(f"field {name} is not a string of the right length")
        if _FORBIDDEN.search(value):
            raise FormatError(f"field {name} has a forbidden character")
        return value

    def integer(self, name: str, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        """An integer (never a boolean) within the bounds, both inclusive."""
        value = self._value[name]
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise FormatError(f"field {name} is not an integer within its bounds")
        return value

    def binary(self, name: str, *, sizes: tuple[int, ...]) -> bytes:
        """Bytes in canonical base64 whose length is one of `sizes`."""
        value = self._value[name]
        if not isinstance(value, str):
            raise FormatError(f"field {name} is not base64")
        data = decode_base64(value, max_bytes=max(sizes))
        if len(data) not in sizes:
            raise FormatError(f"field {name} has the wrong length")
        return data

    def blob(self, name: str, *, max_bytes: int) -> bytes:
        """Bytes in canonical base64, at least one and at most `max_bytes`."""
        value = self._value[name]
        if not isinstance(value, str):
            raise FormatError(f"field {name} is not base64")
        data = decode_base64(value, max_bytes=max_bytes)
        if not data:
            raise FormatError(f"field {name} is empty")
        return data

    def each(self, name: str, *, max_items: int, min_items: int = 0) -> list[Fields]:
        """The items of a list of bounded length, each as the one field `item`."""
        found = self.items(name, max_items=max_items, min_items=min_items)
        return [Fields({"item": item}, ("item",)) for item in found]

    def items(self, name: str, *, max_items: int, min_items: int = 0) -> list[Json]:
        """A list of bounded length."""
        value = self._value[name]
        if not isinstance(value, list) or not min_items <= len(value) <= max_items:
            raise FormatError(f"field {name} is not a list of the right length")
        return value


def encode_base64(data: bytes) -> str:
    """Standard padded base64 (RFC 4648 section 4)."""
    return base64.b64encode(data).decode("ascii")


def decode_base64(text: str, *, max_bytes: int) -> bytes:
    """Standard padded base64 in its one canonical spelling. Raises FormatError."""
    if len(text) > (max_bytes + 2) // 3 * 4:
        raise FormatError("base64 is too long")
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise FormatError("base64 is malformed") from error
    if len(data) > max_bytes or encode_base64(data) != text:
        raise FormatError("base64 is too long or not canonical")
    return data


def encode_base32(data: bytes) -> str:
    """Lowercase base32 without padding (RFC 4648 section 6)."""
    return base64.b32encode(data).decode("ascii").rstrip("=").lower()


def decode_base32(text: str, *, size: int) -> bytes:
    """Lowercase base32 without padding, in its one canonical spelling, of exactly `size` bytes.

    Raises FormatError.
    """
    if len(text) != (size * 8 + 4) // 5 or text != text.lower():
        raise FormatError("base32 has the wrong length or case")
    try:
        data = base64.b32decode(text.upper().encode("ascii") + b"=" * (-len(text) % 8))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise FormatError("base32 is malformed") from error
    if len(data) != size or encode_base32(data) != text:
        raise FormatError("base32 is not canonical")
    return data


def pack_fields(*fields: bytes) -> bytes:
    """Each field behind its length (4 bytes, big endian): an injective encoding of a list of byte strings."""
    return b"".join(_U32.pack(len(field)) + field for field in fields)


def unpack_fields(data: bytes, *, count: int | None = None, max_bytes: int) -> list[bytes]:
    """The inverse of `pack_fields`, for exactly `count` fields or for as many as there are.

    Raises FormatError.
    """
    if len(data) > max_bytes:
        raise FormatError("fields are too long")
    fields: list[bytes] = []
    offset = 0
    while offset < len(data) if count is None else len(fields) < count:
        if len(data) - offset < _U32.size:
            raise FormatError("fields are cut short")
        (length,) = _U32.unpack_from(data, offset)
        offset += _U32.size
        if length > len(data) - offset:
            raise FormatError("field is longer than what is left")
        fields.append(data[offset : offset + length])
        offset += length
    if offset != len(data):
        raise FormatError("bytes follow the last field")
    return fields


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises FormatError where a name is there twice: readers may take either value."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise FormatError("object has a duplicate field")
    return value


def _refuse_number(_text: str) -> NoReturn:
    raise FormatError("only integers are allowed")


def _bounded_int(text: str) -> int:
    if len(text) > 20 or text == "-0":
        raise FormatError("integer is too large or written in another way")
    value = int(text)
    if abs(value) > MAX_INTEGER:
        raise FormatError("integer is too large or written in another way")
    return value


def _check_depth(value: Json, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise FormatError("document is nested too deeply")
    if isinstance(value, dict):
        for item in value.values():
            _check_depth(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_depth(item, depth + 1)


def _plain(value: object) -> object:
    """What `json` writes as it is. Rosters of a thousand members come here with every change."""
    if isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return encode_base64(value)
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        return {name: _plain(getattr(value, name)) for name in field_names(kind)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise FormatError("keys have to be strings")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float):
        raise FormatError("floats have no canonical form")
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
