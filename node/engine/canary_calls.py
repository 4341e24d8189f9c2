"""A stage's products and rotations, tried as its own code calls them.

A wrong kernel changes answers without an error. Which kernel computes a call depends on its shapes, and on
how its arrays lie in memory. So the stage computes a prompt, one token, and one token of two rows. The first
call of each kind is compared with sums in float64 by NumPy, which reads what the device has computed. Later
calls of the kind return drawn numbers, so that many layers cost what a few do.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import structlog

from sealring.mesh.errors import ModelError
from sealring.node.engine import caches
from sealring.node.engine.staging import Stage
from sealring.node.engine.warm_up import drawn_inputs

log = structlog.get_logger()

ROUNDINGS = 16.0
"""How many roundings of its type a result may be off."""

_TOKENS, _TOKENS_ON_CPU = 66, 4
"""Tokens of the prompt. Mixtures of experts sort 64 pairs of a token and an expert, and more. A CPU has no
kernels of its own for many tokens."""

_ROWS = (2, 3)
"""By which two rows are drawn, of which a head has different tokens."""

_PLACES = 16
"""Columns of a product that are compared, rows of large ones, and pairs of a token and an expert."""

_OF_RESULT = 4.0
"""How many roundings of itself a result may be off besides. With many terms of one sign it is much larger
than the root of their squares, and so are a CPU's sums on the way to it. Their roundings add up to 1.3 of
those of `terms`, of which this is three times as many."""

_MOST_ROWS = 128
_SPARE = 64
"""How many times its rounding a CPU's float32 may be off: no wrong kernel is off by so little."""
_TINY = 1e-30
"""What keeps a sum of nothing from being divided by."""

Compared = tuple[np.ndarray, np.ndarray, np.ndarray, int, mx.Dtype]
"""Computed numbers, right ones, and the three by which `largest_off` allows for rounding."""


def check_calls(stage: Stage, name: str, longest: int) -> None:
    """Raises ModelError (KERNEL_WRONG) for a call that differs by more than `ROUNDINGS`. `name` is the
    model's; no prompt of its has more tokens than `longest` at once.

    A Mac's GPU logs such calls and serves, since none was ever compared. NVIDIA's compiles its first products
    of quantized weights for up to a minute, once on a machine: the first prompt needs them, too.
    """
    on_cpu = mx.default_device() == mx.cpu
    tokens = _TOKENS_ON_CPU if on_cpu else stage.computed_as(_TOKENS)
    rows = [stage.make_cache(), stage.make_cache()]
    for cache, count in zip(rows, (min(tokens, longest, stage.positions), 1), strict=True):
        _check(stage, name, drawn_inputs(stage, count, count), cache)
    if stage.batches:
        two = zip(*(drawn_inputs(stage, 1, drawn) for drawn in _ROWS), strict=True)
        _check(stage, name, [mx.concatenate(list(both)) for both in two], caches.merge(rows))
    mx.clear_cache()


def largest_off(
    found: np.ndarray, right: np.ndarray, terms: np.ndarray, count: int, dtype: mx.Dtype
) -> float:
    """By how many roundings of `dtype` sums of `count` terms are off the right ones at most. `terms` are the
    roots of the sums of the terms' squares. Infinite for what is no number.

    Errors of terms and of a sum's steps have either sign, so that they add up as the squares do. A CPU rounds
    each step to the type; float32 has bits to spare. A GPU adds up in float32, and may multiply float32
    with 10 bits of it. A CPU's sum loses terms once they are smaller than a rounding of it (4,096 terms of
    one sign in bfloat16: up to 759 roundings). Such sums are left out, and those that the type cannot hold.
    """
    on_cpu, eps = mx.default_device() == mx.cpu, mx.finfo(dtype).eps
    held = np.abs(right) < mx.finfo(dtype).max / 2
    if on_cpu:
        held &= np.abs(right) * eps * math.sqrt(count) <= terms
    if dtype == mx.float32:
        eps = _SPARE * eps if on_cpu else mx.finfo(mx.float16).eps
    if on_cpu:
        eps *= max(1.0, math.sqrt(count) / 8)
    tiny = 2.0**-24 if dtype == mx.float16 else _TINY  # float16 has steps of this size near zero
    off = (np.abs(found - right) - _OF_RESULT * eps * np.abs(right)) / (terms * eps + tiny)
    return float(np.where(np.isfinite(off), off, np.inf).max(initial=0.0, where=held))


def _check(stage: Stage, name: str, inputs: list[mx.array], cache: caches.Cache) -> None:
    rows, tokens = inputs[0].shape[:2]
    with watched() as calls:
        stage(inputs, cache)
    for (function, *_), (_, _, compare) in calls.items():
        try:
            compared = compare()
        except Exception as error:  # a call in a form that is not compared here is no wrong one
            log.warning("call_not_compared", model=name, function=function, error=repr(error))
            continue
        off = largest_off(*compared) if compared is not None else 0.0
        if off <= ROUNDINGS:
            continue
        if mx.default_device() != mx.cpu and mx.metal.is_available():
            log.warning(
                "products_differ", model=name, function=function, tokens=[rows, tokens], roundings=off
            )
            continue
        raise ModelError(
            f"{function} is {off:.3g} roundings off here, in {name} with {rows} x {tokens} tokens",
            reason="KERNEL_WRONG",
            hint="install mlx again, see that the machine's memory is sound, or quantize in other groups",
        )


Calls = dict[tuple[Any, ...], tuple[mx.array, int, Callable[[], Compared | None]]]


@contextmanager
def watched() -> Iterator[Calls]:
    """The calls of this thread by function and shapes: what came out, of how many columns (0:
    of all), and what compares it."""
    calls: Calls = {}
    keys = map(mx.random.key, itertools.count())
    thread = threading.get_ident()

    def watch(name: str, function: Callable[..., mx.array], compare: Callable[..., Compared | None]) -> Any:
        def watching(*given: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return function(*given, **named)
            kind = (name, *map(_kind, given), *((key, _kind(one)) for key, one in named.items()))
            try:
                mx.eval(given, named)
                if kind not in calls:
                    few, others, count = _narrowed(name, given, named)
                    mx.eval(found := function(*few, **others))
                    kept = [_as_now(one) for one in (found, *few)]
                    others = {key: _as_now(one) for key, one in others.items()}
                    calls[kind] = kept[0], count, lambda: compare(*kept, **others)
                    if not count:
                        return found
                found, count, _ = calls[kind]
                if name == "rope":  # whose result lies in memory as its input does
                    return _as_now(found)
                shape = (*found.shape[:-1], count or found.shape[-1])
                return mx.random.normal(shape, found.dtype, key=next(keys))
            except (
                RuntimeError,
                ValueError,
            ):  # of a trace, as mx.compile makes it; warming up raises the rest
                return function(*given, **named)

        return watching

    own = [(owner, name, getattr(owner, name), compare) for owner, name, compare in COMPARED]
    try:
        for owner, name, function, compare in own:
            setattr(owner, name, watch(name, function, compare))
        yield calls
    finally:
        for owner, name, function, _ in own:
            setattr(owner, name, function)


def _kind(given: Any) -> Any:
    return (given.shape, given.dtype) if isinstance(given, mx.array) else repr(given)


def _as_now(given: Any) -> Any:
    """A name of its own for an array: `+=` on another one leaves it alone."""
    return mx.reshape(given, given.shape) if isinstance(given, mx.array) else given


def _narrowed(name: str, given: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any], int]:
    """On a CPU a product of few columns, the last among them, and the number of all; else 0. No kernel there
    goes by their number, and all of a large vocabulary take half a minute."""
    if mx.default_device() != mx.cpu or name == "rope" or len(given) > 4:
        return given, named, 0
    x, weight = given[1:] if name == "addmm" else given[:2]
    axis = -2 if name in ("quantized_matmul", "gather_qmm") else -1
    turned = axis == -1 or named.get("transpose", name == "quantized_matmul")
    count = weight.shape[axis] if getattr(weight, "ndim", 0) > 1 and turned else 0
    if (step := count // _PLACES) < 2:
        return given, named, 0

    def few(one: Any) -> Any:
        if not isinstance(one, mx.array) or one is x or one.shape[axis:][:1] != (count,):
            return one
        return one[..., (count - 1) % step :: step, *[slice(None)] * (axis == -2)]

    return [few(one) for one in given], {key: few(one) for key, one in named.items()}, count


def _places(count: int, most: int = _PLACES) -> mx.array:
    return mx.array(sorted({round(place * (count - 1) / (most - 1)) for place in range(most)}))


def _numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _sums(found: mx.array, x: mx.array, weight: mx.array, columns: mx.array, added: Any = 0.0) -> Compared:
    """A product [..., M, N] of `x` [..., M, K], and `weight` [..., K, its `columns`]; `added` are their
    numbers of what was added."""
    if x.shape[-2] > _MOST_ROWS:
        rows = _places(x.shape[-2])
        x, found = mx.take(x, rows, axis=-2), mx.take(found, rows, axis=-2)
    numbers, by = _numbers(x), _numbers(weight)
    terms = np.sqrt(np.square(numbers) @ np.square(by) + np.square(added))
    return _numbers(mx.take(found, columns, axis=-1)), numbers @ by + added, terms, x.shape[-1], found.dtype


def _of_product(found: mx.array, x: Any, weight: Any, added: mx.array | None = None) -> Compared | None:
    whole = isinstance(weight, mx.array) and mx.issubdtype(found.dtype, mx.floating)
    if not whole or min(x.ndim, weight.ndim) < 2:
        return None
    columns = _places(weight.shape[-1])
    more = 0.0 if added is None else _numbers(added[columns])
    return _sums(found, x, mx.take(weight, columns, axis=-1), columns, more)


def _of_sum(found: mx.array, added: mx.array, x: mx.array, weight: mx.array, **named: Any) -> Compared | None:
    return None if named or added.ndim != 1 else _of_product(found, x, weight, added)


def _of_quantized(
    found: mx.array, x: mx.array, weight: Any, scales: Any, biases: Any = None, *rest: Any, **named: Any
) -> Compared:
    transpose = rest[0] if rest else named.pop("transpose", True)
    columns = _places(found.shape[-1])
    packed = _taken([weight, scales, biases], columns, -2) if transpose else [weight, scales, biases]
    by: Any = mx.dequantize(*_in_type(packed, found.dtype), *rest[1:], **named)
    by = by.swapaxes(-1, -2) if transpose else mx.take(by, columns, axis=-1)
    return _sums(found[None], x[None], by, columns)  # dbrx gives one token's numbers alone


def _of_experts(
    found: mx.array,
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = False,
    **named: Any,
) -> Compared | None:
    named.pop("sorted_indices", None)
    unlike = weight.ndim != 3 or transpose != (scales is not None)
    if rhs_indices is None or unlike or named.pop("global_scale", None) is not None:
        return None
    count = math.prod(x.shape[:-2])
    lhs = mx.arange(count).reshape(x.shape[:-2]) if lhs_indices is None else lhs_indices
    lhs, rhs = (mx.flatten(one) for one in mx.broadcast_arrays(lhs, rhs_indices))
    pairs, columns = _places(lhs.size), _places(found.shape[-1])
    few = _taken([weight, scales, biases], columns, -2 if transpose else -1)  # whole ones may be gigabytes
    few = _in_type(_taken(few, rhs[pairs], 0), found.dtype)
    by: Any = few[0] if scales is None else mx.dequantize(*few, **named).swapaxes(-1, -2)
    x = mx.take(x.reshape(count, *x.shape[-2:]), lhs[pairs], axis=0)
    found = mx.take(found.reshape(-1, *found.shape[-2:]), pairs, axis=0)
    return _sums(found, x, by, columns)


def _taken(packed: list[Any], places: mx.array, axis: int) -> list[Any]:
    return [None if one is None else mx.take(one, places, axis=axis) for one in packed]


def _in_type(packed: list[Any], dtype: mx.Dtype) -> Any:
    """Numbers in the type that a product is made in; packed weights as they are."""
    floating = [one is not None and mx.issubdtype(one.dtype, mx.floating) for one in packed]
    return [one.astype(dtype) if number else one for one, number in zip(packed, floating, strict=True)]


def of_rotation(
    found: mx.array,
    x: mx.array,
    dims: int,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    **_: Any,
) -> Compared:
    """By MLX's description of rope, in float64. Angles are of float32 on a device."""
    half, numbers = dims // 2, _numbers(x)
    by = _numbers(freqs) if freqs is not None else float(base or 1) ** (np.arange(half) / half)
    begins = np.array(offset, np.float64).reshape(-1, *[1] * (x.ndim - 1))
    places = (np.arange(x.shape[-2])[:, None] + begins) * scale
    cos, sin = np.cos(places / by), np.sin(places / by)
    pairs = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(half), slice(half, dims))
    one, two = (numbers[..., place] for place in pairs)
    right, terms = numbers.copy(), np.abs(numbers)
    right[..., pairs[0]], right[..., pairs[1]] = one * cos - two * sin, one * sin + two * cos
    terms[..., pairs[0]] = terms[..., pairs[1]] = np.hypot(one, two)
    dtype = mx.float16 if found.dtype == mx.float32 else found.dtype
    return _numbers(found), right, terms, 2, dtype


COMPARED: tuple[tuple[Any, str, Callable[..., Compared | None]], ...] = (
    (mx, "matmul", _of_product),
    (mx.array, "__matmul__", _of_product),
    (mx, "addmm", _of_sum),
    (mx, "quantized_matmul", _of_quantized),
    (mx, "gather_mm", _of_experts),
    (mx, "gather_qmm", _of_experts),
    (mx.fast, "rope", of_rotation),
)
