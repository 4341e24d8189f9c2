"""Where the arrays of a decode step meet the bytes of its records, on the way in and on the way out.

A stage's graph is built on a landing before the record that fills it is there, so that putting a graph
together costs no time between the arrival of a record and the start of the device. On a CPU and on a Mac,
whose GPU shares the memory, a landing is an array whose memory is written. An NVIDIA GPU does not share it,
and when the CPU reads an array MLX moves that array to managed memory, whose pages then fault back and forth
whenever the buffer is used again: there, kernels of ours copy from and to pinned memory.
"""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from sealring.mesh.errors import ResourceExhausted
from sealring.node.engine import records
from sealring.node.engine.staging import TensorSpec
from sealring.node.ipc.channel import lay_out

_PORTABLE_AND_MAPPED = 0x03
_BLOCK_STEP = 4096
_MAX_THREADS = 256
_UNITS = {16: "uint4", 4: "unsigned int", 1: "unsigned char"}


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
    if mx.default_device() == mx.gpu and mx.cuda.is_available():
        return PinnedTransfer()
    return SharedTransfer()


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
        return any(map(_is_evaluated, self.arrays))

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


class Block:
    """Pinned memory that the GPU reads and writes at the address that it has for the CPU."""

    def __init__(self, driver: ctypes.CDLL, size: int) -> None:
        pointer = ctypes.c_void_p()
        status = driver.cuMemHostAlloc(ctypes.byref(pointer), ctypes.c_size_t(size), _PORTABLE_AND_MAPPED)
        if status or pointer.value is None:
            raise ResourceExhausted(
                f"no pinned memory for the records of a step (CUDA error {status})", reason="NO_PINNED_MEMORY"
            )
        self.size = size
        self.address = pointer.value
        self.memory = memoryview((ctypes.c_ubyte * size).from_address(pointer.value)).cast("B")
        self._cells: dict[int, mx.array] = {}

    def cell(self, offset: int) -> mx.array:
        """The address `offset` bytes into the block, as an array for kernels."""
        if offset not in self._cells:
            self._cells[offset] = mx.array(np.array([self.address + offset], np.uint64))
        return self._cells[offset]


class PinnedLanding:
    """Arrays that a kernel copies from a pinned block when the graph runs."""

    def __init__(self, pool: PinnedTransfer, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> None:
        self._sizes = [records.state_bytes(tensor, rows, tokens) for tensor in tensors]
        self.block = pool.take(sum(map(_aligned, self._sizes)))
        self.arrays = []
        start = 0
        for tensor, size in zip(tensors, self._sizes, strict=True):
            shape = (rows, tokens, *tensor.tail)
            self.arrays.append(_copy_in(self.block.cell(start), size, shape, getattr(mx, tensor.dtype)))
            if not mx.issubdtype(self.arrays[-1].dtype, mx.floating):
                self.block.memory[start : start + size] = bytes(size)  # no index that is out of bounds
            start += _aligned(size)

    @property
    def evaluated(self) -> bool:
        return any(map(_is_evaluated, self.arrays))

    def fill(self, data: memoryview) -> None:
        start = read = 0
        for size in self._sizes:
            self.block.memory[start : start + size] = data[read : read + size]
            start, read = start + _aligned(size), read + size


class PinnedDeparture:
    """A kernel at the end of the graph copies the results to a pinned block."""

    def __init__(self, pool: PinnedTransfer, arrays: Sequence[mx.array], landed: list[Block]) -> None:
        self._pool = pool
        self._sizes = [array.nbytes for array in arrays]
        self._block = pool.take(sum(map(_aligned, self._sizes)))
        self._landed = landed
        self.pending = []
        start = 0
        for array, size in zip(arrays, self._sizes, strict=True):
            self.pending.append(_copy_out(array, self._block.cell(start), size))
            start += _aligned(size)

    def wait(self) -> list[memoryview]:
        mx.eval(self.pending)
        found, start = [], 0
        for size in self._sizes:
            found.append(self._block.memory[start : start + size])
            start += _aligned(size)
        return found

    def release(self) -> None:
        for block in (self._block, *self._landed):
            self._pool.give(block)
        self._landed = []


class PinnedTransfer:
    """For an NVIDIA GPU: a pool of pinned blocks. A block is given back once the step that used it is done.

    Blocks are made by the compute thread, whose CUDA context is the device's.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._blocks: list[Block] = []
        self._free: dict[int, list[Block]] = {}
        self._landed: list[Block] = []

    def take(self, size: int) -> Block:
        """A block of at least `size` bytes that nobody uses."""
        size = max(1, -(-size // _BLOCK_STEP)) * _BLOCK_STEP
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self._blocks.append(Block(self._driver, size))
        return self._blocks[-1]

    def give(self, block: Block) -> None:
        """From any thread."""
        self._free[block.size].append(block)

    def landing(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> Landing:
        landing = PinnedLanding(self, tensors, rows, tokens)
        self._landed.append(landing.block)
        return landing

    def departure(self, arrays: Sequence[mx.array]) -> Departure:
        landed, self._landed = self._landed, []
        return PinnedDeparture(self, arrays, landed)

    def settle(self) -> None:
        landed, self._landed = self._landed, []
        for block in landed:
            self.give(block)

    def close(self) -> None:
        mx.synchronize()
        blocks, self._blocks, self._free = self._blocks, [], {}
        for block in blocks:
            self._driver.cuMemFreeHost(ctypes.c_void_p(block.address))


def _is_evaluated(array: mx.array) -> bool:
    """Whether an array that was the result of an operation has forgotten it, as MLX's do when evaluated.

    MLX tells it nowhere else than in the graph that it draws, where an operation has arrows. Takes 4 us.
    """
    drawn = io.StringIO()
    mx.export_to_dot(drawn, array)
    return "->" not in drawn.getvalue()


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _unit(size: int, shape: Sequence[int]) -> int:
    """Bytes that a thread copies of an array [rows, tokens, ...] or [rows], whatever its rows and tokens."""
    return next(unit for unit in _UNITS if size // math.prod(shape[:2]) % unit == 0)


_kernels: dict[tuple[str, int], Any] = {}


def _kernel(direction: str, unit: int) -> Any:
    """`in` copies units from an address to `out`, `over` copies them from `array` to an address.

    Every thread copies one unit and there are as many threads as units, so that the source, for which MLX
    compiles a kernel anew whenever it differs, does not tell their number.
    """
    if (direction, unit) not in _kernels:
        word = _UNITS[unit]
        copy, names, outputs = {
            "in": (
                f"reinterpret_cast<{word}*>(out)[i] = "
                f"__ldcv(reinterpret_cast<const {word}*>(address[0]) + i);",
                ["address"],
                ["out"],
            ),
            "over": (
                f"reinterpret_cast<{word}*>(address[0])[i] = reinterpret_cast<const {word}*>(array)[i];"
                " if (i == 0) done[0] = 1;",
                ["array", "address"],
                ["done"],
            ),
        }[direction]
        source = f"size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; {copy}"
        _kernels[direction, unit] = mx.fast.cuda_kernel(
            name=f"sealring_{direction}_{unit}", input_names=names, output_names=outputs, source=source
        )
    return _kernels[direction, unit]


@lru_cache(maxsize=4096)
def _threads(count: int) -> int:
    """Threads of a block, of which a whole number makes `count`: MLX rounds the number of blocks up."""
    return next(threads for threads in range(min(_MAX_THREADS, count), 0, -1) if count % threads == 0)


def _copy_in(address: mx.array, size: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    unit = _unit(size, shape)
    (array,) = _kernel("in", unit)(
        inputs=[address],
        grid=(size // unit, 1, 1),
        threadgroup=(_threads(size // unit), 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    assert math.prod(shape) * dtype.size == size
    found: mx.array = array
    return found


def _copy_out(array: mx.array, address: mx.array, size: int) -> mx.array:
    unit = _unit(size, array.shape)
    (done,) = _kernel("over", unit)(
        inputs=[array, address],
        grid=(size // unit, 1, 1),
        threadgroup=(_threads(size // unit), 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )
    found: mx.array = done
    return found
