"""What machines of protocol 12 say otherwise than those of 13.

Delete this file, what imports it and the fields of the contract that name it when OLDEST_PROTOCOL is 13.
"""

from __future__ import annotations

from google.protobuf.message import Message

from sealring.v1 import control_pb2, engine_pb2

PROTOCOL = 12

_DELTA = ("text", "sealed", "tokens", "logprobs", "parsed")
"""Fields of Delta that RowOutput has itself."""


def say_as_12(event: bytes) -> bytes:
    """A serialized EngineEvent as a gateway reads it in an epoch of this protocol."""
    said = engine_pb2.EngineEvent.FromString(event)
    if not said.HasField("done"):
        return event
    for output in said.done.outputs:
        _move(output.delta, output)
        output.ClearField("delta")
    return said.SerializeToString()


def read_from_12(done: control_pb2.StepDone) -> None:
    """Makes what a head said in an epoch of this protocol what one of 13 would have said."""
    for output in done.outputs:
        output.ClearField("delta")
        _move(output, output.delta)


def _move(source: Message, target: Message) -> None:
    for field, value in source.ListFields():
        if field.name not in _DELTA:
            continue
        if field.message_type is not None:
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)
        source.ClearField(field.name)
