"""Loads one stage's weights from a model folder, and finds model folders."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine import device, mlx_lm_import, relaying
from sealring.node.engine.adapters import adapter_of, check_none, tensors_of, tune
from sealring.node.engine.caches import trimmable
from sealring.node.engine.configuration import check_fields, with_parts
from sealring.node.engine.contents import REDOWNLOAD, check_folder
from sealring.node.engine.formats import Format, block_of, foreign, with_blocks
from sealring.node.engine.mapped_table import map_tables
from sealring.node.engine.staging import Shard, Stage, build_skeleton
from sealring.node.engine.staging.anatomy import Anatomy, dissect
from sealring.node.engine.staging.conversions import CONVERSIONS
from sealring.node.engine.staging.mtp_head import (
    MtpHead,
    classes_of_one,
    classes_without,
    format_of,
    has_head,
    no_head,
    one_layer,
)
from sealring.node.engine.staging.pooling import pooled, pooling_of
from sealring.node.engine.staging.quantization import cache_quantization
from sealring.node.engine.staging.skeleton import check_layers, model_classes
from sealring.node.models.json_files import MAX_VALUES, check_json, parse_json, read_json
from sealring.node.models.kept import is_part
from sealring.node.models.manifest import ADAPTER_CONFIG

_HEADER_LIMIT = 32 * 1024 * 1024
_TENSOR_LIMIT = 1 << 18
"""Tensors of one file. A mixture of experts of some hundred billion parameters has fewer in all its files."""


def load_stage(
    path: Path,
    lo: int,
    hi: int,
    *,
    kv_bits: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    parts: bool = False,
    adapter: Path | None = None,
) -> Stage:
    """The layers [lo, hi) of the model in the folder `path`, with embedding, norm and head as they need.

    mlx-lm's `load_model` maps the complete weights lazily, converts and quantizes them, and checks that they
    are exactly the model's parameters. Then the stage is cut out. Its own parameters are read and converted
    one after another, so that only one is in memory twice. No other layer's weights are read from the disk.
    With `kv_bits` (8 or 4) its caches are quantized. `progress` is called with the stage's bytes that are
    read and with all of them, after each large parameter or several small ones. `parts` and `adapter` are as
    in `load_lazily`.

    Raises ModelError for a missing, corrupt or unsupported model, InvalidInput for an impossible range.
    """
    model, config = load_lazily(path, parts=parts, adapter=adapter)
    stage = cut_stage(model, dissect(model, config["model_type"]), lo, hi, kv_bits)
    read_weights(stage, path, progress)
    return stage


def cut_stage(
    model: nn.Module,
    anatomy: Anatomy,
    lo: int,
    hi: int,
    kv_bits: int = 0,
    cut: type[Stage] = Stage,
) -> Stage:
    """The stage of a model that is mapped lazily and that it takes over, before `read_weights`.

    Raises ModelError (KV_BITS_UNSUPPORTED, ARCHITECTURE_NOT_STAGEABLE), InvalidInput.
    """
    quantization = cache_quantization(model, anatomy.model_type, kv_bits) if kv_bits else None
    return cut(model, anatomy, lo, hi, quantization=quantization)


def read_weights(stage: Stage, path: Path, progress: Callable[[int, int], None]) -> None:
    """Reads and converts what a stage keeps, with what computes its prompts, and lays it out as the device
    wants it.

    Raises ModelError (WEIGHTS_CORRUPT).
    """
    stages = [stage] if stage.prefill is stage else [stage.prefill, stage]
    for one in stages:
        _fill(one, path, progress)
    if relaying.pays():
        relaying.relay(*stages)


def load_shard(
    path: Path,
    rank: int,
    ranks: int,
    *,
    kv_bits: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Shard:
    """The part of every layer that one of `ranks` ranks computes; otherwise as `load_stage`.

    Each parameter is read whole and cut, one after another. Raises ModelError (also NOT_SHARDABLE).
    """
    check_none(path)
    model, config = load_lazily(path)
    shard = Shard(model, rank, ranks, config["model_type"], kv_bits)
    del model
    _fill(shard, path, progress)
    return shard


def _fill(stage: Stage, path: Path, progress: Callable[[int, int], None]) -> None:
    try:
        _read(stage, progress)
    except (RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _read(stage: Stage, progress: Callable[[int, int], None]) -> None:
    whole, done, most = max(1, stage.weight_bytes), 0, device.read_bytes()
    block: list[mx.array] = []
    for array in stage.kept:
        block.append(array)
        if sum(one.nbytes for one in block) >= most or array is stage.kept[-1]:
            mx.eval(block)
            done += sum(one.nbytes for one in block)
            block.clear()
            progress(done, whole)
    mx.clear_cache()  # of what conversions needed; its limit bounds it meanwhile


def load_lazily(
    path: Path, *, parts: bool = False, adapter: Path | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """The whole model with lazily mapped weights, and its configuration. No weight is read. It is tuned by
    the adapter in the folder `adapter`, or by the one in its own folder, if there is any.

    A folder that holds only parts of it is refused (MODEL_PART_MISSING) unless the caller, by `parts`, knows
    which it reads: the others are zeros.
    """
    config = read_config(path)
    if not parts and is_part(path):
        raise ModelError(
            f"the folder {path.name} holds only a part of the model",
            hint="fetch the rest: sealring model pull",
            reason="MODEL_PART_MISSING",
        )
    form = check_format(path, config)
    pooling = pooling_of(path, config)
    classes = classes_without(config, *model_classes(config))
    if (converts := CONVERSIONS.get(config["model_type"])) is not None:
        classes = converts(classes[0]), classes[1]
    classes = with_blocks(classes, block_of(path, config))
    if pooling is not None:
        classes = pooled(classes, pooling)
    check_layers(config)
    try:
        model, loaded = mlx_lm_import.import_utils().load_model(
            path, lazy=True, strict=True, get_model_classes=lambda config: classes
        )
        _check_scaled(model)
    except Exception as error:  # sanitize functions may raise anything on weights that they don't know
        build_skeleton(config)  # raises if the configuration is what is wrong
        if form is not None:
            raise form.refused(path.name, config["model_type"], _first_words(error)) from error
        raise ModelError(
            f"the weights of {path.name} do not fit its configuration: {_first_words(error)}",
            reason="WEIGHTS_MISMATCH",
            hint=REDOWNLOAD,
        ) from error
    map_tables(model, {file: read_header(file) for file in weight_files(path)})
    if (found := adapter_of(path, adapter)) is not None:
        read_header(tensors_of(found))
        tune(model, found)
    return model, loaded


def _check_scaled(model: nn.Module) -> None:
    """Raises ValueError for 8-bit floats without scales: MLX reads them as bytes, and computes with these."""
    for name, module in model.named_modules():
        weight = module.get("weight")
        bare = isinstance(weight, mx.array) and not {"scales", "weight_scale"} & module.keys()
        if bare and weight.dtype == mx.uint8:
            raise ValueError(f"{name} has no scale")


def check_format(path: Path, config: dict[str, Any]) -> Format | None:
    """Another tool's format of a folder's weights, by its configuration and the headers of its files; None if
    it is mlx-lm's.

    Raises ModelError: MODEL_FORMAT_UNSUPPORTED for a format that is read for no architecture.
    """
    headers = (json.loads(read_header(file)) for file in weight_files(path))
    entries = (entry for header in headers for entry in header.items() if entry[0] != "__metadata__")
    form = foreign(path, config, {name: str(entry.get("dtype")) for name, entry in entries})
    if form is not None and form.never:
        raise form.refused(path.name, str(config.get("model_type")))
    return form


def read_config(path: Path) -> dict[str, Any]:
    """The model folder's config.json, as mlx-lm reads it (with generation_config.json's end tokens).

    The part of the text model is `text_config`, whatever it is called there.
    """
    file = path / "config.json"
    check_folder(path)
    if not file.is_file():
        raise ModelError(
            f"{path.name or path} has no config.json",
            reason="CONFIG_MISSING",
            hint="a model folder holds config.json, safetensors files and a tokenizer"
            if not (path / ADAPTER_CONFIG).is_file()
            else "it holds an adapter: serve the model that it is of, with --adapter",
        )
    try:
        for one in (file, path / "generation_config.json"):
            if one.is_file():
                check_json(one)
        config = mlx_lm_import.import_utils().load_config(path)
        if not isinstance(config, dict):
            raise ValueError
    except (ValueError, AttributeError, RecursionError) as error:
        beside = " or generation_config.json" if (path / "generation_config.json").is_file() else ""
        raise ModelError(
            f"config.json{beside} of {path.name or path} is not a JSON object",
            reason="BAD_MODEL_CONFIG",
            hint=REDOWNLOAD,
        ) from error
    check_fields(path.name, config)
    return with_parts(config)


def weight_files(path: Path) -> list[Path]:
    """The folder's weight files, in order of name, complete by its index if it has one."""
    check_folder(path)
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ModelError(
            f"{path.name} has no model*.safetensors",
            reason="WEIGHTS_MISSING",
            hint="convert the model with mlx_lm.convert, or download it again",
        )
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = {str(name) for name in read_json(index)["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"{index.name} of {path.name} is unusable", reason="WEIGHTS_CORRUPT", hint=REDOWNLOAD
            ) from error
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise ModelError(
                f"{path.name} lacks {len(missing)} of its weight files, {missing[0]} first",
                reason="WEIGHTS_MISSING",
                hint=REDOWNLOAD,
            )
    return files


def read_header(file: Path) -> bytes:
    """The header of a safetensors file, after checking that the file is as long as the header says.

    The format: 8 bytes length (little endian), JSON, data; see github.com/huggingface/safetensors.
    """

    def corrupt(why: str) -> ModelError:
        return ModelError(f"{file.name} is {why}", reason="WEIGHTS_CORRUPT", hint=REDOWNLOAD)

    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise corrupt("truncated")
        (length,) = struct.unpack("<Q", prefix)
        if length > _HEADER_LIMIT:
            raise corrupt("not a safetensors file")
        header = stream.read(length)
    if len(header) < length:
        raise corrupt("truncated")
    try:
        entries = parse_json(header, MAX_VALUES)
        if len(entries) > _TENSOR_LIMIT:
            raise corrupt("of more tensors than a model has")
        end = max(
            (entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise corrupt("not a safetensors file") from None
    if not isinstance(end, int) or 8 + length + end != size:
        raise corrupt("truncated" if isinstance(end, int) and 8 + length + end > size else "damaged")
    return header


def load_mtp_head(path: Path, whole: nn.Module, *, shares: bool) -> MtpHead:
    """The MTP head of the model in the folder `path`, with lazy weights; arguments as `MtpHead` has them.

    Raises ModelError: NO_MTP_HEAD for a folder that has none, WEIGHTS_MISMATCH for one that lacks a part of
    it.
    """
    whole_config = read_config(path)
    if not has_mtp_head(path, whole_config):
        raise no_head(whole_config["model_type"])
    classes = model_classes(whole_config)
    classes = with_blocks(classes_of_one(whole_config, *classes), block_of(path, whole_config))
    try:
        model, _ = mlx_lm_import.import_utils().load_model(
            path,
            lazy=True,
            strict=True,
            model_config=one_layer(whole_config),
            get_model_classes=lambda config: classes,
        )
        head = MtpHead(model, whole, shares=shares)
        if not trimmable(head.make_cache()):
            raise ValueError("its caches cannot be cut")
        return head
    except Exception as error:  # sanitize functions may raise anything on weights that they don't know
        raise ModelError(
            f"the MTP head of {path.name} does not fit its configuration: {_first_words(error)}",
            reason="WEIGHTS_MISMATCH",
            hint=REDOWNLOAD,
        ) from error


def has_mtp_head(path: Path, config: dict[str, Any]) -> bool:
    """Whether the folder has weights of an MTP head, by the headers of its files."""
    names = (json.loads(read_header(file)) for file in weight_files(path))
    return format_of(config) is not None and any(has_head(config, set(found)) for found in names)


def read_arrays(path: Path, arrays: Sequence[mx.array]) -> None:
    """Reads and converts arrays that are mapped lazily. Raises ModelError (WEIGHTS_CORRUPT)."""
    try:
        for array in arrays:
            mx.eval(array)
    except (RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(
        f"the weights of {path.name} could not be read: {_first_words(error)}",
        reason="WEIGHTS_CORRUPT",
        hint=REDOWNLOAD,
    )


def _first_words(error: Exception) -> str:
    """An error's words, with the name of its class if Python made it: they may be a key alone."""
    named = "" if isinstance(error, ValueError | RuntimeError) else f"{type(error).__name__} "
    return named + " ".join(str(error).split())[:200]
