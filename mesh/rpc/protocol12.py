"""What machines of protocol 12 say otherwise than those of 13: field by field what these say as one message.

The contract calls these fields deprecated. Delete this file, what imports it and these fields when
OLDEST_PROTOCOL is 13.
"""

from __future__ import annotations

from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from sealring.v1 import control_pb2, engine_pb2

PROTOCOL = 12


def say_as_12(event: bytes) -> bytes:
    """A serialized EngineEvent as a gateway reads it in an epoch of this protocol."""
    said = engine_pb2.EngineEvent.FromString(event)
    if not said.HasField("done"):
        return event
    for output in said.done.outputs:
        say_singly(output, "delta")
        output.ClearField("delta")
    return said.SerializeToString()


def read_from_12(done: control_pb2.StepDone) -> None:
    """Makes what a head said in an epoch of this protocol what one of 13 would have said."""
    for output in done.outputs:
        output.ClearField("delta")
        read_singly(output, "delta")


def rows_ahead_in_12(attached: control_pb2.Attached) -> None:
    """Has a source guess ahead for one row, as members of this protocol take steps with such guesses."""
    for source in attached.sources:
        if source.ahead:
            source.rows = 1


def say_singly(message: Message, whole: str) -> None:
    """Repeats the fields of the message `whole` in the deprecated fields of their names."""
    _copy(getattr(message, whole), message, _single(message.DESCRIPTOR))


def read_singly(message: Message, whole: str) -> None:
    """Makes the message `whole` of the deprecated fields, unless it is there. Leaves none of these."""
    single = _single(message.DESCRIPTOR)
    if not message.HasField(whole):
        _copy(message, getattr(message, whole), single)
    for name in single & set(getattr(message, whole).DESCRIPTOR.fields_by_name):
        message.ClearField(name)


@cache
def _single(kind: Descriptor) -> set[str]:
    return {field.name for field in kind.fields if field.GetOptions().deprecated}


def _copy(source: Message, target: Message, names: set[str]) -> None:
    for field, value in source.ListFields():
        if field.name not in names or field.name not in target.DESCRIPTOR.fields_by_name:
            continue
        if field.message_type is not None:
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)
