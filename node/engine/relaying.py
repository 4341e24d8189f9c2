"""Weights of linear layers in the order in which a Linux CPU multiplies by them fastest.

A linear layer multiplies by its weights transposed. The reference BLAS in MLX's builds for Linux then adds up
one product after another, and each addition waits for the one before. With the weights stored the other way
round it adds up a row of results side by side, in less than half of the time. Every result is the sum of the
same products in the same order, so not a bit of it differs (docs/decisions/0013-weights-relaid.md).
"""

from __future__ import annotations

import gc
import sys

import mlx.core as mx
import mlx.nn as nn

from sealring.node.engine.staging import Stage

_TRIALS = ((1, 64, 48), (5, 129, 67), (16, 512, 33))
"""Rows, inputs and outputs of layers."""


class RelaidLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer whose weights are stored transposed; it adds its bias to whole sums, as addmm does."""

    def __call__(self, x: mx.array) -> mx.array:
        x = x @ self["weight"].T
        return x + self["bias"] if "bias" in self else x


def relay(*stages: Stage) -> None:
    """Has the linear layers of loaded stages of one model keep their weights, shape and all, in memory the
    other way round. What stages share they share afterwards.

    Layers are changed one after another, so that only one has its weights twice. Only float32: for other
    types MLX has loops of its own, to which the order makes no difference.
    """
    gc.collect()  # the runs in which `dissect` watched the model still refer to its weights
    kept = [{id(array): place for place, array in enumerate(stage.kept)} for stage in stages]
    for alike in zip(*(stage.model.modules() for stage in stages), strict=True):
        made: dict[int, mx.array] = {}
        for stage, places, module in zip(stages, kept, alike, strict=True):
            if type(module) is not nn.Linear:
                continue
            weight = module["weight"]
            place = places.get(id(weight))
            if place is None or weight.dtype != mx.float32:
                continue
            relaid = made.setdefault(id(weight), mx.contiguous(weight.T).T)
            mx.eval(relaid)
            module["weight"] = stage.kept[place] = relaid
            module.__class__ = RelaidLinear
    mx.clear_cache()


def pays() -> bool:
    """Whether it is faster here, and the same to the last bit.

    A BLAS that gives the same bits both ways adds up one product after another with weights as they are.
    Faster libraries differ in the last bits. Apple's is fast either way.
    """
    if sys.platform == "darwin":
        return False
    else:
        return mx.default_device() == mx.cpu and all(_same(*sizes) for sizes in _TRIALS)


def _same(rows: int, inputs: int, outputs: int) -> bool:
    """Whether a layer gives the same with its weights either way."""
    keys = mx.random.split(mx.random.key(rows), 3)
    plain, relaid = nn.Linear(inputs, outputs), RelaidLinear(inputs, outputs)
    plain.weight = mx.random.normal((outputs, inputs), key=keys[0])
    plain.bias = relaid.bias = mx.random.normal((outputs,), key=keys[1])
    relaid.weight = mx.contiguous(plain.weight.T).T
    x = mx.random.normal((rows, 1, inputs), key=keys[2])
    return bool(mx.array_equal(plain(x), relaid(x)).item())
