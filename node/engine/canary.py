"""A stage's weights, looked at before it serves: a damaged one changes answers without an error.

Each array is looked at once, or blocks of its rows. `canary_calls` tries what is computed with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx

from sealring.mesh.errors import ModelError
from sealring.node.engine.contents import REDOWNLOAD
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.interception import leaves, own_arrays

LARGEST = 1 << 15
"""How many times the usual weight of its array a weight may be. A flip of an upper bit of its exponent makes
it 65,536 times as large, or larger still."""

_BLOCK = 1 << 22
"""Numbers looked at together."""

_MOST = (1 << 26, 1 << 35)
"""Numbers looked at in all, by a CPU and by a GPU: about a second."""


def check_weights(stage: Stage, name: str) -> None:
    """Raises ModelError (WEIGHTS_DAMAGED) for weights that are no numbers or far too large. `name` is the
    model's."""
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


def _damaged(name: str, why: str) -> ModelError:
    return ModelError(f"the weights of {name} are damaged: {why}", reason="WEIGHTS_DAMAGED", hint=REDOWNLOAD)
