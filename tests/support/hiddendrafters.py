"""Folders of small models and of drafters that read their hidden states: random ones, and ones that are often
right."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mtpheads import adds
from stagering import config_of

from sealring.node.engine.drafts import classes_of
from sealring.node.engine.staging import random_model

SEED = 7
BLOCK = 8
TAPPED = (0, 1, 2)
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
}
_BLOCKS: dict[str, Any] = _SHAPE | {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": BLOCK,
    "rope_theta": 1000,
    "dflash_config": {"mask_token_id": 299, "target_layer_ids": list(TAPPED)},
}
_WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "DFlash": _BLOCKS,
    "DFlash:window": _BLOCKS | _WINDOW,
    "DFlash2": _BLOCKS
    | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": _BLOCKS["dflash_config"] | _SELECTOR | {"runtime_block_size": BLOCK},
    },
    "DSpark": _BLOCKS
    | {
        "dflash_config": _BLOCKS["dflash_config"] | {"projector_type": "dspark", "markov_rank": 16},
        "block_size": BLOCK - 1,
    },
    "EAGLE-3": {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _SHAPE | {"num_hidden_layers": 1},
        "draft_vocab_size": 200,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in TAPPED],
        "target_hidden_size": 64,
    },
    "DFlash for Gemma 4": _BLOCKS | {"model_type": "gemma4", "final_logit_softcapping": 30.0},
    "DFlash for Laguna": _BLOCKS
    | {
        "model_type": "laguna",
        "num_hidden_layers": len(TAPPED),
        "layer_types": ["sliding_attention"] * len(TAPPED),
        "sliding_window": 7,
        "gating": "per-head",
        "draft_vocab_size": 300,
        "max_position_embeddings": 1000,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in TAPPED],
        "dflash_config": _BLOCKS["dflash_config"]
        | {"block_size": BLOCK, "num_target_layers": 4, "causal": True},
    },
}
"""Drafters for a model of 4 layers, width 64 and 300 tokens, by kind."""

_TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "DFlash for Gemma 4": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": 300,
        },
    ),
    "DFlash for Laguna": ("laguna", {}),
}


def target_of(kind: str) -> dict[str, Any]:
    """The configuration of a model that a key of CONFIGS is for."""
    family, more = _TARGETS.get(kind, ("qwen3", {}))
    return config_of(family) | {"hidden_size": 64, "vocab_size": 300} | more


_ALIKE = 0.02
_LITTLE = 0.01


def save_model(folder: Path, config: dict[str, Any], *, kept: float | None = None) -> None:
    """Saves a model. With `kept` layers add only that part of what they add, and embeddings are alike: some
    few tokens follow most others."""
    weights = dict(tree_flatten(random_model(config, seed=SEED).parameters()))
    if kept is not None:
        weights = {name: value * kept if adds(name) else value for name, value in weights.items()}
        name = next(name for name in weights if name.endswith("embed_tokens.weight"))
        weights[name] = _alike(weights[name])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def _alike(embedding: mx.array) -> mx.array:
    return embedding[:1] + _ALIKE * embedding


def save_drafter(folder: Path, kind: str, model: Path, *, kept: float | None = None) -> None:
    """Saves a drafter of a key of CONFIGS for a saved model. With `kept` it says what follows there."""
    config = CONFIGS[kind]
    of_model = mx.load(str(model / "model.safetensors"))
    assert isinstance(of_model, dict)
    made, settings = classes_of(kind.partition(":")[0])
    drafter = made(settings.from_dict(dict(config)))
    weights = {}
    for name, value in tree_flatten(drafter.parameters()):
        random = _random(name, value)
        weights[name] = random * kept * _LITTLE if kept is not None and _small(name) else random
    if "d2t" in weights:
        size = weights["d2t"].shape[0]
        weights["d2t"] = mx.where(mx.arange(size) < size // 2, 0, 300 - size)
        if kept is not None:
            ids = mx.arange(size) + weights["d2t"]
            weights["fc.weight"] = mx.concatenate([mx.zeros((64, 128)), mx.eye(64)], axis=1)
            weights["lm_head.weight"] = of_model["lm_head.weight"][ids]
            weights["norm.weight"] = of_model["model.norm.weight"]
            weights["embed_tokens.weight"] = of_model["model.embed_tokens.weight"]
    elif kept is not None:
        weights["norm.weight"] = of_model["model.norm.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def _small(name: str) -> bool:
    return adds(name) or name.startswith(("markov_head", "candidate_selector"))


def _random(name: str, value: mx.array) -> mx.array:
    if name.endswith("norm.weight"):
        return mx.ones(value.shape)
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    made = mx.random.normal(value.shape, key=mx.random.key(int.from_bytes(digest[:4], "big")))
    if value.ndim < 2:
        return made * 0.02
    return made if "embed" in name or "codebook" in name else made * value.shape[-1] ** -0.5
