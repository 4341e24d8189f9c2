"""What is known of a model that nobody has tried: where its code is, how it can be cut, what it can do."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine.caches import OneRow, for_one_row, trimmable
from sealring.node.engine.caches.undo import runs_of
from sealring.node.engine.drafts.drafter_models import FAMILIES
from sealring.node.engine.staging import build_skeleton
from sealring.node.engine.staging.adapters import Adapter
from sealring.node.engine.staging.anatomy import Anatomy, dissect, full_cache
from sealring.node.engine.staging.mtp_head import format_of
from sealring.node.engine.staging.quantization import BITS, cache_quantization
from sealring.node.engine.text.marked import in_short
from sealring.node.engine.text.tokenizer import load_tokenizer

_PACKAGES = {"mlx_lm": "mlx-lm", "mlx_vlm": "mlx-vlm"}
MOST_CUTS = 12
"""Kinds of cuts that one run compares."""


def cuts_of(anatomy: Anatomy) -> list[int]:
    """The first layer in front of which there is a cut of each kind: between layers that are made alike, with
    the same state. At most MOST_CUTS."""
    kinds = [_kind(layer) for layer in anatomy.layers]
    found: dict[Any, int] = {}
    first = max(1, anatomy.head_layers)
    for index, boundary in enumerate(anatomy.boundaries[first:], first):
        specs = tuple((spec.dtype, spec.tail) for spec in boundary.specs)
        found.setdefault((kinds[index - 1], kinds[index], specs), index)
    return sorted(found.values())[:MOST_CUTS]


def _kind(layer: nn.Module) -> frozenset[tuple[str, str]]:
    """What a layer is made of: its modules and their settings, but for numbers, such as the layer's own."""
    found = set()
    for name, module in layer.named_modules():
        found.add((name, type(module).__name__))
        found |= {
            (f"{name}.{key}", str(value))
            for key, value in {**dict(module), **vars(module)}.items()
            if isinstance(value, (bool, str))
        }
    return frozenset(found)


def abilities(config: dict[str, Any]) -> dict[str, Any]:
    """`adapter`: whether sealring has a hook of its own for the architecture. `rows_together`: whether rows
    that decode are computed as a batch. `kv_bits`: the numbers of bits that its KV cache can have.
    `prefixes`: whether kept prefixes can be cut to `any` length or serve as a `whole` only. `drafts`: whether
    a row's last tokens can be taken back. Raises ModelError.
    """
    model = build_skeleton(config)
    anatomy = dissect(model, config["model_type"])
    cache = for_one_row(full_cache(model), anatomy.adapter.batches)
    try:
        cache_quantization(model, config["model_type"], BITS[0])
        kv_bits = list(BITS)
    except ModelError:
        kv_bits = []
    return {
        "adapter": type(anatomy.adapter) is not Adapter
        or anatomy.adapter.state != Adapter.state
        or anatomy.adapter.together is not None,
        "rows_together": not isinstance(cache, OneRow),
        "kv_bits": kv_bits,
        "prefixes": "any" if trimmable(cache) else "whole",
        "drafts": runs_of(cache, 2, anatomy.adapter.steps_alike) > 0,
    }


def about(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """`abilities`, where the code is from, what crosses each kind of cut, and the tokenizer's template and
    notation of calls: None and empty without a tokenizer. Raises ModelError."""
    anatomy = dissect(build_skeleton(config), config["model_type"])
    module = type(anatomy.layers[0]).__module__
    package = _PACKAGES.get(module.partition(".")[0], "")
    crosses = {
        " ".join(f"{spec.name} {spec.dtype}{list(spec.tail)}" for spec in anatomy.boundaries[cut].specs)
        for cut in cuts_of(anatomy)
    }
    return abilities(config) | {
        "code": module,
        "package": f"{package} {version(package)}" if package else "",
        "crosses": sorted(crosses),
        "mtp": format_of(config) is not None,
        "drafters": [kind for kind, made in FAMILIES.items() if config["model_type"] in made],
        "indivisible": anatomy.indivisible,
        **_text_of(path),
    }


def _text_of(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return {"template": None, "calls": "", "thoughts": False}
    tokenizer = load_tokenizer(path)
    tokenizer.close()
    shape, form = tokenizer.shape, tokenizer.format
    template = {"changes": shape.changes, "lost": in_short(shape.lost)} if shape.asked else None
    return {"template": template, "calls": form.name, "thoughts": form.thinking is not None}
