"""Stages with random weights, for checks and benchmarks."""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .anatomy import dissect, not_runnable
from .quantization import cache_quantization
from .skeleton import build_skeleton
from .stage import Stage

_SPREAD = 0.02


def random_model(config: dict[str, Any], *, seed: int, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """The whole model with random weights, lazy.

    A parameter's values depend on the seed and its name only: its initial value plus noise of its own, so
    that no norm is all ones and no bias zero, and a stage which lacks one shows. Raises ModelError.
    """
    mx.random.seed(seed)
    model = build_skeleton(config)
    quantization: dict[str, Any] | None = config.get("quantization")
    parameters = []
    for name, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            noise = mx.random.normal(value.shape, key=mx.random.key(int.from_bytes(digest[:8], "big")))
            value = (value + _SPREAD * noise).astype(dtype)
        elif value.ndim > 1:  # a table of indices, such as a router's by tokens
            value = (mx.arange(value.size) * 7 // 3 % 2).reshape(value.shape).astype(value.dtype)
        parameters.append((name, value))
    model.update(tree_unflatten(parameters))
    if quantization is not None:
        size = quantization["group_size"]
        predicate = getattr(model, "quant_predicate", None) or (lambda path, module: True)

        def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
            """Whether to quantize, as mlx-lm does: modules that are wide enough, by their own setting if
            any."""
            if not hasattr(module, "to_quantized"):
                return False
            own: bool | dict[str, Any] = quantization.get(path, predicate(path, module))
            width = own.get("group_size", size) if isinstance(own, dict) else size
            return own if module.weight.shape[-1] % width == 0 else False

        try:
            nn.quantize(
                model,
                group_size=size,
                bits=quantization["bits"],
                mode=quantization.get("mode", "affine"),
                class_predicate=chosen,
            )
        except TypeError as error:  # AFM 7's layers do not know the modes of today's mlx
            raise not_runnable(config["model_type"], error) from error
    return model


def random_stage(
    config: dict[str, Any],
    lo: int,
    hi: int,
    *,
    seed: int,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int = 0,
    cut: type[Stage] = Stage,
) -> Stage:
    """A stage with random weights; a layer has the same parameters whatever the split."""
    model = random_model(config, seed=seed, dtype=dtype)
    anatomy = dissect(model, config["model_type"])
    quantization = cache_quantization(model, anatomy.model_type, kv_bits) if kv_bits else None
    stage = cut(model, anatomy, lo, hi, quantization=quantization)
    for array in stage.kept:
        mx.eval(array)
    return stage
