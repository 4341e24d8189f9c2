"""How large a family's images are, by configuration and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.ring import MAX_PREFILL_CHUNK
from sealring.node.engine import random_whole, save
from sealring.node.engine.vision.sizes import tower_sizes

FAMILIES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "archs-images.json").read_bytes()
)


@pytest.mark.parametrize(
    ("family", "processor", "tokens"),
    [
        ("gemma3", {}, 4),
        ("qwen2_5_vl", {"max_pixels": 64 * 256}, 256),
        ("qwen3_vl", {"size": {"longest_edge": 64 * 1024}}, 1024),
        ("kimi_vl", {"in_token_limit": 400}, 100),
        ("qwen2_5_vl", {"max_pixels": 1 << 28}, MAX_PREFILL_CHUNK),
    ],
)
def test_an_images_tokens_are_counted_with_room_for_those_around_them(
    tmp_path: Path, family: str, processor: dict[str, Any], tokens: int
) -> None:
    config = json.loads(json.dumps(FAMILIES[family]["config"]))
    config["vision_config"]["image_size"] = 16
    save(random_whole(config, 1), config, tmp_path, {})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    found = tower_sizes(tmp_path, config)["image_tokens"]
    assert tokens <= found <= min(MAX_PREFILL_CHUNK, tokens * 1.1 + 16)
