from __future__ import annotations

import mlx.core as mx
import pytest

from sealring.mesh.ring import Chunk, ResolvedStep
from sealring.node.engine import SharedSendBuffer, records
from sealring.node.engine.staging import StageSpec, TensorSpec
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.wire.channel import Kind

HIDDEN = TensorSpec("hidden", "bfloat16", (3,))
EXTRA = TensorSpec("extra", "float32", (2, 2))
DIGEST = bytes(range(32))


def spec(lo: int, hi: int, *receives: TensorSpec) -> StageSpec:
    return StageSpec("x", 3, lo, hi, receives, (HIDDEN,))


PREFILL = ResolvedStep(5, DIGEST, (), (Chunk(1, 0, 4, False, 256), Chunk(2, 4, 6, True, 0)), None, (), (2,))
DECODE = ResolvedStep(6, DIGEST, (), (), 0, (1, 2), (1, 2))
CHANGES = ResolvedStep(7, DIGEST, (), (), None, (), ())


def headers(step: ResolvedStep, stage: StageSpec) -> list[tuple[Kind, str, tuple[int, ...], int]]:
    found = records.incoming(step, stage)
    assert all(one.header.step == step.number and one.header.digest == DIGEST for one in found)
    return [(one.header.kind, one.header.dtype, one.header.shape, one.header.length) for one in found]


def test_the_head_is_sent_tokens_only() -> None:
    head = spec(0, 1, TOKENS)
    assert headers(PREFILL, head) == [(Kind.TOKENS, "uint32", (1,), 4)]
    assert headers(DECODE, head) == [(Kind.TOKENS, "uint32", (2,), 8)]
    assert headers(CHANGES, head) == []


def test_the_others_are_sent_parameters_and_states() -> None:
    middle = spec(1, 2, HIDDEN)
    assert headers(PREFILL, middle) == [
        (Kind.SAMPLING, "uint8", (256,), 256),
        (Kind.ACTIVATIONS, "bfloat16", (1, 4, 3), 24),
        (Kind.ACTIVATIONS, "bfloat16", (1, 2, 3), 12),
    ]
    assert headers(DECODE, middle) == [(Kind.ACTIVATIONS, "bfloat16", (2, 1, 3), 12)]
    assert headers(CHANGES, middle) == []


def test_several_tensors_travel_as_plain_bytes() -> None:
    assert headers(DECODE, spec(1, 2, HIDDEN, EXTRA)) == [(Kind.ACTIVATIONS, "uint8", (44,), 44)]


@pytest.mark.parametrize(("rows", "tokens"), [(1, 5), (3, 1)])
def test_states_come_back_from_their_bytes(rows: int, tokens: int) -> None:
    tensors = [HIDDEN, EXTRA, TOKENS]
    arrays = [
        (mx.random.normal((rows, tokens, *tensor.tail)) * 9).astype(getattr(mx, tensor.dtype))
        for tensor in tensors
    ]
    payload = b"".join(SharedSendBuffer(arrays).wait())
    header = records.state_record(DECODE, tensors, rows, tokens)
    assert len(payload) == header.length
    back = records.typed(records.raw_arrays(memoryview(payload), tensors, rows, tokens), tensors)
    for tensor, one, two in zip(tensors, arrays, back, strict=True):
        assert two.shape == (rows, tokens, *tensor.tail)
        assert mx.array_equal(one, two)


def test_an_array_that_is_not_contiguous_has_its_bytes_in_order() -> None:
    array = mx.arange(12, dtype=mx.uint32).reshape(3, 4).T
    (part,) = SharedSendBuffer([array]).wait()
    assert bytes(part) == bytes(memoryview(mx.contiguous(array))).ljust(48)  # type: ignore[arg-type]
