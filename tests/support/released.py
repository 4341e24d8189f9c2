"""Models as their publishers release them, before mlx-lm converts them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from sealring.node.engine.staging import build_skeleton

Weights = dict[str, mx.array]
Tensors = dict[str, tuple[str, mx.array]]
"""Arrays with the dtypes that a safetensors file names."""


def experts_apart(given: Weights, stacked: str, apart: str, **names: str) -> Weights:
    """One tensor for each expert; `names` are the projections' where they differ."""
    found = {}
    for name, array in given.items():
        layer, is_stacked, projection = name.partition(f".{stacked}.")
        if not is_stacked:
            found[name] = array
            continue
        own, _, kind = projection.partition(".")
        for expert, each in enumerate(array):
            found[f"{layer}.{apart}.{expert}.{names.get(own, own)}.{kind}"] = each
    return found


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A model's folder with tensors of any dtype that the format of the files has."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header, blobs, at = dict[str, Any](), list[bytes](), 0
    for name, (dtype, array) in tensors.items():
        blobs.append(bytes(memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))))
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    written = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written + b"".join(blobs))
    return folder


def released(config: dict[str, Any]) -> Tensors:
    """Random weights of a model as its publisher releases them, bfloat16."""
    made = {
        name: mx.random.normal(array.shape, key=mx.random.key(place)).astype(mx.bfloat16)
        for place, (name, array) in enumerate(tree_flatten(build_skeleton(config).parameters()))
    }
    return {name: ("BF16", array) for name, array in experts_apart(made, "switch_mlp", "experts").items()}
