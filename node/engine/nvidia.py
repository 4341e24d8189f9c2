"""NVIDIA GPUs as an accelerator. `register` and `prepare` do nothing unless MLX computes on one.

**Attention without a plan for each length.** On these GPUs MLX leaves attention of more than one new token to
cuDNN. It makes a plan for every pair of new tokens and tokens held: 32 to 42 ms on the host of an H200, the
time of 4,000 prompt tokens. Prompts seldom have a length that was seen before. So lengths that
are not regular are computed in three operations, as MLX does without cuDNN. For 126 tokens, 16 layers of an
8B model take 4.7 ms instead of 4.1. For the last 512 tokens of 4,096 they take 13 ms instead of 8. Few
tokens have a kernel of their own (`nvidia_attention`).

**Products of heads with several rows.** MLX 0.32.4 multiplies several rows wrongly by one quantized matrix
for each head (decision 108). So `folded` has rows follow one another as tokens do.

**Records through pinned memory.** When the CPU reads an array, MLX moves that array to managed memory. Its
pages then fault back and forth whenever the buffer is used again. So own kernels copy from and to pinned
memory.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from sealring.mesh.errors import ResourceExhausted
from sealring.node.engine import device, nvidia_attention, records
from sealring.node.engine.staging import TensorSpec
from sealring.node.engine.transfer import ReceiveBuffer, SendBuffer, is_evaluated

LENGTHS = (2, 4, 8, 16, 32, 64, *range(128, 513, 64))
"""Tokens that chunks are padded to; above the last, multiples of `COARSE`. The first chunk of a length takes
up to 20 ms more on the host than the next one (docs/decisions/0029). The first four are those of drafts:
products with quantized weights take 3 times as long for 4 tokens as for one."""

COARSE = 256

GRAPH_OPERATIONS = "20"
"""Operations that MLX hands to the GPU at once. Its own 100 are six layers of a decode step: the GPU waits
for the first ones, and the engine for the last."""

REGULAR = 512
"""cuDNN plans chunks whose new tokens and tokens held are both multiples of this: they are worth a plan."""

LARGEST = 256 << 20
"""Most bytes of scores that are written out; larger ones are left to cuDNN."""

Attention = Callable[..., mx.array]

_PORTABLE_AND_MAPPED = 0x03
_BLOCK_STEP = 4096
_MAX_THREADS = 256
_UNITS = {16: "uint4", 4: "unsigned int", 1: "unsigned char"}


class Nvidia(device.Accelerator):
    """An NVIDIA GPU, whose memory is its own."""

    lengths = LENGTHS
    shares_memory = False

    def computed_as(self, tokens: int) -> int:
        """The next of `LENGTHS`, or multiple of `COARSE`; one token stays one."""
        if tokens == 1:
            return 1
        return next((length for length in LENGTHS if tokens <= length), -(-tokens // COARSE) * COARSE)

    def transfer(self) -> PinnedTransfer:
        return PinnedTransfer()


def register() -> bool:
    """Registers `Nvidia` if MLX computes on such a GPU; whether it does."""
    if not mx.cuda.is_available() or mx.default_device() != mx.gpu:
        return False
    device.register(Nvidia())
    return True


def prepare() -> None:
    """Registers, replaces MLX's attention by `planless` and its quantized product by `folded`, and has MLX
    launch smaller graphs. Idempotent.

    Called before any computation. Does nothing unless MLX computes on an NVIDIA GPU.
    """
    if not register():
        return
    fused = mx.fast.scaled_dot_product_attention
    if not hasattr(fused, "fused"):
        setattr(mx.fast, "scaled_dot_product_attention", planless(fused))  # noqa: B010
        setattr(mx, "quantized_matmul", folded(mx.quantized_matmul))  # noqa: B010
    os.environ.setdefault("MLX_MAX_OPS_PER_BUFFER", GRAPH_OPERATIONS)


def folded(product: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """`product` is mlx.core.quantized_matmul. Of x [rows, heads, tokens, inputs] by a matrix for each head it
    gets [1, heads, rows x tokens, inputs]; all else as it is."""

    def quantized_matmul(x: mx.array, weight: mx.array, *rest: Any, **named: Any) -> mx.array:
        rows, heads = x.shape[:2] if x.ndim == 4 else (1, 0)
        if rows == 1 or weight.ndim != 3 or len(weight) != heads:
            return product(x, weight, *rest, **named)
        together = x.swapaxes(0, 1).reshape(1, heads, -1, x.shape[-1])
        found = product(together, weight, *rest, **named)
        return found.reshape(heads, rows, x.shape[2], -1).swapaxes(0, 1)

    return quantized_matmul


def planless(fused: Attention, plain: Attention | None = None) -> Attention:
    """Attention of few tokens by `nvidia_attention`; of others by `fused`, which is MLX's own
    (mlx.core.fast.scaled_dot_product_attention), for regular lengths, else by `plain`, which is `unfused`."""
    plain = plain or unfused

    def attention(
        queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Any = None, **others: Any
    ) -> mx.array:
        asked = {name for name, other in others.items() if other is not None}
        if asked <= {"sinks"} and nvidia_attention.suits(queries, keys, values, mask):
            return nvidia_attention.attention(queries, keys, values, scale, mask, others.get("sinks"))
        if asked or _suits_fused(queries, keys, mask):
            return fused(queries, keys, values, scale=scale, mask=mask, **others)
        return plain(queries, keys, values, scale, mask)

    attention.fused = fused  # type: ignore[attr-defined]
    return attention


def _suits_fused(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    rows, heads, new, _ = queries.shape
    held = keys.shape[2]
    if rows * heads * new * held * queries.dtype.size > LARGEST:
        return True
    if isinstance(mask, mx.array) and (mask.ndim > 4 or (mask.ndim == 4 and mask.shape[1] != 1)):
        return True
    if new == 1:
        # With a mask MLX copies keys and values: 64 rows of 4,000 tokens take 34 ms in 16 layers, not 6.
        return not isinstance(mask, mx.array)
    return new % REGULAR == 0 and held % REGULAR == 0


def unfused(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    """Attention of [rows, heads, new, width] over [rows, groups, held, width]; a group's heads adjoin."""
    rows, heads, new, width = queries.shape
    groups, held = keys.shape[1:3]
    folded = (queries * scale).reshape(rows, groups, -1, width)
    scores = (folded @ keys.swapaxes(-1, -2)).reshape(rows, groups, -1, new, held)
    if mask is not None:
        allowed = _causal(new, held) if isinstance(mask, str) else mask
        if allowed.ndim == 4:
            allowed = allowed[:, :, None]
        if allowed.dtype == mx.bool_:
            # As in MLX: a padded token that may see nothing must not become NaN, which spreads.
            scores = mx.where(allowed, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        else:
            scores = scores + allowed
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(rows, groups, -1, held)
    return (weights @ values).reshape(rows, heads, new, values.shape[-1])


@lru_cache(maxsize=2)
def _causal(new: int, held: int) -> mx.array:
    """Mask of the tokens that each new one may see, bool [new, held]. Cached: every layer needs it."""
    return mx.arange(held - new, held)[:, None] >= mx.arange(held)


class Block:
    """Pinned memory; the GPU reads and writes it at the CPU's address."""

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


class PinnedReceiveBuffer:
    """Arrays that a kernel copies from a pinned block when the graph runs."""

    def __init__(self, pool: PinnedTransfer, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> None:
        self._sizes = [records.state_bytes(tensor, rows, tokens) for tensor in tensors]
        self.block = pool.take(sum(map(_aligned, self._sizes)))
        self.arrays = []
        start = 0
        for tensor, size in zip(tensors, self._sizes, strict=True):
            shape = (rows, tokens, *tensor.tail)
            self.arrays.append(copy_in(self.block.cell(start), size, shape, getattr(mx, tensor.dtype)))
            if not mx.issubdtype(self.arrays[-1].dtype, mx.floating):
                # an unfilled buffer may be evaluated as well (EVALUATED_EARLY): no index out of bounds
                self.block.memory[start : start + size] = bytes(size)
            start += _aligned(size)

    @property
    def evaluated(self) -> bool:
        return any(map(is_evaluated, self.arrays))

    def fill(self, data: memoryview) -> None:
        start = read = 0
        for size in self._sizes:
            self.block.memory[start : start + size] = data[read : read + size]
            start, read = start + _aligned(size), read + size


class PinnedSendBuffer:
    """A kernel at the end of the graph copies the results to a pinned block."""

    def __init__(self, pool: PinnedTransfer, arrays: Sequence[mx.array], received: list[Block]) -> None:
        self._pool = pool
        self._sizes = [array.nbytes for array in arrays]
        self._block = pool.take(sum(map(_aligned, self._sizes)))
        self._received = received
        self.pending = []
        start = 0
        for array, size in zip(arrays, self._sizes, strict=True):
            self.pending.append(copy_out(array, self._block.cell(start), size))
            start += _aligned(size)

    def wait(self) -> list[memoryview]:
        mx.eval(self.pending)
        found, start = [], 0
        for size in self._sizes:
            found.append(self._block.memory[start : start + size])
            start += _aligned(size)
        return found

    def release(self) -> None:
        for block in (self._block, *self._received):
            self._pool.give(block)
        self._received = []


class PinnedTransfer:
    """A pool of pinned blocks. A block goes back to the pool once the step that used it is done.

    The compute thread allocates blocks, because its CUDA context is the device's.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._blocks: list[Block] = []
        self._free: dict[int, list[Block]] = {}
        self._received: list[Block] = []

    def take(self, size: int) -> Block:
        """A free block of at least `size` bytes."""
        size = max(1, -(-size // _BLOCK_STEP)) * _BLOCK_STEP
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self._blocks.append(Block(self._driver, size))
        return self._blocks[-1]

    def give(self, block: Block) -> None:
        """Puts a block back; any thread. No lock: appending to a list is atomic."""
        self._free[block.size].append(block)

    def receive_buffer(self, tensors: Sequence[TensorSpec], rows: int, tokens: int) -> ReceiveBuffer:
        buffer = PinnedReceiveBuffer(self, tensors, rows, tokens)
        self._received.append(buffer.block)
        return buffer

    def send_buffer(self, arrays: Sequence[mx.array]) -> SendBuffer:
        received, self._received = self._received, []
        return PinnedSendBuffer(self, arrays, received)

    def settle(self) -> None:
        received, self._received = self._received, []
        for block in received:
            self.give(block)

    def close(self) -> None:
        mx.synchronize()
        blocks, self._blocks, self._free = self._blocks, [], {}
        for block in blocks:
            self._driver.cuMemFreeHost(ctypes.c_void_p(block.address))


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _unit(size: int, shape: Sequence[int]) -> int:
    """Bytes that a thread copies at once of an array [rows, tokens, ...] or [rows].

    It goes by the size of one token, so that rows and tokens do not change the kernel.
    """
    return next(unit for unit in _UNITS if size // math.prod(shape[:2]) % unit == 0)


_kernels: dict[tuple[str, int], Any] = {}


def _kernel(direction: str, unit: int) -> Any:
    """A kernel that copies units: `in` from an address to `out`, `over` from `array` to an address.

    Every thread copies one unit. The source does not contain the number of units, because MLX compiles each
    source anew.
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
            # A slice is handed over where it lies, which need not be at a multiple of the unit.
            "over": (
                f"auto from = reinterpret_cast<const char*>(array) + i * {unit};"
                f" auto to = reinterpret_cast<char*>(address[0]) + i * {unit};"
                f" if (reinterpret_cast<size_t>(from) % {unit} == 0)"
                f" *reinterpret_cast<{word}*>(to) = *reinterpret_cast<const {word}*>(from);"
                f" else for (int byte = 0; byte < {unit}; byte++) to[byte] = from[byte];"
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
    """Threads of a block, a divisor of `count`, because MLX rounds the number of blocks up."""
    return next(threads for threads in range(min(_MAX_THREADS, count), 0, -1) if count % threads == 0)


def copy_in(address: mx.array, size: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that a kernel copies from `size` bytes at `address`, uint64 [1], when the graph runs."""
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


def copy_out(array: mx.array, address: mx.array, size: int) -> mx.array:
    """A flag, uint32 [1], that a kernel sets with its copy of `array` to `size` bytes at `address`."""
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
