"""What a head says of one row after a step."""

from __future__ import annotations

from typing import Any

from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

_OF_OUTPUT = frozenset({"finish", "prefixes", "ends", "token", "held"})


def row_output(row: int, **fields: Any) -> control.RowOutput:
    """The output of a row; fields that RowOutput has not itself are those of its delta."""
    own = {name: value for name, value in fields.items() if name in _OF_OUTPUT}
    delta = {name: value for name, value in fields.items() if name not in _OF_OUTPUT}
    return control.RowOutput(row=row, delta=inference.Delta(**delta), **own)
