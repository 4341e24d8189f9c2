"""Folders of small models with an MTP head, as checkpoints have them: random ones, and ones that are often
right."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from sealring.node.engine.staging import random_model
from sealring.node.engine.staging.mtp_head import FORMATS, classes_of_one, one_layer
from sealring.node.engine.staging.skeleton import model_classes

SEED = 7
_OUT = ("o_proj", "out_proj", "down_proj", "unembed_out", "fc2", "dense")
"""Modules whose results are added to a layer's input."""

_NOISE = 0.02


def save(folder: Path, config: dict[str, Any], *, seed: int = SEED, kept: float | None = None) -> None:
    """Saves a model and its head. With `kept` layers add only that part of what they add; a token then
    decides most of what follows it, and the head says that too. Else the head is random, and hardly ever
    right."""
    weights = dict(tree_flatten(random_model(config, seed=seed).parameters()))
    head = random_head(config, weights, seed, right=kept is not None)
    if kept is not None:
        weights = {name: value * kept if adds(name) else value for name, value in weights.items()}
    _write(folder, config, weights | head)


def save_reader(folder: Path, config: dict[str, Any]) -> None:
    """Saves a model of which the last layer alone adds anything, and a head that has this layer: it is right
    about what follows a token if it has read what the layer has read."""
    weights = dict(tree_flatten(random_model(config, seed=SEED).parameters()))
    last = f"layers.{config['num_hidden_layers'] - 1}."
    for name, value in weights.items():
        if adds(name) and last not in name:
            weights[name] = mx.zeros_like(value)
        elif name.endswith("embed_tokens.weight"):  # the head has it behind a norm
            weights[name] = value / mx.sqrt(mx.mean(mx.square(value), axis=-1, keepdims=True))
    head = random_head(config, weights, SEED, right=True)
    own = {name.partition(last)[2]: value for name, value in weights.items() if last in name}
    for name in head:
        head[name] = next((value for rest, value in own.items() if name.endswith(f".{rest}")), head[name])
    _write(folder, config, weights | head)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def adds(name: str) -> bool:
    return any(name.endswith((f".{out}.weight", f".{out}.bias")) for out in _OUT)


def random_head(
    config: dict[str, Any], weights: dict[str, mx.array], seed: int, *, right: bool = False
) -> dict[str, mx.array]:
    """The head's weights by the names of checkpoints. If it is to be `right` its layer adds nothing, and the
    projection lets the token's embedding pass."""
    form = FORMATS[config["model_type"]]
    model_class, arguments = classes_of_one(config, *model_classes(config))
    model = model_class(arguments.from_dict(one_layer(config)))
    text = config.get("text_config") or config
    prefix = form.prefix.format(layers=text["num_hidden_layers"])
    named = {"embedding": form.embedding_norm, "hidden": form.hidden_norm, "projection": form.projection}
    parts = {part: name.replace("\\.", ".") for part, name in named.items()}
    last = len(model.layers) - 1
    found: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        part, _, rest = name.removeprefix("fusion.").partition(".")
        if name.startswith("fusion."):
            own = f"{parts[part]}.{rest}"
        elif ".layers." in name:
            number, _, rest = name.split(".layers.")[1].partition(".")
            own = f"{form.layers}{number}.{rest}" if form.layers else rest
        elif name.endswith((".norm.weight", ".norm_f.weight")):
            own = form.norm.replace("\\.", ".").replace("\\d+", str(last)) + ".weight"
        else:
            continue
        found[prefix + own] = _value(name, value, seed, right, weights)
    return found


def _value(name: str, value: mx.array, seed: int, right: bool, weights: dict[str, mx.array]) -> mx.array:
    if right and name.endswith((".norm.weight", ".norm_f.weight")):
        return weights[name]
    if right and name.startswith("fusion."):
        width = value.shape[0]
        return mx.ones(value.shape) if value.ndim == 1 else mx.eye(width, value.shape[1])
    if right and adds(name):
        return mx.zeros_like(value)
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    digest = hashlib.sha256(f"{seed}/mtp/{name}".encode()).digest()
    return value + _NOISE * mx.random.normal(
        value.shape, key=mx.random.key(int.from_bytes(digest[:8], "big"))
    )
