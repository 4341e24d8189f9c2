"""Image files become rows: what a family's processor prepares, its tower takes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hostileimages import picture, saved
from visionmodels import FAMILIES, write_folder

from sealring.node.engine import random_whole, save
from sealring.node.engine.configuration import with_parts
from sealring.node.engine.text import Picture
from sealring.node.engine.vision.tower import load_tower
from sealring.node.engine.vision.viewing import Viewer
from sealring.v1 import inference_pb2 as inference

TINY: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "archs-images.json").read_bytes()
)
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3": {"patch_size": 14, "image_size": 112},
    "mistral3": {"patch_size": 14, "image_size": 1540},
    "pixtral": {"patch_size": 16, "image_size": 1024},
    "kimi_vl": {"patch_size": 14},
    "llama4": {"patch_size": 14, "image_size": 336},
    "gemma4": {"patch_size": 16, "pooling_kernel_size": 3, "default_output_length": 70},
    "lfm2-vl": {"patch_size": 16, "num_patches": 256},
    "gemma4_unified": {"patch_size": 16, "model_patch_size": 48, "num_soft_tokens": 70},
    "aya_vision": {"patch_size": 14, "image_size": 112},
    "dots_ocr": {"patch_size": 14},
    "glm4v": {"patch_size": 14, "image_size": 112},
    "glm4v_moe": {"patch_size": 14, "image_size": 112},
    "glm_ocr": {"patch_size": 14, "image_size": 112},
    "idefics2": {"patch_size": 14, "image_size": 224},
    "internvl": {"patch_size": [14, 14], "image_size": [112, 112]},
    "llava_onevision": {"patch_size": 14, "image_size": 112},
    "mage_vl": {"patch_size": 16},
    "mimo_v2": {"patch_size": 16, "spatial_patch_size": 16},
    "nemotron_h_nano_omni": {"patch_size": 16, "image_size": 256, "max_resolution": 512},
    "paddleocr_vl": {"patch_size": 14, "image_size": 112},
    "qwen3_omni_moe": {"patch_size": 16, "spatial_patch_size": 16},
    "step3p7": {"patch_size": 14, "image_size": 728},
    "idefics3": {"patch_size": 16, "image_size": 64},
    "internvl_chat": {"patch_size": 14, "image_size": 112},
    "kimi_k3": {"patch_size": 14},
    "llava": {"patch_size": 14, "image_size": 112},
    "minimax_m3_vl": {"patch_size": 14},
    "muse_glimmer": {"patch_size": 14},
    "qwen2_vl": {"patch_size": 14, "spatial_patch_size": 14},
    "qwen2_5_vl": {"patch_size": 14, "spatial_patch_size": 14, "window_size": 112},
    "qwen3_vl": {"patch_size": 16, "spatial_patch_size": 16},
    "qwen3_5": {"patch_size": 16, "spatial_patch_size": 16},
    "smolvlm": {"patch_size": 16, "image_size": 64},
}
"""What makes the towers of the checks take what published processors make."""


@pytest.mark.parametrize(
    "name", [one if one == "mistral3" else pytest.param(one, marks=pytest.mark.sweep) for one in PUBLISHED]
)
def test_a_tower_makes_as_many_rows_as_the_processor_says(tmp_path: Path, name: str) -> None:
    family, tiny = FAMILIES[name], TINY[name]["config"]
    names = {"image_token_id", "image_token_index", "media_placeholder_token_id"}
    config = {key: value for key, value in tiny.items() if key not in names} | family.config
    inner = config.get("thinker_config", config)
    inner["vision_config"] = tiny.get("thinker_config", tiny)["vision_config"] | PUBLISHED[name]
    inner[family.row_name] = family.row_number
    if name == "gemma3":
        config["text_config"] = tiny["text_config"] | {"mm_tokens_per_image": 16}
    folder = write_folder(tmp_path / "model", name, config)
    save(random_whole(config, 0), config, folder, {})
    viewer = Viewer(folder, family.numbers)
    try:
        viewer.placeholder = next(one for one in viewer.placeholders if one in family.image)
        image = inference.Image(data=saved(picture(220, 150), "PNG"))
        with contextlib.closing(viewer.read([inference.ChatMessage(images=[image])])) as reading:
            list(reading.add_all())
            (shape, digest, source) = reading.seen[0]
            arrays = source.take()
    finally:
        viewer.close()
    parts = with_parts(config)
    width: int = parts.get("text_config", parts)["hidden_size"]
    tower = load_tower(folder, width, mx.float32)
    assert tower is not None
    rows = tower.rows(Picture.of(0, shape.rows, np.arange(shape.rows), digest, arrays))
    assert rows.embeddings.shape == (shape.rows, width)
    assert np.isfinite(np.array(rows.embeddings)).all()
