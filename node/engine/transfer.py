"""Buffers between a step's arrays and the bytes of its records, on the way in and on the way out.

A stage's graph is built on a receive buffer before the record arrives, which saves that time between the
record's arrival and the start of the device (docs/decisions/0008). On a CPU and on a Mac, whose GPU shares
the memory, a receive buffer is an array whose memory is written. A device with memory of its own has another
`Transfer` (`device.Accelerator`).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from sealring.node.engine import device, records
from sealring.node.engine.staging import TensorSpec
from sealring.node.wire.channel import lay_out


class ReceiveBuffer(Protocol):
    """Arrays on which a graph can be built before their content arrives."""

    @property
    def arrays(self) -> list[mx.array]: ...

    @property
    def evaluated(self) -> bool:
        """Whether MLX has evaluated anything that depends on the arrays, or one of them itself."""

    def fill(self, data: memoryview) -> None:
        """Writes a record's payload. Called once, by any thread, before the graph is evaluated."""


class SendBuffer(Protocol):
    """Results of a graph, on their way into a record."""

    @property
    def pending(self) -> list[mx.array]:
        """Arrays to launch, so that `wait` returns."""

    def wait(self) -> list[memoryview]:
        """Waits for the results, in any thread; their bytes, contiguous and valid until `release`."""

    def release(self) -> None:
        """Gives the memory of the bytes back."""


class Transfer(Protocol):
    """Maker of receive and send buffers. Used by the compute thread."""

    def receive_buffer(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> ReceiveBuffer:
        """A buffer for a stage state of `rows` x `tokens`."""

    def send_buffer(self, arrays: Sequence[mx.array]) -> SendBuffer:
        """A buffer for results of the graph that was built on the last receive buffers."""

    def settle(self) -> None:
        """Takes receive buffers back whose graphs had no results; they are evaluated."""

    def close(self) -> None:
        """Frees all buffers; the epoch is over."""


def transfer() -> Transfer:
    """A transfer for the device of this process."""
    made: Transfer | None = device.accelerator().transfer()
    return made or SharedTransfer()


def through_record(
    made: Transfer, outputs: Sequence[mx.array], tensors: Sequence[TensorSpec], rows: int, tokens: int
) -> memoryview:
    """The payload of the record in which a stage's outputs travel, laid out as the channel does it.

    Raises InvalidInput (BAD_RECORD) if they are not as `tensors` says.
    """
    results = made.send_buffer(outputs)
    mx.eval(results.pending)
    payload = memoryview(bytearray(sum(records.state_bytes(tensor, rows, tokens) for tensor in tensors)))
    lay_out(results.wait(), payload)
    results.release()
    return payload


class SharedReceiveBuffer:
    """Arrays whose memory this process can write."""

    def __init__(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> None:
        size = sum(records.state_bytes(tensor, rows, tokens) for tensor in tensors)
        raw = records.raw_arrays(memoryview(bytes(size)), tensors, rows, tokens)
        self._memory = [np.array(array, copy=False) for array in raw]
        # `is_evaluated` needs arrays that are results of an operation; this one costs a node of the graph
        self.arrays = [mx.stop_gradient(array) for array in records.typed(raw, tensors)]

    @property
    def evaluated(self) -> bool:
        return any(map(is_evaluated, self.arrays))

    def fill(self, data: memoryview) -> None:
        start = 0
        for memory in self._memory:
            words = np.frombuffer(data, memory.dtype, memory.size, start)
            np.copyto(memory, words.reshape(memory.shape))
            start += memory.nbytes


class SharedSendBuffer:
    """Arrays whose memory this process can read, or plain bytes."""

    def __init__(self, parts: Sequence[mx.array | bytes]) -> None:
        self._parts = [_as_bytes(part) if isinstance(part, mx.array) else part for part in parts]

    @property
    def pending(self) -> list[mx.array]:
        return [part for part in self._parts if isinstance(part, mx.array)]

    def wait(self) -> list[memoryview]:
        return [memoryview(part) for part in self._parts]  # type: ignore[arg-type]

    def release(self) -> None:
        self._parts = []


def _as_bytes(array: mx.array) -> mx.array:
    """Bytes of an array that may be a view of a larger one, or have its axes swapped."""
    return mx.contiguous(array).view(mx.uint8)


class SharedTransfer:
    """Transfer through memory that CPU and device share."""

    def receive_buffer(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> ReceiveBuffer:
        return SharedReceiveBuffer(tensors, rows, tokens)

    def send_buffer(self, arrays: Sequence[mx.array]) -> SendBuffer:
        return SharedSendBuffer(arrays)

    def settle(self) -> None: ...

    def close(self) -> None: ...


def is_evaluated(array: mx.array) -> bool:
    """Whether MLX has evaluated an array that an operation made; it then forgets the operation.

    MLX's only public sign of it is the graph that it draws, in which operations have arrows. Takes 4 us.
    """
    drawn = io.StringIO()
    mx.export_to_dot(drawn, array)
    return "->" not in drawn.getvalue()
