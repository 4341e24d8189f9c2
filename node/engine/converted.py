"""The profile that a model has once `mlx_lm.convert` has written it, by its configuration alone.

The model is built with parameters that are never evaluated, and quantized as mlx-lm does it. Then it is
measured as any folder's model is, so that a list of models needs no arithmetic of its own.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.configuration import with_parts
from sealring.node.engine.profile import card_of, shape_of
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.interception import leaves, own_arrays
from sealring.node.engine.staging.skeleton import build_skeleton

GROUP = 64
"""Weights that share a scale: what `mlx_lm.convert` takes for itself."""

WHOLE = 16
"""Bits of a model that is not quantized."""

_CHOSEN_KEYS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
)


def converted_profile(config: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """`shape_of` a model of this configuration with weights of `bits` bits, WHOLE for bfloat16, and its
    `card`. `read_bytes` are those of `layer_bytes` that a step of one row reads, per layer: of experts only
    the chosen ones. Towers and MTP heads, of which a configuration does not say enough, are not in it.

    Raises ModelError.
    """
    config = with_parts(config)
    model = build_skeleton(config)
    keep = getattr(model, "cast_predicate", lambda name: True)
    model.apply_to_modules(lambda path, module: _cast(path, module, keep))
    card = card_of(model)["card"]["parameters"]
    if bits < WHOLE:
        with contextlib.redirect_stdout(io.StringIO()):
            mlx_lm_import.import_utils().quantize_model(model, {}, GROUP, bits)
    anatomy = dissect(model, config["model_type"])
    shape = shape_of(model, config, anatomy)
    share = _chosen(config)
    idle = [sum(_idle(module, share) for module in layer.modules()) for layer in anatomy.layers]
    read = [whole - unread for whole, unread in zip(shape["layer_bytes"], idle, strict=True)]
    return shape | {"read_bytes": read, "card": {"parameters": card, "precision": f"int{bits}"}}


def _cast(path: str, module: nn.Module, keep: Any) -> None:
    for name, value in module.parameters().items():
        if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating) and keep(f"{path}.{name}"):
            module[name] = value.astype(mx.bfloat16)


def _chosen(config: Mapping[str, Any]) -> int:
    """Experts that a token is computed by; 0 where a configuration names none."""
    parts = config, config.get("text_config") or {}
    found = (part.get(name) for part in parts for name in _CHOSEN_KEYS)
    return next((value for value in found if isinstance(value, int) and value > 0), 0)


def _idle(module: nn.Module, chosen: int) -> int:
    """Bytes of a stack of experts that a step of one row does not read.

    Raises ModelError (BAD_MODEL_CONFIG) for experts of which the configuration says how many are chosen
    nowhere.
    """
    experts = getattr(module, "num_experts", 0)
    arrays = [one for _, value in own_arrays(module) for one in leaves(value) if isinstance(one, mx.array)]
    stacked = [one for one in arrays if one.ndim > 1 and one.shape[0] == experts]
    if not isinstance(experts, int) or experts < 1 or not any(one.ndim > 2 for one in stacked):
        return 0
    if not chosen:
        raise ModelError(
            "the configuration does not say how many experts are chosen", reason="BAD_MODEL_CONFIG"
        )
    return sum(one.nbytes for one in stacked) * (experts - min(chosen, experts)) // experts
