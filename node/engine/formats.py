"""Formats of weights that other tools write: what they are called, and 8-bit floats with a scale per block.

A format is known by `quantization_config`, and without that by the names and dtypes of tensors. mlx-lm reads
some of them for some architectures. What it does not read is refused by the format's own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from sealring.mesh.errors import ModelError
from sealring.node.models.json_files import read_json

BLOCK_SCALE = "_scale_inv"
"""What the scales of blocks are called, behind the name of their weight."""

_HF_QUANT = "hf_quant_config.json"
"""The settings of ModelOpt, beside a config.json that has none."""

_INT4, _INT8, _FP8, _NVFP4 = "--q-bits 4", "--q-bits 8", "--q-mode mxfp8", "--q-mode nvfp4"


@dataclass(frozen=True)
class Format:
    """A format of another tool."""

    name: str
    convert: str
    """Options of `mlx_lm.convert -q` that come closest."""
    never: bool = False
    """Whether mlx-lm's loader would take it for something else, or has no code for it at all."""

    def refused(self, folder: str, model_type: str, why: str = "") -> ModelError:
        """The error for a folder in this format; `why` are mlx-lm's words."""
        name = "".join(letter for letter in self.name[:80] if letter.isprintable())  # folders are anybody's
        return ModelError(
            f"the weights of {folder} are in the format {name}, which is not read for {model_type}"
            + (f": {why}" if why else ""),
            reason="MODEL_FORMAT_UNSUPPORTED",
            hint="convert the model as its publisher first released it: "
            f"mlx_lm.convert -q {self.convert} --hf-path MODEL; or choose a conversion for MLX",
            format=name,
        )


def foreign(path: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> Format | None:
    """The format of a folder's weights; None if mlx-lm wrote them, or if they are not quantized.

    `dtypes` are those of the tensors by name, as the headers of the files have them.
    """
    if config.get("quantization") is not None:
        return None
    settings = settings_of(path, config)
    if settings is None:
        return _by_tensors(dtypes)
    named = settings.get("quant_method") or ("modelopt" if "quantization" in settings else "")
    method = named if isinstance(named, str) else ""
    if made := _BY_METHOD.get(method):
        return made(settings)
    return Format(method[:40] or "of an unknown quantization", _INT4, never=method not in _OF_MLX)


def settings_of(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A configuration's settings of another tool's quantization, wherever mlx-lm finds them. Settings that
    are no object name no method."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if found := part.get("quantization_config"):
            return found if isinstance(found, Mapping) else {"quant_method": ""}
    try:
        found = read_json(path / _HF_QUANT)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, Mapping) else None


def block_of(path: Path, config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block of 8-bit floats that has one scale; None for any other format, and for
    blocks that mlx-lm keeps packed (mxfp8)."""
    found = settings_of(path, config) or {}
    block = found.get("weight_block_size")
    if found.get("quant_method") != "fp8" or found.get("fmt", "e4m3") != "e4m3":
        return None
    if found.get("scale_fmt") == "ue8m0" and block == [32, 32]:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return sizes[0], sizes[1]


def with_blocks(classes: tuple[Any, Any], block: tuple[int, int] | None) -> tuple[Any, Any]:
    """mlx-lm's classes of an architecture, which take weights in blocks of 8-bit floats, if they are."""
    return classes if block is None else (_taking(classes[0], block), classes[1])


def _taking(model: Any, block: tuple[int, int]) -> Any:
    class Whole(model):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            made = dict(weights)
            for name, scales in weights.items():
                of = name.removesuffix(BLOCK_SCALE)
                if of in weights and of != name and mx.issubdtype(scales.dtype, mx.floating):
                    made[of] = from_blocks(made[of], made.pop(name), block)
            own = getattr(super(), "sanitize", None)
            return own(made) if own is not None else made

    return Whole


def from_blocks(weight: mx.array, scales: mx.array, block: tuple[int, int]) -> mx.array:
    """Weights of 8-bit floats (e4m3, uint8 [m, n]) times the scale of their block, bfloat16 [m, n].

    Each product is rounded once, as in the library that trained the model and in mlx-lm's classes that read
    such blocks. `scales` has one number for each block, those at the edges included. Raises ValueError.
    """
    m, n = weight.shape
    rows, columns = min(block[0], max(m, 1)), min(block[1], max(n, 1))  # of larger blocks there is no more
    if weight.dtype != mx.uint8 or scales.shape != (-(-m // rows), -(-n // columns)):
        raise ValueError(
            f"scales {scales.shape} do not fit weights {weight.shape} in blocks of {rows}x{columns}"
        )
    floats = mx.pad(mx.from_fp8(weight, dtype=mx.float32), [(0, -m % rows), (0, -n % columns)])
    tiles = floats.reshape(scales.shape[0], rows, scales.shape[1], columns)
    scaled = (tiles * scales.astype(mx.float32)[:, None, :, None]).astype(mx.bfloat16)
    return scaled.reshape(floats.shape)[:m, :n]


def _gptq(settings: Mapping[str, Any]) -> Format:
    return Format(f"GPTQ of {settings.get('bits', 4)} bits", _bits(settings), never=True)


def _awq(settings: Mapping[str, Any]) -> Format:
    version = str(settings.get("version", "gemm")).lower()[:20]
    return Format(f"AWQ {version} of {settings.get('bits', 4)} bits", _INT4, never=version != "gemm")


def _compressed(settings: Mapping[str, Any]) -> Format:
    form = str(settings.get("format"))[:40]
    groups = settings.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    found = first.get("weights") if isinstance(first, Mapping) else None
    kind: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    bits = kind.get("num_bits", 4)
    if "nvfp4" in form or "mxfp4" in form:
        return Format(f"compressed-tensors {form}", _NVFP4 if "nvfp4" in form else "--q-mode mxfp4")
    if form == "pack-quantized":  # mlx-lm's classes take 8 for the zero point
        never = bits != 4 or kind.get("symmetric") is False
        return Format(f"compressed-tensors int{bits} ({form})", _bits({"bits": bits}), never=never)
    return Format(f"compressed-tensors {form}", _FP8 if "float" in form else _INT8, never=True)


def _modelopt(settings: Mapping[str, Any]) -> Format:
    inner = settings.get("quantization")
    algorithm = str((inner if isinstance(inner, Mapping) else settings).get("quant_algo"))[:20]
    return Format(f"ModelOpt {algorithm}", _NVFP4 if algorithm == "NVFP4" else _FP8)


def _fp8(settings: Mapping[str, Any]) -> Format:
    block, kind = settings.get("weight_block_size"), str(settings.get("fmt", "e4m3"))[:10]
    how = f" in blocks of {'x'.join(map(str, block))}" if isinstance(block, list) and len(block) < 4 else ""
    return Format(f"fp8 ({kind}){how}", _FP8, never=kind != "e4m3")


def _bitsandbytes(settings: Mapping[str, Any]) -> Format:
    bits = 8 if settings.get("load_in_8bit") else 4
    return Format(f"bitsandbytes of {bits} bits", _bits({"bits": bits}), never=True)


def _bits(settings: Mapping[str, Any]) -> str:
    return _INT8 if settings.get("bits") == 8 else _INT4


_BY_METHOD = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
_OF_MLX = frozenset({"bitnet", "mxfp4", "mxfp8"})
"""Other methods that mlx-lm has code for."""

_BY_TENSORS = (
    (".g_idx", Format("GPTQ", _INT4, never=True)),
    (".qweight", Format("AWQ or GPTQ", _INT4, never=True)),
    (".weight_packed", Format("compressed-tensors", _INT4)),
    (".weight_scale_2", Format("ModelOpt NVFP4", _NVFP4)),
    (".absmax", Format("bitsandbytes", _INT4, never=True)),
    (".SCB", Format("bitsandbytes of 8 bits", _INT8, never=True)),
)
"""By the end of a tensor's name, where no configuration says anything."""


def _by_tensors(dtypes: Mapping[str, str]) -> Format | None:
    for end, found in _BY_TENSORS:
        if any(name.endswith(end) for name in dtypes):
            return found
    eights = next((dtype for dtype in dtypes.values() if dtype.startswith("F8_E")), None)
    return Format(f"fp8 ({eights.removeprefix('F8_').lower()})", _FP8) if eights is not None else None
