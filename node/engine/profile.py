"""A model's needs of the machines that hold it, measured without reading its weights.

Sizes of parameters come from the lazily mapped, sanitized and quantized model. Sizes of caches come from the
model's own cache classes after two lazy runs of different lengths. Nothing is evaluated.
`python -m sealring.node.engine.profile PATH` prints the profile as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import structlog

from sealring.mesh.errors import ModelError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.adapters import adapter_of, check_none, describe
from sealring.node.engine.apart import answer
from sealring.node.engine.caches import kind_of
from sealring.node.engine.caches.undo import runs_of
from sealring.node.engine.contents import check_folder
from sealring.node.engine.generation import own_options
from sealring.node.engine.mapped_table import tables_of
from sealring.node.engine.staging.anatomy import Anatomy, dissect, full_cache, outer_modules
from sealring.node.engine.staging.interception import leaves, own_arrays
from sealring.node.engine.staging.quantization import BITS, cache_quantization
from sealring.node.engine.staging.shards import sharded
from sealring.node.engine.vision.sizes import tower_sizes
from sealring.node.engine.weights import (
    has_mtp_head,
    load_lazily,
    load_mtp_head,
    read_header,
    weight_files,
)
from sealring.node.models.folders import files_in

log = structlog.get_logger()

_LENGTHS = (256, 512)
"""Tokens of the two runs: whole blocks of mlx-lm's caches, which grow by 256."""

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "model_max_length",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "n_ctx",
    "seq_length",
    "block_size",
)
_SCALES = ("scales", "biases", "global_scale")
"""What stands beside a quantized weight."""

_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "hidden_dim", "model_dim")
COVERED = frozenset(
    {"config.json", "generation_config.json", "modules.json", "chat_template.jinja", "chat_template.json"}
    | {"hf_quant_config.json"}
    | {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    | {"preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"}
    | {"tokenizer.model", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model"}
    | {"spm_char.model", "tiktoken.model", "qwen.tiktoken", "vocab.json", "vocab.txt", "merges.txt"}
    | {"vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json", "dict.txt"}
    | {"byte_maps.json", "emoji.json", "normalizer.json", "word_shape.json", "word_pronunciation.json"}
)
"""Files of a model's folder, beside its weights and INNER, that shape answers: loaders, tokenizers and
processors read them."""


def profile(path: Path, ranks: int = 1, adapter: Path | None = None) -> dict[str, Any]:
    """The profile of the model in a folder. Sizes are in bytes; lists have one entry per layer. `adapter` is
    the folder of an adapter by which the model is tuned.

    `embed_bytes`: parameters that the head stage needs besides its layers; `head_bytes`: those that the tail
    needs. With `tied` the tail needs `embed_bytes` as well. A window bounds a layer's tokens to
    `kv_max_tokens` (None: unbounded). A layer that reads another layer's cache has none of its own here, but
    the first stage to hold such a layer without its donor keeps a copy of the donor's.
    `handoff_bytes_per_token`: the most that crosses any boundary between two layers. `quantized`:
    `kv_bytes_per_token` with caches of 8 and of 4 bits, or nothing and `not_quantizable`, which says why.
    `trimmable`: whether a row's last tokens can be taken back, as wrong drafts have to be. `travels`: whether
    it answers with tokens, and a row's caches can be stored and handed on. `card`: how many
    `parameters` the whole model has, and the `precision` of most of them: bfloat16, or int4, mxfp8 and the
    like where they are quantized; beside these its own options of sampling (`generation.own_options`).

    `residents`: what the folder has for a head or a tail besides layers, as `Resident` of model.proto: an MTP
    head that is of use, the vision tower, and layers that read tokens. `image_tokens` and `not_seeing` are
    those of `vision.sizes`.

    With several `ranks`, layers and caches are what one of them holds. Raises ModelError as
    `weights.load_stage` and `weights.load_shard` do.
    """
    if ranks > 1:
        check_none(path)
    model, config = load_lazily(path, parts=True, adapter=adapter)
    card = {"card": card_of(model)["card"] | own_options(path)}
    if ranks > 1:
        sharded(model, 0, ranks, config["model_type"])
    return measure(path, model, config, dissect(model, config["model_type"]), adapter) | card


def card_of(model: nn.Module) -> dict[str, Any]:
    """`card` of `profile`. Scales of quantized weights are no parameters."""
    counts: Counter[str] = Counter()
    for module in {id(one): one for one in model.modules()}.values():
        own = dict(own_arrays(module))
        packed = module.bits if "scales" in own and hasattr(module, "bits") else 0
        for name, value in own.items():
            for array in (one for one in leaves(value) if isinstance(one, mx.array)):
                if packed and name == "weight":
                    mode = getattr(module, "mode", "affine")
                    counts[f"int{packed}" if mode == "affine" else mode] += array.nbytes * 8 // packed
                elif not packed or name not in _SCALES:
                    counts[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return {"card": {"parameters": counts.total(), "precision": max(counts, key=lambda name: counts[name])}}


def measure(
    path: Path, model: nn.Module, config: dict[str, Any], anatomy: Anatomy, adapter: Path | None = None
) -> dict[str, Any]:
    """The profile of a model that is mapped lazily from the folder `path`, as `profile` has it."""
    report = shape_of(model, config, anatomy)
    seeing = tower_sizes(path, config)
    residents = [*_mtp_head(path, model, config, tied=report["tied"]), *seeing.pop("residents")]
    residents += report.pop("residents")
    return report | seeing | {"residents": residents, "digest": digest(path, adapter)}


def shape_of(model: nn.Module, config: dict[str, Any], anatomy: Anatomy) -> dict[str, Any]:
    """The part of a profile that says nothing of a folder."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    handoffs = [
        sum(math.prod(spec.tail) * getattr(mx, spec.dtype).size for spec in boundary.specs)
        for boundary in anatomy.boundaries[1:]
    ]
    return {
        "model_type": anatomy.model_type,
        "layers": len(anatomy.layers),
        "hidden_size": _hidden_size(config, text or {}),
        "vocab_size": anatomy.logits.tail[0],
        "dtype": anatomy.boundaries[0].specs[0].dtype if anatomy.boundaries else anatomy.logits.dtype,
        **_weights(model, anatomy),
        **_caches(model, anatomy),
        "residents": _token_layers(anatomy),
        "max_context": max_context(config | {key: value for key, value in (text or {}).items() if value}),
        "eos_token_ids": _eos(config, text or {}),
        "handoff_bytes_per_token": max(handoffs, default=0),
    }


def _weights(model: nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    per_layer = [
        sum(array.nbytes for module in layer.modules() for array in _arrays(module))
        for layer in anatomy.layers
    ]
    count, before, after, both = len(per_layer), 0, 0, 0
    for module in outer_modules(model, anatomy.layers):
        for key, value in own_arrays(module):
            times = anatomy.uses.get((id(module), key), frozenset())
            size = sum(leaf.nbytes for leaf in leaves(value) if isinstance(leaf, mx.array))
            at_head, at_tail = 0 in times, count in times
            before += size * (at_head and not at_tail)
            after += size * (at_tail and not at_head)
            both += size * (at_head and at_tail)
            for layer in {math.ceil(time) - 1 for time in times if 0 < time < count}:
                per_layer[layer] += size
    tied = both > 0 and before == 0  # a model tied in part only counts the tied part on either side
    return {
        "layer_bytes": per_layer,
        "embed_bytes": before + both,
        "head_bytes": after if tied else after + both,
        "tied": tied,
    }


def _mtp_head(path: Path, model: nn.Module, config: dict[str, Any], *, tied: bool) -> list[dict[str, Any]]:
    if not has_mtp_head(path, config):
        return []
    try:
        head = load_mtp_head(path, model, shares=tied)
    except ModelError as error:
        log.warning("mtp_head_unusable", model=path.name, error=error.message)
        return []
    named = {"name": "mtp", "at": "RING_END_TAIL", "guesses": True, "does": "the model's MTP head guesses"}
    return [named | {"bytes": head.weight_bytes, "bytes_per_token": head.kv_bytes_per_token}]


def _token_layers(anatomy: Anatomy) -> list[dict[str, Any]]:
    """The first layers as a resident of no bytes, where the head has to hold all of them."""
    if not (count := anatomy.head_layers):
        return []
    what = "the model's first layer reads" if count == 1 else f"the model's first {count} layers read"
    on_disk = sum(end - first for table in tables_of(anatomy.layers) for _, first, end in table.ranges)
    what += f" tokens, and rows of a table of {on_disk / 1e9:.1f} GB on disk" if on_disk else " tokens"
    return [{"name": "token_layers", "at": "RING_END_HEAD", "bytes": 0, "layers": count, "does": what}]


def _arrays(module: nn.Module) -> list[mx.array]:
    return [leaf for _, value in own_arrays(module) for leaf in leaves(value) if isinstance(leaf, mx.array)]


def _caches(model: nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    count = len(anatomy.layers)
    bounds: list[int | None] = [None] * count
    short, long = (_filled(model, tokens) for tokens in _LENGTHS)
    for owners, one in zip(anatomy.owners, short, strict=True):
        bounds[owners[0] if owners else 0] = kind_of(one).bound(one)
    growing, fixed = _growth(anatomy, short, long)
    quantized: list[dict[str, Any]] = []
    why = ""
    try:
        for bits in BITS:
            how = cache_quantization(model, anatomy.model_type, bits, short)
            fewer, _ = _growth(anatomy, [how.converted(one) for one in short], map(how.converted, long))
            quantized.append({"bits": bits, "kv_bytes_per_token": fewer})
    except ModelError as error:
        quantized, why = [], error.message
    return {
        "kv_bytes_per_token": growing,
        "kv_max_tokens": bounds,
        "state_bytes": fixed,
        "quantized": quantized,
        "not_quantizable": why,
        "trimmable": runs_of(full_cache(model), 2, anatomy.adapter.steps_alike) > 0,
        "travels": _travels(model),
    }


def _travels(model: nn.Module) -> bool:
    from sealring.node.engine.blocks import layout_of_rows  # loads numpy: not in all processes

    def tried(tokens: int) -> list[Any]:
        cache = full_cache(model)
        for _ in range(tokens):
            model(mx.zeros((1, 1), mx.uint32), cache=cache)
        return cache

    try:
        return not hasattr(model, "pooling") and layout_of_rows(tried, "", "", (), 0) is not None
    except Exception:  # as of a stage: its code does not make a token's caches alone
        return False


def _growth(anatomy: Anatomy, short: Iterable[Any], long: Iterable[Any]) -> tuple[list[int], list[int]]:
    """Bytes per token and bytes whatever the length, per layer, by the caches of the two runs."""
    count = len(anatomy.layers)
    growing, fixed = [0] * count, [0] * count
    for index, (owners, one, two) in enumerate(zip(anatomy.owners, short, long, strict=True)):
        if index in anatomy.idle:
            continue
        layer = owners[0] if owners else 0
        slope = max(0, two.nbytes - one.nbytes) // (_LENGTHS[1] - _LENGTHS[0])
        growing[layer] += slope
        fixed[layer] += max(0, one.nbytes - slope * _LENGTHS[0])
    return growing, fixed


def _filled(model: nn.Module, tokens: int) -> list[Any]:
    """The model's caches after a lazy run; their arrays have shapes but no storage."""
    cache = full_cache(model)
    model(mx.zeros((1, tokens), mx.uint32), cache=cache)
    return cache


def max_context(config: dict[str, Any]) -> int | None:
    """The longest context that the configuration names, in tokens; None if it names none."""
    for key in _CONTEXT_KEYS:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _hidden_size(config: dict[str, Any], text: dict[str, Any]) -> int:
    """The width of the hidden state, under whichever name; 0 if there is none."""
    values = (part.get(key) for part in (config, text) for key in _WIDTH_KEYS)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _eos(config: dict[str, Any], text: dict[str, Any]) -> list[int]:
    found = config.get("eos_token_id", text.get("eos_token_id"))
    values = found if isinstance(found, list) else [found]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def digest(path: Path, adapter: Path | None = None) -> str:
    """SHA-256 in hex over the files of COVERED and INNER, and each weight file's name, size and header. It
    covers all of the model's adapter, or of the one in the folder `adapter`.

    Two folders with one digest hold the same model as far as can be said without reading the weights.
    """
    check_folder(path)
    total = hashlib.sha256()

    def add(name: str, content: bytes) -> None:
        for part in (name.encode(), content):
            total.update(len(part).to_bytes(8, "big") + part)

    inner = sorted(name for name, _ in files_in(path) if "/" in name)
    for name in ("config.json", *sorted(COVERED - {"config.json"}), *inner):
        if (path / name).is_file():
            add(name, (path / name).read_bytes())
    for file in weight_files(path):
        add(file.name, file.stat().st_size.to_bytes(8, "big") + read_header(file))
    if (found := adapter_of(path, adapter)) is not None:
        add("adapter", describe(found))
    return total.hexdigest()


def main() -> int:
    """Prints the profile of the folder named on the command line as `apart.answer` does."""
    forbid_core_files()
    parser = argparse.ArgumentParser(
        prog="python -m sealring.node.engine.profile", description=profile.__doc__
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--adapter", type=Path)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    return answer(lambda: profile(arguments.path, adapter=arguments.adapter))


if __name__ == "__main__":
    sys.exit(main())
