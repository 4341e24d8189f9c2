"""Prompts with images, in stages, against mlx-vlm's whole model; in the sweep of every family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stagering import combinations

from sealring.node.engine.vision.check import check_images
from sealring.node.engine.vision.sizes import SHOWN, can_see

ALL: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "archs-images.json").read_bytes()
)
FAMILIES = {key: family for key, family in ALL.items() if can_see(family["config"])}
"""`rounding`: mlx-vlm's language model computes a little otherwise than mlx-lm's, with and without images, so
that logits differ by as much. Kimi's attention multiplies by one matrix where mlx-lm has two. Of Qwen3.5's
recurrent layers both have code of their own."""

ROUNDING = 1e-3
"""A part of the largest logit: rows of a batch may be this far from the same rows alone."""


@pytest.mark.parametrize(
    ("key", "stages"),
    combinations(
        FAMILIES, [1, 2, 3], always=[("gemma3", 2), ("gemma4", 2), ("qwen2_5_vl", 2), ("qwen3_5", 3)]
    ),
)
def test_logits_are_those_of_mlx_vlms_whole_model(key: str, stages: int) -> None:
    family = FAMILIES[key]
    given = family["config"], family["images"], family["token"]
    report = check_images(*given, stages=stages, names=family.get("names"))
    assert report.alone is not None
    assert report.alone <= family.get("rounding", 0)
    assert report.text is not None
    assert report.text <= ROUNDING * report.largest
    assert report.together is not None
    assert report.together <= ROUNDING * report.largest
    assert report.blind is not None
    assert report.blind > 100 * ROUNDING * report.largest


def test_every_family_that_is_said_to_be_right_is_checked() -> None:
    assert {family["config"]["model_type"] for family in FAMILIES.values()} == SHOWN
