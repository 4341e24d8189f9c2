"""Faults of MLX's backends: each wrapper of a function computes wrongly where the fault was reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

Function = Callable[..., mx.array]


def is_view(array: mx.array) -> bool:
    """Whether an array of the CPU does not lie in memory in its own order."""
    mx.eval(array)
    return not memoryview(array).c_contiguous


def many_pairs(right: Function) -> Function:
    """gather_qmm of 8 and more pairs of a token and an expert (CUDA, MLX 0.32.0)."""

    def wrong(x: mx.array, w: mx.array, *rest: Any, rhs_indices: mx.array, **named: Any) -> mx.array:
        found = right(x, w, *rest, rhs_indices=rhs_indices, **named)
        return found * (1.71 if rhs_indices.size >= 8 else 1)

    return wrong


def views(right: Function) -> Function:
    """rope, or a product, that reads a view as if it lay in its own order (CUDA, MLX 0.32.0)."""

    def wrong(x: mx.array, *rest: Any, **named: Any) -> mx.array:
        return right(mx.roll(x, 1, axis=1) if is_view(x) else x, *rest, **named)

    return wrong


def later_rows(right: Function) -> Function:
    """quantized_matmul of several rows that reads the first for all (CUDA, MLX 0.32.0)."""

    def wrong(x: mx.array, *rest: Any, **named: Any) -> mx.array:
        return right(mx.broadcast_to(x[:1], x.shape) if x.ndim > 2 else x, *rest, **named)

    return wrong


def later_rows_of_heads(right: Function) -> Function:
    """quantized_matmul of several rows by a matrix for each head (CUDA, MLX 0.32.4)."""

    def wrong(x: mx.array, weight: mx.array, *rest: Any, **named: Any) -> mx.array:
        wrongly = x.ndim == 4 and weight.ndim == 3
        return right(mx.broadcast_to(x[:1], x.shape) if wrongly else x, weight, *rest, **named)

    return wrong


def one_token_of_later_rows(right: Function) -> Function:
    """rope of one token of several rows (Metal, https://github.com/ml-explore/mlx/issues/3795)."""

    def wrong(x: mx.array, *rest: Any, **named: Any) -> mx.array:
        found = right(x, *rest, **named)
        return mx.concatenate([found[:1], found[1:] * 0.5]) if x.shape[0] > 1 and x.shape[-2] == 1 else found

    return wrong


def last_columns(right: Function) -> Function:
    """quantized_matmul by the matrix itself that leaves columns out
    (Metal, https://github.com/ml-explore/mlx/issues/4250)."""

    def wrong(x: mx.array, *rest: Any, transpose: bool = True, **named: Any) -> mx.array:
        found = right(x, *rest, transpose=transpose, **named)
        if transpose:
            return found
        kept = found[..., : found.shape[-1] // 2]
        return mx.concatenate([kept, mx.zeros_like(found[..., kept.shape[-1] :])], axis=-1)

    return wrong
