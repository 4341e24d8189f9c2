"""Where the arrays of a decode step meet the bytes of its records, on the way in and on the way out.

A stage's graph is built on a landing before the record that fills it is there, so that putting a graph
together costs no time between the arrival of a record and the start of the device. On a CPU and on a Mac,
whose GPU shares the memory, a landing is an array whose memory is written. NVIDIA's do not share it: there
`node.engine.nvidia` copies.
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


class Landing(Protocol):
    """Arrays on which a graph can be built before their content is there."""

    @property
    def arrays(self) -> list[mx.array]: ...

    @property
    def evaluated(self) -> bool:
        """Whether MLX has evaluated anything that depends on the arrays, or one of them itself."""

    def fill(self, data: memoryview) -> None:
        """Writes a record's payload. To be called once, by any thread, before the graph is evaluated."""


class Departure(Protocol):
    """Results under way."""

    @property
    def pending(self) -> list[mx.array]:
        """What must be launched for the results to come."""

    def wait(self) -> list[memoryview]:
        """Waits for the results, in any thread: their bytes, contiguous and valid until `release`."""

    def release(self) -> None:
        """The bytes are not needed any more."""


class Transfer(Protocol):
    """Makes landings and departures. Used by the compute thread."""

    def landing(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> Landing:
        """For a stage state of `rows` x `tokens`."""

    def departure(self, arrays: Sequence[mx.array]) -> Departure:
        """For results of the graph that was built on the landings before it."""

    def settle(self) -> None:
        """What was built on the landings so far is evaluated."""

    def close(self) -> None:
        """The epoch is over."""


def transfer() -> Transfer:
    """The one for the default device."""
    nvidia = device.nvidia()
    return SharedTransfer() if nvidia is None else nvidia.PinnedTransfer()


def through_record(
    made: Transfer, outputs: Sequence[mx.array], tensors: Sequence[TensorSpec], rows: int, tokens: int
) -> memoryview:
    """The payload of the record in which a stage's outputs travel, laid out as the channel does it.

    Raises InvalidInput (BAD_RECORD) where they are not what `tensors` says.
    """
    departure = made.departure(outputs)
    mx.eval(departure.pending)
    payload = memoryview(bytearray(sum(records.state_bytes(tensor, rows, tokens) for tensor in tensors)))
    lay_out(departure.wait(), payload)
    departure.release()
    return payload


class SharedLanding:
    """Arrays whose memory this process can write."""

    def __init__(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> None:
        size = sum(records.state_bytes(tensor, rows, tokens) for tensor in tensors)
        raw = records.raw_arrays(memoryview(bytes(size)), tensors, rows, tokens)
        self._memory = [np.array(array, copy=False) for array in raw]
        # arrays that are not evaluated, at no cost but a node of the graph, so that it shows when they are
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


class SharedDeparture:
    """Arrays whose memory this process can read, or bytes that are there already."""

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
    """A stage may hand on a view of a larger array, or one whose axes were swapped."""
    return mx.contiguous(array).view(mx.uint8)


class SharedTransfer:
    """For memory that the device shares."""

    def landing(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> Landing:
        return SharedLanding(tensors, rows, tokens)

    def departure(self, arrays: Sequence[mx.array]) -> Departure:
        return SharedDeparture(arrays)

    def settle(self) -> None: ...

    def close(self) -> None: ...


def is_evaluated(array: mx.array) -> bool:
    """Whether an array that was the result of an operation has forgotten it, as MLX's do when evaluated.

    MLX tells it nowhere else than in the graph that it draws, where an operation has arrows. Takes 4 us.
    """
    drawn = io.StringIO()
    mx.export_to_dot(drawn, array)
    return "->" not in drawn.getvalue()
