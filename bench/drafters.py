"""Drafters of a realistic size that read hidden states of a model by bench.models, and are sure of the next
token of its cycle.

Weights are random, but for those that tell a token's successor: DSpark's by its Markov head, which corrects
the logits of a whole block by the token before, and EAGLE-3's by a layer that hands on the embedding. All
places of DFlash's block see the last token alone, so only the first guess is right.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from bench.models import SAID, Shape, configuration, made_once, printable

BLOCK = 8
"""Tokens that DSpark and DFlash guess in one pass."""

LAYERS = {"DSpark": 5, "DFlash": 5, "EAGLE-3": 1}
"""The layers of a drafter, which are as wide as the model's, by kind."""

_RANK = 256
_LITTLE = 1e-4
_SEEN_ITSELF = 2.0
"""The scale of queries with which a token of EAGLE-3's layer sees hardly any other."""


def drafter(model: Path, shape: Shape, kind: str, sure: float, layers: int = 0) -> Path:
    """The folder of a drafter of this kind for a model of that shape that `says` a cycle; `sure` is its logit
    of the next token. It has as many layers as LAYERS says, or `layers`."""

    def fill(work: Path) -> None:
        work.mkdir()
        config = _configuration(shape, kind, layers or LAYERS[kind])
        (work / "config.json").write_text(json.dumps(config))
        _write_weights(work, model, shape, kind, config, sure)

    return made_once(f"{model.name}-{kind}-{sure:g}-{layers}", model.parent, fill)


def _configuration(shape: Shape, kind: str, layers: int) -> dict[str, Any]:
    of_model = configuration(shape)
    own = ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size")
    config = {name: of_model[name] for name in own}
    config |= {"num_hidden_layers": layers, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-5}
    count = 3 if kind == "EAGLE-3" else 5
    taps = [max(place, (shape.layers - 2) * place // (count - 1)) for place in range(count)]
    if kind == "EAGLE-3":
        return {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": config | {"num_key_value_heads": shape.heads},
            "draft_vocab_size": config["vocab_size"],
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in taps],
            "target_hidden_size": shape.hidden,
            "norm_before_residual": True,
        }
    block = {"mask_token_id": 0, "target_layer_ids": taps, "runtime_block_size": 1 + BLOCK}
    config |= {"model_type": "qwen3", "num_target_layers": shape.layers}
    if kind == "DFlash":
        config |= {"block_size": 1 + BLOCK, "num_key_value_heads": shape.heads, "dflash_config": block}
        return config
    block |= {"projector_type": "dspark", "markov_rank": _RANK}
    return config | {"block_size": BLOCK, "dflash_config": block}


def _write_weights(
    folder: Path, model: Path, shape: Shape, kind: str, config: dict[str, Any], sure: float
) -> None:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from sealring.node.engine.drafts import classes_of

    made, settings = classes_of(kind)
    dtype = getattr(mx, shape.dtype)
    weights = {}
    for name, like in tree_flatten(made(settings.from_dict(dict(config))).parameters()):
        if like.ndim < 2:
            value = mx.ones(like.shape)
        else:
            key = mx.random.key(zlib.crc32(name.encode()))
            value = mx.random.normal(like.shape, key=key) * like.shape[-1] ** -0.5
        weights[name] = value.astype(dtype)
        mx.eval(weights[name])
    if kind == "DSpark":
        weights |= _blocks(weights, shape, sure)
    else:
        of_model: Any = mx.load(str(model / "model.safetensors"))
        weights |= (_first if kind == "DFlash" else _chain)(weights, of_model, shape, sure)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def _blocks(weights: dict[str, Any], shape: Shape, sure: float) -> dict[str, Any]:
    """Hidden states say nothing, and the Markov head everything."""
    import mlx.core as mx

    cycle = mx.array(printable(shape.says))
    said = mx.where(mx.random.normal((shape.says, _RANK), key=mx.random.key(1)) < 0, -1, 1)
    before, after = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"] * _LITTLE
    before[cycle] = said.astype(before.dtype)
    after[mx.roll(cycle, -1)] = (said * (sure / _RANK)).astype(after.dtype)
    return {
        "norm.weight": weights["norm.weight"] * _LITTLE,
        "markov_head.markov_w1.weight": before,
        "markov_head.markov_w2.weight": after,
    }


def _first(weights: dict[str, Any], of_model: dict[str, Any], shape: Shape, sure: float) -> dict[str, Any]:
    """The first layer adds a large multiple of the last token's embedding: each place looks everywhere alike,
    but the hidden states and the mask's embedding bring nothing there."""
    import mlx.core as mx

    attention, ones = "layers.0.self_attn", weights["norm.weight"]
    mask = of_model["model.embed_tokens.weight"][0].astype(mx.float32)
    shown = mx.eye(shape.hidden) - mask[:, None] * mask / (mask @ mask)
    return {
        "hidden_norm.weight": ones * _LITTLE,
        "norm.weight": ones * (sure / SAID),
        f"{attention}.q_norm.weight": weights[f"{attention}.q_norm.weight"] * _LITTLE,
        f"{attention}.v_proj.weight": (shown / _LITTLE).astype(ones.dtype),
        f"{attention}.o_proj.weight": mx.eye(shape.hidden).astype(ones.dtype),
    }


def _chain(weights: dict[str, Any], of_model: dict[str, Any], shape: Shape, sure: float) -> dict[str, Any]:
    """Its layer hands the embedding on to the model's own output head."""
    import mlx.core as mx

    layer, ones = "layers.0", weights["norm.weight"]
    embeds = mx.arange(2 * shape.hidden) < shape.hidden
    keys = mx.where(embeds, weights[f"{layer}.self_attn.k_proj.weight"], 0).astype(ones.dtype)
    return {
        f"{layer}.self_attn.k_proj.weight": keys,
        f"{layer}.self_attn.q_proj.weight": keys * _SEEN_ITSELF,
        f"{layer}.self_attn.v_proj.weight": mx.eye(shape.hidden, 2 * shape.hidden).astype(ones.dtype),
        f"{layer}.self_attn.o_proj.weight": mx.eye(shape.hidden).astype(ones.dtype),
        f"{layer}.mlp.down_proj.weight": weights[f"{layer}.mlp.down_proj.weight"] * _LITTLE,
        f"{layer}.hidden_norm.weight": ones * _LITTLE,
        "norm.weight": ones * (sure / SAID),
        "lm_head.weight": of_model["lm_head.weight"],
        "embed_tokens.weight": of_model["model.embed_tokens.weight"],
    }
