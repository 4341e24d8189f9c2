"""The memory that a vision tower takes, from configuration and headers alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK
from sealring.mesh.system.extras import INSTALL_VISION, vision_installed
from sealring.node.engine.staging.pictured import SHOWN, UNFIT
from sealring.node.engine.staging.text_part import OF_TOWERS
from sealring.node.engine.text.showing import MAX_WAITING_BYTES
from sealring.node.engine.weights import read_config, read_header, weight_files
from sealring.node.models.json_files import read_json

from . import mlx_vlm_import

HIGH_SIDE, LOW_SIDE = 2048, 512
"""Pixels of an image's longer side at most; a larger one is made smaller first. These are what OpenAI's API
documents for high and low `detail`, and they bound what a processor makes of an image."""

DECODER_BYTES = 576 << 20
"""Resident, of the process that decodes: 50 megapixels with transparency take 500 MiB, a screenshot 30."""

PROCESSOR_BYTES = 512 << 20
"""Resident, of the process that prepares pixels: 2,048 x 2,048 take 390 MiB for Qwen's towers."""

MAX_ARRAY_BYTES = 128 << 20
"""The arrays of one image: Qwen's of 2,048 x 2,048 are 100 MB."""

READING_BYTES = DECODER_BYTES + PROCESSOR_BYTES + MAX_WAITING_BYTES
"""What a head takes besides to read images."""

_STATES = 16
"""Arrays of patches x width that a tower's layer and those in flight hold at once: states, queries, keys,
values and products, in four bytes each. An estimate, as CHUNK_STATES of a chunk is."""

_EDGE = 1024
"""Pixels of an edge of the largest image where neither configuration nor processor says more."""

_CONFIGS = ("preprocessor_config.json", "processor_config.json")


def tower_sizes(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """`residents`: the tower in a folder, if it is computed here, as `Resident` of model.proto. Its bytes are
    its weights and what a head takes besides to read images and to compute the largest one; its layers those
    to whose output an image adds rows (DeepStack). `image_tokens` are the tokens of that image, 0 without a
    tower. `not_seeing`: why there is none, of a model that should have one."""
    found: dict[str, Any] = {"residents": [], "image_tokens": 0, "not_seeing": ""}
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not vision:
        return found
    if why := why_blind(config):
        return found | {"not_seeing": why}
    weights = tower_bytes(path)
    if not weights:
        return found | {"not_seeing": "its folder has no weights of the vision tower"}
    tower: dict[str, Any] = {"name": "vision", "at": "RING_END_HEAD"}
    tower["bytes"] = weights + _working_bytes(path, vision) + READING_BYTES
    tower["layers"] = len(vision.get("deepstack_visual_indexes") or ())
    tower["does"] = "the model's vision tower reads images"
    return found | {"residents": [tower], "image_tokens": _image_tokens(path, config, vision)}


def tower_bytes(path: Path) -> int:
    """Bytes of the tensors of a folder's tower and projector, by headers."""
    size = 0
    for file in weight_files(path):
        entries = json.loads(read_header(file))
        for name, entry in entries.items():
            if name != "__metadata__" and OF_TOWERS.search(name) and "audio" not in name:
                first, end = entry["data_offsets"]
                size += end - first
    return size


def lacks_vision(path: Path) -> bool:
    """Whether the model in a folder has a tower that would be computed here if `sealring[vision]` were
    installed."""
    config = read_config(path)
    possible = bool(config.get("vision_config")) and not _unfit(config)
    return possible and not vision_installed() and tower_bytes(path) > 0


def can_see(config: Mapping[str, Any]) -> bool:
    """Whether images of a model of this configuration are computed here, by a tower that is installed."""
    return not why_blind(config)


def why_blind(config: Mapping[str, Any]) -> str:
    """Why images of a model of this configuration are not computed here; empty if they are."""
    if why := _unfit(config):
        return why
    if not mlx_vlm_import.knows(str(config.get("model_type"))):
        return f"what reads them is not installed ({INSTALL_VISION})"
    return ""


def _unfit(config: Mapping[str, Any]) -> str:
    """Why images of such a model are computed nowhere; empty if they are."""
    model_type = str(config.get("model_type"))
    if model_type not in SHOWN:
        return UNFIT.get(
            model_type, f"no tower of {model_type} models was compared with mlx-vlm's whole model"
        )
    return ""


def _working_bytes(path: Path, vision: Mapping[str, Any]) -> int:
    patch = max(1, _number(vision, "patch_size", "spatial_patch_size") or 14)
    width = _number(vision, "hidden_size", "embed_dim", "width") or 1024
    inner = _number(vision, "intermediate_size") or 4 * width
    pixels = largest_image(path, vision)
    patches = pixels // (patch * patch)
    return 4 * (patches * (_STATES * width + 2 * inner) + 2 * 3 * pixels)


def _image_tokens(path: Path, config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Tokens of the largest image, at most MAX_PREFILL_CHUNK, with room for those that separate its rows."""
    text = config.get("text_config")
    names = "mm_tokens_per_image", "vision_soft_tokens_per_image"
    tokens = _number(config, *names) or _number(text if isinstance(text, Mapping) else {}, *names)
    if not tokens:
        patch = max(1, _number(vision, "patch_size", "spatial_patch_size") or 14)
        tokens = largest_image(path, vision) // (patch * _merged(config, vision)) ** 2
    return min(MAX_PREFILL_CHUNK, tokens + tokens // 16 + 16)


def _merged(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Patches of a token, each way."""
    kernel, ratio = vision.get("merge_kernel_size"), vision.get("pixel_shuffle_ratio")
    if isinstance(kernel, list) and kernel and isinstance(kernel[0], int):
        return max(1, kernel[0])
    if isinstance(ratio, float) and 0 < ratio < 1:
        return round(1 / ratio)
    names = "spatial_merge_size", "downsample_factor"
    return _number(vision, *names) or _number(config, *names) or 1


def largest_image(path: Path, vision: Mapping[str, Any]) -> int:
    """Pixels of the largest image that a folder's processor makes."""
    patch = max(1, _number(vision, "patch_size", "spatial_patch_size") or 14)
    edge = _number(vision, "image_size") or _EDGE
    found = [edge * edge]
    for settings in _settings(path):
        size = settings.get("size")
        for part in (settings, size if isinstance(size, Mapping) else {}):
            found.append(_number(part, "max_pixels"))
            longest = _number(part, "longest_edge")  # of Qwen3-VL in pixels of the whole image
            found.append(longest if longest >= 1 << 14 else longest**2)
            found.append(_number(part, "height") * _number(part, "width"))
        found.append(_number(settings, "in_token_limit") * patch * patch)
        tiles = max(_number(settings, "max_patches", "max_crops", "max_tiles"), 0)
        found.append((tiles + 1) * edge * edge if tiles else 0)
    return min(max(found), max(edge, HIGH_SIDE) ** 2)


def _settings(path: Path) -> Iterator[Mapping[str, Any]]:
    for name in _CONFIGS:
        file = path / name
        try:
            if file.is_file():
                settings = read_json(file)
                yield from (
                    one for one in (settings, settings.get("image_processor")) if isinstance(one, Mapping)
                )
        except (OSError, ValueError, AttributeError, RecursionError):
            continue


def _number(settings: Mapping[str, Any], *names: str) -> int:
    """The first of these settings that is a number; 0 if none is."""
    values = (settings.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and 0 < value < 1 << 30), 0)
