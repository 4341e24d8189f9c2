from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from sealring.node.engine import SharedSendBuffer
from sealring.node.engine.staging import TensorSpec
from sealring.node.engine.transfer import SharedTransfer, transfer

TENSORS = (TensorSpec("hidden", "bfloat16", (4, 3)), TensorSpec("ids", "int32", ()))


def test_a_graph_is_built_on_what_is_not_there_yet() -> None:
    made = transfer()
    buffer = made.receive_buffer(TENSORS, 2, 5)
    hidden, ids = buffer.arrays
    assert (hidden.shape, hidden.dtype, ids.shape, ids.dtype) == ((2, 5, 4, 3), mx.bfloat16, (2, 5), mx.int32)
    sums = mx.sum(hidden.astype(mx.float32), axis=(2, 3)) + ids
    sent = mx.random.normal((2, 5, 4, 3)).astype(mx.bfloat16)
    numbers = np.arange(10, dtype=np.int32)
    payload = bytes(memoryview(sent.view(mx.uint8))) + numbers.tobytes()  # type: ignore[arg-type]
    filler = threading.Thread(target=buffer.fill, args=(memoryview(payload),))
    filler.start()
    filler.join()
    results = made.send_buffer([sums])
    mx.async_eval(results.pending)  # type: ignore[no-untyped-call]
    (out,) = results.wait()
    expected = mx.sum(sent.astype(mx.float32), axis=(2, 3)) + mx.array(numbers.reshape(2, 5))
    assert bytes(out) == bytes(memoryview(expected.view(mx.uint8)))  # type: ignore[arg-type]
    results.release()
    made.settle()
    made.close()


@pytest.mark.parametrize("rows", [1, 2, 7, 31, 257, 1031])
def test_states_of_any_size_pass(rows: int) -> None:
    made = transfer()
    buffer = made.receive_buffer(TENSORS, rows, 1)
    payload = np.random.default_rng(rows).integers(0, 60, rows * 28, dtype=np.uint8).tobytes()
    results = made.send_buffer([array * 1 for array in buffer.arrays])
    buffer.fill(memoryview(payload))
    mx.async_eval(results.pending)  # type: ignore[no-untyped-call]
    assert b"".join(map(bytes, results.wait())) == payload
    results.release()
    made.close()


def test_views_leave_as_contiguous_bytes() -> None:
    made = transfer()
    whole = mx.arange(120, dtype=mx.float32).reshape(2, 3, 4, 5)
    views = [whole[:, :, 1:3], whole.transpose(0, 2, 1, 3), whole[..., ::2]]
    results = made.send_buffer(views)
    mx.eval(results.pending)
    found = [memoryview(data).cast("B").tobytes() for data in results.wait()]
    assert found == [np.ascontiguousarray(np.array(view)).tobytes() for view in views]
    results.release()
    made.close()


@pytest.mark.parametrize("tensors", [TENSORS, TENSORS[1:], (TensorSpec("ids", "uint32", ()),)])
def test_a_receive_buffer_shows_whether_it_was_evaluated(tensors: tuple[TensorSpec, ...]) -> None:
    """Its first array or its last, by a result that depends on it, with its content there or not."""
    made = transfer()
    for place in (0, -1):
        buffer, other = (made.receive_buffer(tensors, 2, 1) for _ in range(2))
        size = sum(array.nbytes for array in buffer.arrays)
        result = mx.sum(buffer.arrays[place].astype(mx.float32)) * 2
        assert not buffer.evaluated
        other.fill(memoryview(bytes(size)))
        mx.eval([array + 1 for array in other.arrays])
        assert other.evaluated
        assert not buffer.evaluated
        mx.eval(result)
        assert buffer.evaluated
    made.settle()
    made.close()


def test_receive_buffers_do_not_share_memory() -> None:
    made = SharedTransfer()
    first, second = (made.receive_buffer(TENSORS[1:], 1, 3) for _ in range(2))
    doubled = [buffer.arrays[0] * 2 for buffer in (first, second)]
    first.fill(memoryview(np.array([1, 2, 3], np.int32).tobytes()))
    second.fill(memoryview(np.array([4, 5, 6], np.int32).tobytes()))
    assert [each.tolist() for each in doubled] == [[[2, 4, 6]], [[8, 10, 12]]]


def test_a_payload_that_is_too_short_is_not_taken() -> None:
    buffer = SharedTransfer().receive_buffer(TENSORS, 1, 1)
    with pytest.raises(ValueError):
        buffer.fill(memoryview(bytes(27)))


def test_bytes_depart_as_they_are() -> None:
    results = SharedSendBuffer([b"abc"])
    assert results.pending == []
    assert [bytes(part) for part in results.wait()] == [b"abc"]
