"""Counts the fields of a protobuf message before it is parsed.

Millions of empty messages fit into one of an allowed size, and each costs an object. Decoding holds the
interpreter lock, so all other streams of the process would stand still. Counting the fields of the wire
format (protobuf.dev/programming-guides/encoding) costs a few milliseconds at most.
"""

from __future__ import annotations

from typing import Any

from sealring.mesh.errors import InvalidInput

MAX_FIELDS = 1 << 14
"""Fields of one message, including those of nested messages. The longest conversation has 4096 messages of
two."""

_LEAST_BYTES = 2
"""The size of the smallest field."""

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


def check_fields(data: bytes, descriptor: Any, most: int = MAX_FIELDS) -> None:
    """Raises InvalidInput (TOO_MANY_VALUES). A malformed message passes: its decoder refuses it."""
    if len(data) <= _LEAST_BYTES * most:
        return
    left = most
    within = [(0, len(data), descriptor.full_name)]
    _learn(descriptor)
    while within:
        at, end, name = within.pop()
        messages = _MESSAGES[name]
        try:
            while at < end:
                left -= 1
                tag = data[at]
                at += 1
                if tag > 0x7F:
                    tag, at = _varint(data, at - 1)
                wire = tag & 7
                if wire == _LENGTH:
                    length = data[at]
                    at += 1
                    if length > 0x7F:
                        length, at = _varint(data, at - 1)
                    if tag >> 3 in messages:
                        within.append((at, at + length, messages[tag >> 3]))
                    at += length
                elif wire == _VARINT:
                    _, at = _varint(data, at)
                else:  # the start or end tag of a group has no value; the group's fields are counted here
                    at += _FIXED.get(wire, 0)
                if left < 0:
                    raise _too_many(most)
        except IndexError:  # truncated: a decoder would still build the fields before the end
            continue


_MESSAGES: dict[str, dict[int, str]] = {}
"""For each message type: the numbers of its fields that hold messages, and their types."""


def _learn(descriptor: Any) -> None:
    if descriptor.full_name not in _MESSAGES:
        inner = {field.number: field.message_type for field in descriptor.fields if field.message_type}
        _MESSAGES[descriptor.full_name] = {number: one.full_name for number, one in inner.items()}
        for one in inner.values():
            _learn(one)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at an offset, and the offset behind it. Raises IndexError if it does not end."""
    number = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError


def _too_many(most: int) -> InvalidInput:
    return InvalidInput(
        f"the message has more than {most} fields",
        hint="send fewer",
        reason="TOO_MANY_VALUES",
        limit=most,
    )
