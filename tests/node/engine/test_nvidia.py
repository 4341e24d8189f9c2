from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine import device, nvidia


def drawn(rows: int, heads: int, groups: int, new: int, held: int) -> tuple[mx.array, mx.array, mx.array]:
    mx.random.seed(7)
    return (
        mx.random.normal((rows, heads, new, 16)),
        mx.random.normal((rows, groups, held, 16)),
        mx.random.normal((rows, groups, held, 8)),
    )


def masks(rows: int, new: int, held: int) -> dict[str, Any]:
    window = mx.arange(held - new, held)[:, None] < mx.arange(held) + 3
    causal = mx.arange(held - new, held)[:, None] >= mx.arange(held)
    padded = mx.broadcast_to((window & causal)[None, None], (rows, 1, new, held))
    return {
        "none": None,
        "causal": "causal",
        "boolean": window & causal,
        "of rows": padded,
        "added": mx.where(causal, 0.0, -1e9),
    }


@settings(max_examples=25, deadline=None)
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
        (2, 1000, {}, False),
        (126, 126, {"sinks": None}, False),
        (126, 126, {"sinks": 1}, True),
        (512, 4096, {}, True),
        (512, 4100, {}, False),
        (256, 4096, {}, False),
        (500, 4096, {}, False),
        (600, 120_000, {}, True),
    ],
)
def test_regular_lengths_are_left_to_plans(
    monkeypatch: pytest.MonkeyPatch, new: int, held: int, others: dict[str, Any], fused: bool
) -> None:
    calls: list[str] = []

    def noted(name: str) -> Any:
        def call(*arrays: mx.array, **options: Any) -> mx.array:
            calls.append(name)
            return arrays[0]

        return call

    monkeypatch.setattr(nvidia, "unfused", noted("unfused"))
    queries, keys = mx.zeros((1, 4, new, 1)), mx.zeros((1, 2, held, 1))
    nvidia.planless(noted("fused"))(queries, keys, keys, scale=1.0, mask="causal", **others)
    assert calls == ["fused" if fused else "unfused"]


def test_a_mask_for_each_head_is_left_to_mlx() -> None:
    queries, keys = mx.zeros((1, 4, 3, 8)), mx.zeros((1, 2, 5, 8))
    mask = mx.ones((1, 4, 3, 5), mx.bool_)
    calls: list[Any] = []
    nvidia.planless(lambda *_, **options: calls.append(options["mask"]) or queries)(
        queries, keys, keys, scale=1.0, mask=mask
    )
    assert calls == [mask]


def test_nothing_is_replaced_without_an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mx, "gpu", mx.default_device())
    assert device.nvidia() is None
    device.prepare()
    assert mx.fast.scaled_dot_product_attention is before


def test_it_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", mx.fast.scaled_dot_product_attention)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "gpu", mx.default_device())
    assert device.nvidia() is nvidia
    device.prepare()
    once = mx.fast.scaled_dot_product_attention
    device.prepare()
    assert mx.fast.scaled_dot_product_attention is once
    assert hasattr(once, "fused")
    assert os.environ["MLX_MAX_OPS_PER_BUFFER"] == "7"
    assert device.warm_up_lengths() == nvidia.WARM_UP_LENGTHS


def test_a_process_without_such_a_gpu_does_not_have_it() -> None:
    code = "import sys, sealring.node.engine.main as m, sealring.node.engine.device as d; d.prepare(); "
    code += "print('sealring.node.engine.nvidia' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]


@dataclass
class Launch:
    source: str
    inputs: list[mx.array]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    options: dict[str, object]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What MLX would be asked to launch on an NVIDIA GPU; nothing is copied."""
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
        nvidia._copy_in(address, size, (1, 1, size // 2), mx.bfloat16)
        nvidia._copy_out(mx.zeros((1, 1, size // 4), mx.uint32), address, size)
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
        nvidia._copy_in(address, 4 * rows * tokens, (rows, tokens), mx.uint32)
        nvidia._copy_in(address, 32 * rows * tokens, (rows, tokens, 4, 4), mx.bfloat16)
        nvidia._copy_out(mx.zeros((rows * tokens,), mx.uint32), address, 4 * rows * tokens)
    assert len({launch.source for launch in launches}) == 3


def test_most_blocks_are_of_many_threads(launches: list[Launch]) -> None:
    for hidden, rows in ((4096, 31), (8192, 7), (2880, 32), (5120, 1)):
        nvidia._copy_in(mx.array([0], mx.uint64), 2 * hidden * rows, (rows, 1, hidden), mx.bfloat16)
    assert all(launch.threadgroup[0] >= 128 for launch in launches)
