"""Towers of folders: their weights, what they are quantized like, and what a head needs for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sealring.node.engine import load_lazily, needed, prompts, random_whole, read_header, save
from sealring.node.engine.profile import profile
from sealring.node.engine.staging.pictured import UNFIT
from sealring.node.engine.staging.splicing import embedded
from sealring.node.engine.vision.sizes import can_see, largest_image, tower_bytes, why_blind
from sealring.node.engine.vision.tower import Tower, load_tower

FAMILY: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "archs-images.json").read_bytes())[
    "gemma3"
]
PICTURE = prompts(300, FAMILY["token"], FAMILY["images"], 0)[0].pictures[0]


def saved(folder: Path) -> Path:
    save(random_whole(FAMILY["config"], 1), FAMILY["config"], folder, {})
    return folder


def tower_of(folder: Path) -> Tower:
    found = load_tower(folder, *embedded(load_lazily(folder)[0]))
    assert found is not None
    return found


def quantize(folder: Path, chosen: str) -> None:
    """Packs the matrices whose names begin so, as mlx-vlm's conversion does."""
    config = json.loads((folder / "config.json").read_bytes())
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    made = {}
    for name, array in weights.items():
        if name.startswith(chosen) and name.endswith("_proj.weight"):
            part = name.removesuffix(".weight")
            packed = mx.quantize(array, 32, 4)
            made |= dict(zip((name, f"{part}.scales", f"{part}.biases"), packed, strict=True))
        else:
            made[name] = mx.array(array)
    mx.eval(made)
    mx.save_safetensors(str(folder / "model.safetensors"), made)
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}}))


def test_a_tower_has_its_weights_and_the_profile_counts_them(tmp_path: Path) -> None:
    tower = tower_of(saved(tmp_path))
    found = profile(tmp_path)
    (resident,) = found["residents"]
    assert (resident["name"], resident["at"]) == ("vision", "RING_END_HEAD")
    assert tower_bytes(tmp_path) == tower.weight_bytes > 0
    assert resident["bytes"] > tower.weight_bytes + PICTURE.source.nbytes
    assert len(PICTURE.places) + 2 <= found["image_tokens"] <= 2 * len(PICTURE.places) + 16
    assert tower.rows(PICTURE).embeddings.shape == (len(PICTURE.places), tower.width)


def test_a_folder_without_a_towers_weights_has_none(tmp_path: Path) -> None:
    saved(tmp_path)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    assert isinstance(weights, dict)
    text = {name: mx.array(array) for name, array in weights.items() if name.startswith("language_model")}
    mx.eval(text)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), text)
    assert load_tower(tmp_path, 128, mx.float32) is None
    assert not profile(tmp_path)["residents"]


@pytest.mark.parametrize("chosen", ["language_model", "vision_tower", ""])
def test_what_is_quantized_in_a_folder_is_computed_so(tmp_path: Path, chosen: str) -> None:
    plain = tower_of(saved(tmp_path)).rows(PICTURE).embeddings
    mx.eval(plain)
    quantize(tmp_path, chosen)
    tower = tower_of(tmp_path)
    rows = tower.rows(PICTURE).embeddings
    assert np.isfinite(np.array(rows)).all()
    assert mx.array_equal(plain, rows).item() == (chosen == "language_model")
    assert tower_bytes(tmp_path) == tower.weight_bytes


def test_only_the_head_needs_the_towers_bytes_of_the_files(tmp_path: Path) -> None:
    saved(tmp_path)
    head, tail = needed(tmp_path, 0, 2), needed(tmp_path, 2, 6)
    raw = read_header(tmp_path / "model.safetensors")
    start, header = 8 + len(raw), json.loads(raw)
    own = [one["data_offsets"] for name, one in header.items() if name.startswith("vision_tower")]
    assert all(any(first <= start + a and start + b <= end for _, first, end in head) for a, b in own)
    assert not any(any(first < start + b and start + a < end for _, first, end in tail) for a, b in own)


@pytest.mark.parametrize(
    ("settings", "pixels"),
    [
        ({}, 896 * 896),
        ({"max_pixels": 2 << 20}, 2 << 20),
        ({"size": {"longest_edge": 1540}}, 1540 * 1540),
        ({"max_pixels": 1 << 28}, 2048 * 2048),
        ({"image_processor": {"in_token_limit": 4096}}, 4096 * 14 * 14),
        ({"max_patches": 3}, 4 * 896 * 896),
        ("no object", 896 * 896),
    ],
)
def test_the_largest_image_is_the_processors(tmp_path: Path, settings: Any, pixels: int) -> None:
    name = "processor_config.json" if "image_processor" in settings else "preprocessor_config.json"
    (tmp_path / name).write_text(json.dumps(settings))
    assert largest_image(tmp_path, {"image_size": 896, "patch_size": 14}) == pixels


def test_images_of_families_that_were_not_shown_to_be_right_are_refused() -> None:
    assert can_see(FAMILY["config"])
    assert not can_see(FAMILY["config"] | {"model_type": "paligemma"})
    assert why_blind(FAMILY["config"] | {"model_type": "muse_spark"}) == UNFIT["muse_spark"]
