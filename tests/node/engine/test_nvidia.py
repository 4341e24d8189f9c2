from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sealring.mesh.errors import ResourceExhausted
from sealring.node.engine import device, nvidia
from sealring.node.engine.staging import TensorSpec
from sealring.node.engine.transfer import SharedTransfer, is_evaluated, transfer


def drawn(rows: int, heads: int, groups: int, new: int, held: int) -> tuple[mx.array, mx.array, mx.array]:
    return (
        mx.random.normal((rows, heads, new, 16)),
        mx.random.normal((rows, groups, held, 16)),
        mx.random.normal((rows, groups, held, 8)),
    )


def masks(rows: int, new: int, held: int) -> dict[str, Any]:
    window = mx.arange(held - new, held)[:, None] < mx.arange(held) + 3
    causal = mx.arange(held - new, held)[:, None] >= mx.arange(held)
    padded = (window & causal) & (mx.arange(held) >= mx.arange(rows).reshape(rows, 1, 1, 1) // 2)
    return {
        "none": None,
        "causal": "causal",
        "boolean": window & causal,
        "of rows": padded,
        "added": mx.where(causal, 0.0, -1e9),
    }


@settings(max_examples=25, deadline=None)
@example(rows=3, groups=2, folded=2, new=3, before=2, mask="of rows")
@example(rows=3, groups=1, folded=1, new=2, before=0, mask="of rows")  # one token may see nothing
@given(
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    folded=st.integers(1, 4),
    new=st.integers(2, 9),
    before=st.integers(0, 9),
    mask=st.sampled_from(["none", "causal", "boolean", "of rows", "added"]),
)
def test_it_is_what_mlx_computes(
    rows: int, groups: int, folded: int, new: int, before: int, mask: str
) -> None:
    held = new + before
    arrays = drawn(rows, groups * folded, groups, new, held)
    given_mask = masks(rows, new, held)[mask]
    mine = nvidia.unfused(*arrays, 0.25, given_mask)
    theirs = mx.fast.scaled_dot_product_attention(*arrays, scale=0.25, mask=given_mask)
    assert mine.shape == theirs.shape
    assert mx.allclose(mine, theirs, atol=1e-4).item()


@pytest.mark.parametrize(
    ("new", "held", "others", "fused"),
    [
        (1, 1000, {}, True),
        (17, 1000, {}, False),
        (126, 126, {"sinks": None}, False),
        (126, 126, {"sinks": 1}, True),
        (512, 4096, {}, True),
        (512, 4100, {}, False),
        (256, 4096, {}, False),
        (500, 4096, {}, False),
        (64, 1 << 18, {}, False),
        (64, (1 << 18) + 1, {}, True),
    ],
)
def test_regular_lengths_are_left_to_plans(new: int, held: int, others: dict[str, Any], fused: bool) -> None:
    calls: list[str] = []

    def noted(name: str) -> Any:
        def call(*arrays: mx.array, **options: Any) -> mx.array:
            calls.append(name)
            return arrays[0]

        return call

    queries, keys = mx.zeros((1, 4, new, 1)), mx.zeros((1, 2, held, 1))
    nvidia.planless(noted("fused"), noted("unfused"))(queries, keys, keys, scale=1.0, mask="causal", **others)
    assert calls == ["fused" if fused else "unfused"]


@pytest.mark.parametrize(
    ("shape", "fused"),
    [((1, 4, 3, 5), True), ((1, 1, 3, 5), False), ((3, 5), False), ((1, 1, 1, 3, 5), True)],
)
def test_a_mask_for_each_head_is_left_to_mlx(shape: tuple[int, ...], fused: bool) -> None:
    queries, keys, mask = mx.zeros((1, 4, 3, 8)), mx.zeros((1, 2, 5, 8)), mx.ones(shape, mx.bool_)
    calls: list[Any] = []
    attention = nvidia.planless(
        lambda *_, **options: calls.append(options["mask"]) or queries, lambda *_: queries
    )
    attention(queries, keys, keys, scale=1.0, mask=mask)
    assert calls == [mask] * fused


@pytest.mark.parametrize(
    ("new", "held", "masked", "by"),
    [
        (4, 1000, False, "few"),
        (4, 5000, False, "plain"),
        (1, 1000, True, "few"),
        (1, 20000, True, "plain"),
        (1, 1000, False, "fused"),
    ],
)
def test_few_tokens_have_a_kernel(
    monkeypatch: pytest.MonkeyPatch, new: int, held: int, masked: bool, by: str
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(nvidia.nvidia_attention, "attention", lambda *_: calls.append("few"))
    attention = nvidia.planless(lambda *_, **__: calls.append("fused"), lambda *_: calls.append("plain"))
    queries, keys = mx.zeros((1, 4, new, 32)), mx.zeros((1, 2, held, 32))
    mask = mx.ones((new, held), mx.bool_) if masked else None if new == 1 else "causal"
    attention(queries, keys, keys, scale=1.0, mask=mask)
    assert calls == [by]


def test_nothing_is_replaced_without_an_nvidia_gpu() -> None:
    before, product = mx.fast.scaled_dot_product_attention, mx.quantized_matmul
    nvidia.prepare()
    assert mx.quantized_matmul is product
    assert device.accelerator().lengths == ()
    assert device.accelerator().computed_as(5) == 5
    assert isinstance(transfer(), SharedTransfer)
    assert mx.fast.scaled_dot_product_attention is before


@pytest.fixture
def unregistered() -> Iterator[None]:
    """No test after this one has the GPU that this one pretends to have."""
    yield
    device.register(device.Accelerator())


def test_a_gpu_is_registered_and_attention_replaced_once(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, unregistered: None
) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    monkeypatch.setattr(mx, "quantized_matmul", mx.quantized_matmul)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "gpu", mx.default_device())
    before = mx.quantized_matmul
    nvidia.prepare()
    assert isinstance(transfer(), nvidia.PinnedTransfer)
    once, product = mx.fast.scaled_dot_product_attention, mx.quantized_matmul
    nvidia.prepare()
    assert mx.fast.scaled_dot_product_attention is once
    assert mx.quantized_matmul is product is not before
    assert hasattr(once, "fused")
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    gpu = device.accelerator()
    assert gpu.lengths == nvidia.LENGTHS
    assert not gpu.shares_memory
    lengths = [gpu.computed_as(tokens) for tokens in (1, 2, 3, 9, 33, 65, 129, 500, 513, 4096)]
    assert lengths == [1, 2, 4, 16, 64, 128, 192, 512, 768, 4096]
    monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER")
    nvidia.prepare()
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "20"


@dataclass
class Launch:
    source: str
    inputs: list[mx.array]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    options: dict[str, object]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches that MLX would do on an NVIDIA GPU; nothing is copied."""
    found: list[Launch] = []

    def kernel(source: str, **_: object) -> Callable[..., list[mx.array]]:
        def launch(
            *,
            inputs: list[mx.array],
            grid: tuple[int, int, int],
            threadgroup: tuple[int, int, int],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
            **options: object,
        ) -> list[mx.array]:
            found.append(Launch(source, inputs, grid, threadgroup, options))
            return [mx.zeros(output_shapes[0], output_dtypes[0])]

        return launch

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    monkeypatch.setattr("sealring.node.engine.nvidia._kernels", {})
    return found


def test_no_kernel_is_compiled_for_a_size(launches: list[Launch]) -> None:
    """MLX compiles what has another source or template; threads beyond the data would write elsewhere."""
    address = mx.array([0], mx.uint64)
    sizes = [16 * count for count in (1, 3, 255, 256, 257, 509, 1024, 5 * 509, 1 << 17)]
    for size in sizes:
        nvidia.copy_in(address, size, (1, 1, size // 2), mx.bfloat16)
        nvidia.copy_out(mx.zeros((1, 1, size // 4), mx.uint32), address, size)
    assert len({launch.source for launch in launches}) == 2
    assert not any(launch.options for launch in launches)
    for launch, size in zip(launches, [size for size in sizes for _ in range(2)], strict=True):
        threads, groups = launch.threadgroup[0], -(-launch.grid[0] // launch.threadgroup[0])
        assert launch.grid[1:] == launch.threadgroup[1:] == (1, 1)
        assert 1 <= threads <= 256
        assert threads * groups * 16 == size


def test_a_tensor_has_one_kernel_whatever_its_rows_and_tokens(launches: list[Launch]) -> None:
    address = mx.array([0], mx.uint64)
    for rows, tokens in ((1, 1), (3, 1), (4, 1), (16, 1), (1, 8), (1, 255)):
        nvidia.copy_in(address, 4 * rows * tokens, (rows, tokens), mx.uint32)
        nvidia.copy_in(address, 32 * rows * tokens, (rows, tokens, 4, 4), mx.bfloat16)
        nvidia.copy_out(mx.zeros((rows * tokens,), mx.uint32), address, 4 * rows * tokens)
    assert len({launch.source for launch in launches}) == 3


def test_most_blocks_are_of_many_threads(launches: list[Launch]) -> None:
    for hidden, rows in ((4096, 31), (8192, 7), (2880, 32), (5120, 1)):
        nvidia.copy_in(mx.array([0], mx.uint64), 2 * hidden * rows, (rows, 1, hidden), mx.bfloat16)
    assert all(launch.threadgroup[0] >= 128 for launch in launches)


class Driver:
    """NVIDIA's, with memory of this process."""

    def __init__(self) -> None:
        self.blocks: dict[int, Any] = {}
        self.status, self.gives = 0, True

    def cuMemHostAlloc(self, pointer: Any, size: ctypes.c_size_t, flags: int) -> int:
        if not self.gives:
            return self.status
        block = ctypes.create_string_buffer(b"x" * size.value, size.value)
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_void_p)).contents.value = ctypes.addressof(block)
        self.blocks[ctypes.addressof(block)] = block
        assert flags == 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
        return self.status

    def cuMemFreeHost(self, pointer: ctypes.c_void_p) -> None:
        assert pointer.value
        del self.blocks[pointer.value]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(nvidia.ctypes, "CDLL", {"libcuda.so.1": found}.__getitem__)
    return found


def copied(launch: Launch, size: int) -> bytes:
    """The bytes at the address that its kernel gets."""
    return ctypes.string_at(launch.inputs[-1].item(), size)


STATE = (TensorSpec("hidden", "bfloat16", (17, 4)), TensorSpec("ids", "int32", ()))


def test_a_record_is_where_the_kernels_read_it(driver: Driver, launches: list[Launch]) -> None:
    made = nvidia.PinnedTransfer()
    first, second = (made.receive_buffer(STATE, 1, 2) for _ in range(2))
    hidden, ids = first.arrays
    assert (hidden.shape, hidden.dtype) == ((1, 2, 17, 4), mx.bfloat16)
    assert (ids.shape, ids.dtype) == ((1, 2), mx.int32)
    assert copied(launches[0], 1) == b"x"
    assert copied(launches[1], 8) == bytes(8), "an index that is out of bounds"
    records = [np.random.default_rng(seed).bytes(280) for seed in (1, 2)]
    for buffer, record in zip((first, second), records, strict=True):
        buffer.fill(memoryview(record))
    for number, record in enumerate(records):
        found = [copied(launches[2 * number], 272), copied(launches[2 * number + 1], 8)]
        assert b"".join(found) == record
    assert all(launch.inputs[0].item() % 16 == 0 for launch in launches)  # CUDA copies a uint4 from there
    assert [launch.grid for launch in launches[:2]] == [(272 // 4, 1, 1), (8 // 4, 1, 1)]
    made.receive_buffer([TensorSpec("hidden", "bfloat16", (3,))], 1, 2)
    assert (launches[-1].grid, "unsigned char" in launches[-1].source) == ((12, 1, 1), True)


def test_a_receive_buffer_shows_whether_it_was_evaluated(driver: Driver, launches: list[Launch]) -> None:
    made = nvidia.PinnedTransfer()
    for place in (0, 1):
        buffer = made.receive_buffer(STATE, 1, 5)
        assert not buffer.evaluated
        mx.eval(buffer.arrays[place])
        assert buffer.evaluated


def test_results_leave_from_where_the_kernels_wrote_them(driver: Driver, launches: list[Launch]) -> None:
    made = nvidia.PinnedTransfer()
    arrays = [mx.arange(5, dtype=mx.uint32), mx.arange(6, dtype=mx.float32).reshape(2, 3)]
    results = made.send_buffer(arrays)
    for launch in launches:
        array, address = launch.inputs
        data = np.array(array).tobytes()
        ctypes.memmove(address.item(), data, len(data))
    assert [each.shape for each in results.pending] == [(1,)] * 2
    assert not any(map(is_evaluated, results.pending))
    assert [bytes(part) for part in results.wait()] == [np.array(array).tobytes() for array in arrays]
    assert all(map(is_evaluated, results.pending))
    assert [launch.grid for launch in launches] == [(5, 1, 1), (6, 1, 1)]


def test_blocks_are_used_again_when_their_step_is_done(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, launches: list[Launch]
) -> None:
    made = nvidia.PinnedTransfer()
    for _ in range(3):
        buffer = made.receive_buffer(STATE, 1, 5)
        results, other = made.send_buffer([buffer.arrays[0]]), made.send_buffer([buffer.arrays[1]])
        assert len(driver.blocks) == 3
        results.release()
        other.release()
    made.receive_buffer(STATE, 1, 5)
    made.settle()
    made.settle()
    assert len({id(made.take(1)) for _ in range(4)}) == 4
    assert len(driver.blocks) == 4
    freed: list[int] = []
    monkeypatch.setattr(mx, "synchronize", lambda: freed.append(len(driver.blocks)))
    made.close()
    assert (freed, driver.blocks) == ([4], {}), "while the GPU may still use them"


def test_blocks_are_of_whole_pages(driver: Driver) -> None:
    made = nvidia.PinnedTransfer()
    assert [made.take(size).size for size in (0, 1, 4096, 4097)] == [4096, 4096, 4096, 8192]
    block = made.take(1)
    assert block.cell(32) is block.cell(32)
    assert (block.cell(32).dtype, block.cell(32).item()) == (mx.uint64, block.address + 32)


@pytest.mark.parametrize(("status", "given"), [(2, True), (0, False)])
def test_a_lack_of_pinned_memory_is_an_error(driver: Driver, status: int, given: bool) -> None:
    driver.status, driver.gives = status, given
    with pytest.raises(ResourceExhausted, match=f"CUDA error {status}") as caught:
        nvidia.PinnedTransfer().take(1)
    assert caught.value.reason == "NO_PINNED_MEMORY"


def test_weights_of_many_tokens_sum_up_to_one() -> None:
    """Half precision by itself stops adding at 256."""
    keys = mx.zeros((1, 1, 4096, 1), mx.bfloat16)
    found = nvidia.unfused(keys[:, :, :2], keys, keys + 1, 1.0, None)
    assert mx.allclose(found, mx.ones_like(found), atol=0.01).item()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 5),
    transpose=st.booleans(),
    stacked=st.booleans(),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_folded_products_are_those_of_mlx(
    rows: int, heads: int, tokens: int, transpose: bool, stacked: bool, dtype: mx.Dtype
) -> None:
    shape = (heads, 32, 64) if stacked else (32, 64)
    weight, scales, biases = mx.quantize(mx.random.normal(shape).astype(dtype), group_size=32, bits=4)
    x = mx.random.normal((rows, tokens, heads, 64 if transpose else 32)).astype(dtype).swapaxes(1, 2)
    got: list[tuple[int, ...]] = []

    def product(one: mx.array, *rest: Any, **named: Any) -> mx.array:
        got.append(one.shape)
        return mx.quantized_matmul(one, *rest, **named)

    named = {"scales": scales, "biases": biases, "transpose": transpose, "group_size": 32, "bits": 4}
    plain, found = mx.quantized_matmul(x, weight, **named), nvidia.folded(product)(x, weight, **named)
    assert got == [(1, heads, rows * tokens, x.shape[-1]) if stacked and rows > 1 else x.shape]
    assert (found.shape, found.dtype) == (plain.shape, plain.dtype)
    assert mx.array_equal(found, plain) if rows == 1 else mx.allclose(found, plain, rtol=0.02, atol=0.2)
