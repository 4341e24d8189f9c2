"""A stage's weights and products, tried before it serves.

A damaged weight or a wrong kernel changes answers without an error. Each array is looked at once, or blocks
of its rows, and tokens are multiplied by one matrix of each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import structlog

from sealring.mesh.errors import ModelError
from sealring.node.engine.contents import REDOWNLOAD
from sealring.node.engine.relaying import RelaidLinear
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.interception import leaves, own_arrays

log = structlog.get_logger()

LARGEST = 1 << 15
"""How many times the usual weight of its array a weight may be. A flip of an upper bit of its exponent makes
it 65,536 times as large, or larger still."""

ROUNDINGS = 16.0
"""How many roundings of its type a product may be off."""

_BLOCK = 1 << 22
"""Numbers looked at together."""

_MOST = (1 << 26, 1 << 35)
"""Numbers looked at in all, by a CPU and by a GPU: about a second."""

_ROWS = 16
_TINY = 1e-30
"""What keeps a sum of nothing from being divided by."""


def check_stage(stage: Stage, name: str) -> None:
    """Raises ModelError: WEIGHTS_DAMAGED for weights that are no numbers or far too large, KERNEL_WRONG for
    products that differ from those of dequantized float32 weights. `name` is the model's.

    A Mac's GPU logs such products and serves, since none was ever compared. NVIDIA's compiles its first
    products of quantized weights for up to a minute, once on a machine: the first prompt needs them, too.
    """
    kept = {id(array) for array in stage.kept}
    arrays = [
        (f"{path}.{key}".lstrip("."), leaf)
        for path, module in stage.model.named_modules()
        for key, value in own_arrays(module)
        for leaf in leaves(value)
        if isinstance(leaf, mx.array) and id(leaf) in kept and mx.issubdtype(leaf.dtype, mx.floating)
    ]
    every = -(-sum(array.size for _, array in arrays) // _MOST[mx.default_device() != mx.cpu])
    found, numbers = [], 0
    for path, array in arrays:
        found.append((path, *_sizes(array, max(1, every))))
        numbers += array.size
        if numbers >= _BLOCK or path == arrays[-1][0]:
            _check_sizes(name, found)
            found, numbers = [], 0
    seen = set()
    for path, module in stage.model.named_modules():
        weight = module.get("weight") if _is_product(module) else None
        if weight is None or id(weight) not in kept:
            continue
        kind = (
            type(module),
            weight.shape,
            weight.dtype,
            getattr(module, "mode", ""),
            getattr(module, "bits", 0),
        )
        if kind not in seen:
            seen.add(kind)
            _check_product(name, path, module)


def differs(one: np.ndarray, two: np.ndarray, terms: np.ndarray, count: int, dtype: mx.Dtype) -> float:
    """By how many roundings of `dtype` two sums of `count` equal terms differ at most: arrays of float32.
    `terms` are the roots of the sums of the terms' squares. Infinite for what is no number.

    Errors of terms and of a sum's steps have either sign, so that they add up as the squares do. A CPU rounds
    each step to the type. A GPU adds up in float32, and may multiply float32 with 10 bits of it.
    """
    eps = mx.finfo(dtype).eps
    if mx.default_device() == mx.cpu:
        eps *= max(1.0, math.sqrt(count) / 8)
    elif dtype == mx.float32:
        eps = mx.finfo(mx.float16).eps
    off = np.abs(one - two) / (terms * eps + _TINY)
    return float(np.where(np.isfinite(off), off, np.inf).max())


def _sizes(array: mx.array, every: int) -> tuple[mx.array, mx.array]:
    """The usual size of an array's numbers and the largest, lazily where it is small. The first is infinite
    where one is no number."""
    rows = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    means, largest = list[mx.array](), list[mx.array]()
    for block in _blocks(rows, every):
        numbers = mx.abs(block.astype(mx.float32))
        means.append(numbers.mean(axis=-1))
        largest.append(numbers.max())
        if rows.size > _BLOCK:
            mx.eval(means[-1], largest[-1])
    every_mean = mx.concatenate(means)
    middle = mx.sort(every_mean)[every_mean.size // 2]
    return mx.where(mx.isfinite(every_mean).all(), middle, mx.inf), mx.stack(largest).max()


def _check_sizes(name: str, found: list[tuple[str, mx.array, mx.array]]) -> None:
    mx.eval([sizes for _, *sizes in found])
    for path, usual, largest in found:
        middle, most = float(usual.item()), float(largest.item())  # type: ignore[arg-type]
        if not math.isfinite(middle):
            raise _damaged(name, f"{path} holds what is no number")
        if middle and most > LARGEST * middle:
            raise _damaged(name, f"{path} holds {most:.3g}, where {middle:.3g} is usual")


def _blocks(rows: mx.array, every: int) -> Iterator[mx.array]:
    """Blocks of rows, of which each `every`th is looked at; the first always."""
    count = max(1, _BLOCK // max(1, rows.shape[1]))
    for number, start in enumerate(range(0, rows.shape[0], count)):
        if number % every == 0:
            yield rows[start : start + count]


_LINEAR: tuple[Any, ...] = (nn.Linear, RelaidLinear, nn.QuantizedLinear)
"""Layers whose call is a product and a bias, and those that inherit it."""

_OF_EXPERTS = ("SwitchLinear", "QuantizedSwitchLinear")
_OF_HEADS = ("MultiLinear", "QuantizedMultiLinear")
"""Stacked matrices. mlx-lm and mlx-vlm have classes of each name, with the same call."""


def _is_product(module: Any) -> bool:
    kind = type(module)
    return kind.__name__ in _OF_EXPERTS + _OF_HEADS or kind.__call__ in {one.__call__ for one in _LINEAR}


def _check_product(name: str, path: str, module: Any) -> None:
    """Compares products of one token and of several, for which GPUs have other kernels, with sums in float32
    by NumPy, which reads what the device has computed. Heads multiply by their matrices both ways."""
    outputs = module.weight.shape[-2]
    rows = _places(outputs)
    weight, added, dtype = _some_rows(module, rows)
    if not np.isfinite(weight).all():
        raise _damaged(name, f"{path} holds what is no number")
    ways = [(weight, added, lambda given: mx.take(_product(module, given), rows, axis=-1))]
    if type(module).__name__ in _OF_HEADS:
        columns = _places(weight.shape[1])
        turned = _some_rows(module, mx.arange(outputs))[0][:, np.array(columns)].T
        nothing = np.zeros(columns.size, np.float32)
        ways.append(
            (turned, nothing, lambda given: mx.take(_of_heads(module, given, False), columns, axis=-1))
        )
    for tokens in (1, 2 if mx.default_device() == mx.cpu else 48):
        off = max(_off(tokens, *way, dtype) for way in ways)
        if off <= ROUNDINGS:
            continue
        if mx.default_device() != mx.cpu and mx.metal.is_available():
            log.warning("products_differ", model=name, weights=path, tokens=tokens, roundings=off)
            continue
        raise ModelError(
            f"products of {tokens} tokens and {path} of {name} are {off:.3g} roundings off here",
            reason="KERNEL_WRONG",
            hint="install mlx again, see that the machine's memory is sound, or quantize in other groups",
        )


def _places(count: int) -> mx.array:
    return mx.array(sorted({round(place * (count - 1) / (_ROWS - 1)) for place in range(_ROWS)}))


def _off(
    tokens: int,
    weight: np.ndarray,
    added: np.ndarray,
    product: Callable[[mx.array], mx.array],
    dtype: mx.Dtype,
) -> float:
    given = mx.random.normal((tokens, weight.shape[1]), key=mx.random.key(tokens)).astype(dtype)
    found, numbers = _numbers(product(given)), _numbers(given)
    terms = np.sqrt(np.square(numbers) @ np.square(weight).T + np.square(added))
    return differs(found, numbers @ weight.T + added, terms, weight.shape[1], dtype)


def _product(module: Any, given: mx.array) -> mx.array:
    """What the layer makes of tokens; of stacked matrices, the last."""
    if type(module).__name__ in _OF_HEADS:
        return _of_heads(module, given, True)
    if type(module).__name__ in _OF_EXPERTS:
        last = mx.full((given.shape[0], 1), module.weight.shape[0] - 1, mx.uint32)
        return mx.reshape(module(given[:, None, None], last), (given.shape[0], -1))
    made: mx.array = module(given)
    return made


def _of_heads(module: Any, given: mx.array, transpose: bool) -> mx.array:
    heads = mx.broadcast_to(given, (1, module.weight.shape[0], *given.shape))
    made: mx.array = module(heads, transpose=transpose)
    return made[0, -1]


def _some_rows(module: Any, rows: mx.array) -> tuple[np.ndarray, np.ndarray, mx.Dtype]:
    """These rows of a layer's weights and bias in float32, and the type that it multiplies. Of stacked layers
    it is the last."""
    stacked = module.weight.ndim == 3
    kept = {key: module[key] for key in ("weight", "scales", "biases", "bias") if key in module}
    floating = [array.dtype for array in kept.values() if mx.issubdtype(array.dtype, mx.floating)]
    taken = {key: mx.take(array[-1] if stacked else array, rows, axis=0) for key, array in kept.items()}
    weight = taken["weight"]
    if "scales" in taken:
        settings: dict[str, Any] = {key: getattr(module, key) for key in ("group_size", "bits", "mode")}
        if "global_scale" in module:
            settings["global_scale"] = module.global_scale
        weight = mx.dequantize(weight, taken["scales"], taken.get("biases"), **settings)
    added = taken.get("bias", mx.zeros((rows.size,)))
    return _numbers(weight), _numbers(added), next(iter(floating), mx.bfloat16)


def _numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def _damaged(name: str, why: str) -> ModelError:
    return ModelError(f"the weights of {name} are damaged: {why}", reason="WEIGHTS_DAMAGED", hint=REDOWNLOAD)
