"""The records that a step puts on the links beside one member, and arrays to and from their payloads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from sealring.mesh.ring.composition import Chunk, ResolvedStep
from sealring.node.engine.logprobs import Asking, words_of
from sealring.node.engine.staging import ShardSpec, StageSpec, TensorSpec
from sealring.node.wire.channel import Kind, RecordHeader

_ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Incoming:
    """An announced record of a step, for `rows` x `tokens`. `asking` is for records of tokens."""

    header: RecordHeader
    step: ResolvedStep
    rows: int
    tokens: int
    asking: Asking = ()


def incoming(step: ResolvedStep, spec: StageSpec, asking: Asking = ()) -> list[Incoming]:
    """The records that a member of a longer ring receives in a step, in order.

    `asking`: at the head, the sampled rows that ask for log-probabilities.
    """
    if spec.is_head:
        if not step.sampled:
            return []
        return [Incoming(tokens_record(step, asking), step, len(step.sampled), 1, asking)]
    if step.rows and isinstance(spec, ShardSpec) and spec.is_tail:
        return []  # the last rank has sampled the tokens itself
    if step.rows:
        rows, tokens = len(step.rows), 1 + step.drafts
        return [Incoming(state_record(step, spec.receiving(step.taps), rows, tokens), step, rows, tokens)]
    records = []
    for chunk in step.chunks:
        if chunk.params_bytes:
            records.append(Incoming(params_record(step, chunk), step, 1, 0))
        state = state_record(step, spec.receiving(chunk.taps), 1, chunk.tokens)
        records.append(Incoming(state, step, 1, chunk.tokens))
    return records


def params_record(step: ResolvedStep, chunk: Chunk) -> RecordHeader:
    size = chunk.params_bytes
    return RecordHeader(Kind.SAMPLING, step.number, step.digest, "uint8", (size,), size)


def tokens_record(step: ResolvedStep, asking: Asking) -> RecordHeader:
    """Header of a word for each token, and for each that the tail guesses, then the words of
    log-probabilities (node.engine.logprobs)."""
    count = len(step.sampled) + step.guesses * len(step.rows) + words_of(asking)
    return RecordHeader(Kind.TOKENS, step.number, step.digest, "uint32", (count,), 4 * count)


def state_record(step: ResolvedStep, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> RecordHeader:
    """The stage state of `rows` x `tokens`; several tensors, or one of many dimensions, are plain bytes."""
    length = sum(state_bytes(tensor, rows, tokens) for tensor in tensors)
    dtype, shape = tensors[0].dtype, (rows, tokens, *tensors[0].tail)
    if len(tensors) > 1 or len(shape) > _MAX_DIMENSIONS:
        dtype, shape = "uint8", (length,)
    return RecordHeader(Kind.ACTIVATIONS, step.number, step.digest, dtype, shape, length)


def raw_arrays(data: memoryview, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> list[mx.array]:
    """Copies a state's payload into one array of words per tensor. Needs no stream, so any thread may."""
    arrays, start = [], 0
    for tensor in tensors:
        end = start + state_bytes(tensor, rows, tokens)
        words = np.frombuffer(data[start:end], dtype=f"u{_ITEM_BYTES[tensor.dtype]}")
        arrays.append(mx.array(words.reshape(rows, tokens, *tensor.tail)))
        start = end
    return arrays


def typed(raw: Sequence[mx.array], tensors: Sequence[TensorSpec]) -> list[mx.array]:
    """The arrays of `raw_arrays` as the stage receives them."""
    return [array.view(getattr(mx, tensor.dtype)) for array, tensor in zip(raw, tensors, strict=True)]


def state_bytes(tensor: TensorSpec, rows: int, tokens: int) -> int:
    """The bytes of one tensor of a stage state."""
    return rows * tokens * math.prod(tensor.tail) * _ITEM_BYTES[tensor.dtype]
