"""Counts the fields of a protobuf message before it is parsed.

Millions of empty messages fit into the bytes of one that is taken, and each costs an object. Decoding holds
the interpreter lock, so all other streams of the process would stand still for it. Fields are counted by the
wire format (protobuf.dev/programming-guides/encoding), which costs some milliseconds at most.
"""

from __future__ import annotations

from typing import Any

from sealring.mesh.errors import InvalidInput

MAX_FIELDS = 1 << 14
"""In one message, with those of the messages within it. The longest conversation has 4096 messages of two."""

_LEAST_BYTES = 2
"""Of a field."""

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_FIXED = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}


def check_fields(data: bytes, descriptor: Any, most: int = MAX_FIELDS) -> None:
    """Raises InvalidInput (TOO_MANY_VALUES). What is no such message passes: its decoder says so."""
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
                else:  # begins and ends of groups, whose fields are then counted here, have nothing more
                    at += _FIXED.get(wire, 0)
                if left < 0:
                    raise _too_many(most)
        except IndexError:  # it ends too soon; a decoder builds what stands before that all the same
            continue


_MESSAGES: dict[str, dict[int, str]] = {}
"""Of each kind of message: its fields that are messages themselves, and of what kind."""


def _learn(descriptor: Any) -> None:
    if descriptor.full_name not in _MESSAGES:
        inner = {field.number: field.message_type for field in descriptor.fields if field.message_type}
        _MESSAGES[descriptor.full_name] = {number: one.full_name for number, one in inner.items()}
        for one in inner.values():
            _learn(one)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError where it does not end."""
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
