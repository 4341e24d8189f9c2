"""What the kernel is asked for. Its numbers were compared on an H200 (docs/decisions/0014)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from sealring.node.engine import nvidia_attention

SCALE = 0.0625
"""No other test asks for it: kernels of a scale are made once."""


def arrays(
    new: int, held: int, *, rows: int = 1, heads: int = 4, width: int = 64, dtype: mx.Dtype = mx.float16
) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.zeros((rows, 2, held, width), dtype)
    return mx.zeros((rows, heads, new, width), mx.float16), keys, keys


@pytest.mark.parametrize(
    ("given", "mask", "suits"),
    [
        (arrays(4, 4096), "causal", True),
        (arrays(4, 4097), "causal", False),
        (arrays(1, 9), None, False),  # MLX has a kernel
        (arrays(1, 9, rows=3), mx.ones((3, 1, 1, 9), mx.bool_), True),
        (arrays(1, 9, rows=3), mx.ones((9,), mx.bool_), True),
        (arrays(1, 9, rows=3), mx.ones((3, 1, 1, 1), mx.bool_), False),
        (arrays(1, 9, rows=3), mx.ones((1, 3, 1, 1, 9), mx.bool_), False),
        (arrays(17, 20), "causal", False),
        (arrays(16, 16), "causal", True),
        (arrays(3, 2), "causal", False),
        (arrays(2, 9, width=80), "causal", False),
        (arrays(2, 9, width=512), "causal", False),
        (arrays(2, 9, heads=64), "causal", False),
        (arrays(2, 9, dtype=mx.float32), "causal", False),
        (arrays(4, 1024, rows=4), None, True),
        (arrays(4, 1025, rows=4), None, False),
    ],
)
def test_few_tokens_of_usual_heads_suit(given: Any, mask: Any, suits: bool) -> None:
    assert nvidia_attention.suits(*given, mask) is suits


@dataclass
class Kernel:
    names: list[str]
    source: str


def test_a_model_has_one_kernel_for_all_lengths_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Kernel] = []
    launched: list[tuple[Kernel, dict[str, Any]]] = []

    def kernel(input_names: list[str], source: str, **options: Any) -> Any:
        assert options["ensure_row_contiguous"] is False  # keys are a slice of a larger cache
        own = Kernel(input_names, source)
        made.append(own)

        def launch(**asked: Any) -> list[mx.array]:
            launched.append((own, asked))
            return [mx.zeros(asked["output_shapes"][0], asked["output_dtypes"][0])]

        return launch

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    for new, held, rows in ((2, 7, 1), (4, 900, 1), (4, 901, 2)):
        found = nvidia_attention.attention(*arrays(new, held, rows=rows), SCALE, "causal")
        assert found.shape == (rows, 4, new, 64)
        grid, block = launched[-1][1]["grid"], launched[-1][1]["threadgroup"]
        assert [size // threads for size, threads in zip(grid, block, strict=True)] == [1, 4 * new, rows]
    assert len(made) == 1
    assert len({str(asked["template"]) for _, asked in launched}) == 1
    one = arrays(1, 7, rows=3)
    for mask, sinks in (
        (mx.ones((3, 1, 1, 7), mx.bool_), None),
        (mx.zeros((1, 7), mx.float16), None),
        (mx.zeros((7,), mx.float16), mx.zeros((4,))),
    ):
        nvidia_attention.attention(*one, SCALE, mask, sinks)
        own, asked = launched[-1]
        assert own.names == ["q", "k", "v", "mask"] + ["sinks"] * (sinks is not None)
        assert asked["inputs"][3].ndim == 4
        assert "%" not in own.source.replace("threadIdx.x % 32", "").replace("blockIdx.y % fresh", "")
    assert len(made) == 4


def test_no_two_kernels_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX looks a compiled kernel up by its name and the template: one of another scale, or for a mask of
    another dtype, would compute something else without an error."""
    names: list[str] = []

    def kernel(name: str, **options: Any) -> Any:
        names.append(name)
        return lambda **asked: [mx.zeros(asked["output_shapes"][0], asked["output_dtypes"][0])]

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    one = arrays(2, 9)
    half, whole = (mx.zeros((2, 9), dtype) for dtype in (mx.float16, mx.float32))
    sinks = mx.zeros((4,), mx.float16)
    asked: list[tuple[float, Any, mx.array | None]] = [
        (0.011, None, None),
        (0.012, None, None),
        (0.011, half == 0, None),
        (0.011, half, None),
        (0.011, whole, None),
        (0.011, None, sinks),
        (0.011, None, sinks.astype(mx.float32)),
        (0.011, half, sinks),
    ]
    for scale, mask, there in asked:
        nvidia_attention.attention(*one, scale, mask, there)
    assert len(set(names)) == len(asked)
