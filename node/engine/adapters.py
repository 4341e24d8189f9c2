"""Adapters (LoRA, DoRA), by which a model was tuned: put on the mapped model, and merged into no weight.

mlx-lm's `lora` and PEFT write them. An adapter lies in a folder of its own, or in the model's. It is put on
before the model is cut, so that each stage has its part. mlx-lm's classes compute with it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from sealring.mesh.errors import ModelError
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.contents import check_folder
from sealring.node.models.json_files import read_json
from sealring.node.models.manifest import ADAPTER_CONFIG, ADAPTERS

MAX_BYTES = 8 << 30
"""The digest covers all of an adapter's tensors. LoRA of a large model has a tenth of these bytes."""

_MLX, _PEFT = ADAPTERS
_OF_ONE = re.compile(
    r"(adapter|lora|pytorch_lora).*\.(safetensors|npz|bin|pt|pth)|\d+_adapters\.safetensors|adapter_config\.json"
    r"|(new_embeddings|non_lora_trainables|trainable_params)\.\w+"
)
"""Files by which a folder holds an adapter, read or not."""

_BESIDE = re.compile(r"\d+_adapters\.safetensors|adapters\.npz|adapter_model\.bin|adapter_config\.json")
"""What may stand beside an adapter's tensors: earlier ones, and the same ones in older formats."""

_PEFT_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_PEFT_PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # others change the model's own weights
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
"""Settings of PEFT, and the values with which it computes what mlx-lm's LoRA computes: of all that neither is
read here nor matters to training alone, those that say nothing."""

_PEFT_READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "base_model_name_or_path", "revision", "auto_mapping", "peft_version"}
    | {"task_type", "inference_mode", "target_modules", "exclude_modules", "lora_dropout", "eva_config"}
    | {"layers_to_transform", "layers_pattern", "loftq_config", "megatron_core", "qalora_group_size"}
    | {"runtime_config"}
)


def adapter_of(path: Path, named: Path | None = None) -> Path | None:
    """The folder of the adapter with which the model at `path` is served: the one that is named, or else the
    model's own if an adapter lies in it. Raises ModelError (ADAPTER_UNSUPPORTED) if there are both."""
    own = path if _files_of_one(path) else None
    if named is not None and own is not None and named != own:
        raise _unsupported(named, f"the folder {path.name} holds another one", "move that one out of it")
    return named or own


def describe(adapter: Path) -> bytes:
    """SHA-256 over an adapter's configuration and tensors. Raises ModelError as `tune`."""
    file = tensors_of(adapter)  # which looks at sizes and kinds before anything is opened
    total = hashlib.sha256(hashlib.sha256((adapter / ADAPTER_CONFIG).read_bytes()).digest())
    with file.open("rb") as stream:
        total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.digest()


def check_none(path: Path) -> None:
    """Raises ModelError (NOT_SHARDABLE) for a model with an adapter: no rank computes a part of it."""
    if adapter_of(path) is not None:
        raise ModelError(
            f"the model {path.name} has an adapter, which cannot be divided among ranks",
            reason="NOT_SHARDABLE",
            hint="serve it in stages, or fuse it: mlx_lm.fuse",
        )


def tune(model: nn.Module, adapter: Path) -> None:
    """Puts an adapter on a model that is mapped lazily. Nothing of it is read.

    Raises ModelError: ADAPTER_UNSUPPORTED for what is no adapter that is served, ADAPTER_MISMATCH for one of
    another model.
    """
    file = tensors_of(adapter)
    config = _configuration(adapter)
    kind = "lora" if file.name == _PEFT else config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora", "full"):
        raise _unsupported(adapter, f"its fine_tune_type is {str(kind)[:40]!r}")
    try:
        arrays: dict[str, mx.array] = dict(mx.load(str(file)))  # type: ignore[arg-type]
        if not arrays:
            raise _unsupported(adapter, f"{file.name} has no tensors, and would change nothing")
        if file.name == _PEFT:
            arrays, scale = _from_peft(adapter, arrays, config), _peft_scale(config)
        elif kind != "full":
            if not isinstance(config.get("lora_parameters"), dict):  # as mlx-vlm writes it
                raise _unsupported(
                    adapter, f"its {ADAPTER_CONFIG} has no lora_parameters, as mlx_lm.lora's has"
                )
            scale = float(config["lora_parameters"]["scale"])
        if kind != "full":
            if not math.isfinite(scale):
                raise ValueError(f"its scale is {scale}")
            _replace(model, arrays, scale, ("lora_b", "m") if kind == "dora" else ("lora_b",))
        present = {name: array.shape for name, array in tree_flatten(model.parameters())}
        wrong = next((name for name, array in arrays.items() if present.get(name) != array.shape), None)
        if wrong is not None:
            raise ValueError(f"the model has no {wrong} of shape {arrays[wrong].shape}")
        model.load_weights(list(arrays.items()), strict=False)
        model.eval()
    except ModelError:
        raise
    except Exception as error:  # of mlx-lm's classes and mlx, on tensors that they do not expect
        raise ModelError(
            f"the adapter {adapter.name} does not fit the model: {' '.join(str(error).split())[:200]}",
            reason="ADAPTER_MISMATCH",
            hint="name the model that the adapter was trained for",
        ) from error


def tensors_of(adapter: Path) -> Path:
    """The file with an adapter's tensors. Raises ModelError (ADAPTER_UNSUPPORTED)."""
    check_folder(adapter)
    files = _files_of_one(adapter)
    named = [name for name in files if name in ADAPTERS]
    if not named:
        raise _unsupported(
            adapter, f"it has neither of {' and '.join(ADAPTERS)}, but {', '.join(files)[:80]}"
        )
    found = adapter / named[0]
    if more := [name for name in files if name != found.name and not _BESIDE.fullmatch(name)]:
        raise _unsupported(
            adapter, f"it has {more[0][:80]} beside {found.name}, which may change answers too"
        )
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise _unsupported(adapter, f"{found.name} has no {ADAPTER_CONFIG} beside it")
    if found.stat().st_size > MAX_BYTES:
        raise _unsupported(
            adapter, f"{found.name} has more than {MAX_BYTES >> 30} GiB", "fuse it: mlx_lm.fuse"
        )
    return found


def _files_of_one(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if _OF_ONE.fullmatch(name))
    except OSError:
        return []


def _configuration(adapter: Path) -> dict[str, Any]:
    try:
        found = read_json(adapter / ADAPTER_CONFIG)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _unsupported(adapter, f"its {ADAPTER_CONFIG} is not a JSON object")
    return found


def _replace(model: nn.Module, arrays: Mapping[str, mx.array], scale: float, beside: tuple[str, ...]) -> None:
    """Replaces each module that has tensors in the adapter by mlx-lm's, as `linear_to_lora_layers` does.
    `beside` are those that `lora_a` needs: mlx-lm's own would change nothing."""
    made = {}
    for name, module in model.named_modules():
        low = arrays.get(f"{name}.lora_a")
        if low is None:
            continue
        if lacks := [part for part in beside if f"{name}.{part}" not in arrays]:
            raise ValueError(f"it has no {name}.{lacks[0]}")
        stacked = low.ndim == 3  # [experts, rank, inputs]
        kind = _kind(module, dora=f"{name}.m" in arrays)
        rank = low.shape[1] if stacked else low.shape[-1]
        made[name] = kind(r=rank, scale=scale, dropout=0.0)
    model.update_modules(tree_unflatten(list(made.items())))


def _kind(module: Any, *, dora: bool) -> Any:
    """Makes a layer with an adapter of the plain one; the class is chosen as mlx-lm chooses it."""
    for package in ("mlx_lm", "mlx_lm.tuner"):
        mlx_lm_import.register(package)  # whose own `__init__` brings the training
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.tuner.dora import DoRAEmbedding, DoRALinear
    from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear, LoRASwitchLinear

    if not dora and hasattr(module, "to_lora"):
        return module.to_lora
    kinds = (
        ((nn.Linear, nn.QuantizedLinear), DoRALinear if dora else LoRALinear),
        ((SwitchLinear, QuantizedSwitchLinear), None if dora else LoRASwitchLinear),
        ((nn.Embedding, nn.QuantizedEmbedding), DoRAEmbedding if dora else LoRAEmbedding),
    )
    chosen = next((made for of, made in kinds if isinstance(module, of)), None)
    if chosen is None:
        raise ValueError(f"mlx-lm has no adapter for a {type(module).__name__}")
    return lambda **options: chosen.from_base(module, **options)


def _from_peft(
    adapter: Path, arrays: Mapping[str, mx.array], config: Mapping[str, Any]
) -> dict[str, mx.array]:
    """PEFT's matrices by mlx-lm's names, transposed: A [rank, inputs] and B [outputs, rank]."""
    for name, value in config.items():
        if name not in _PEFT_READ and value not in _PEFT_PLAIN.get(name, _NOTHING):
            raise _unsupported(adapter, f"PEFT with {name[:40]} {str(value)[:40]!r} is not served")
    found = {}
    for name, array in arrays.items():
        match = _PEFT_NAME.fullmatch(name)
        if match is None or array.ndim != 2:
            raise _unsupported(adapter, f"PEFT's {name[:120]} is no part of a LoRA")
        if array.shape[match[2] == "B"] != config["r"]:
            raise ValueError(f"{name} has another rank than {str(config['r'])[:40]}")
        found[f"{match[1]}.lora_{match[2].lower()}"] = array.T
    return found


def _peft_scale(config: Mapping[str, Any]) -> float:
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _unsupported(adapter: Path, why: str, hint: str = "") -> ModelError:
    return ModelError(
        f"the adapter {adapter.name} is not served: {why}",
        reason="ADAPTER_UNSUPPORTED",
        hint=hint or "give a folder that mlx_lm.lora wrote, or fuse it into the model: mlx_lm.fuse",
    )
