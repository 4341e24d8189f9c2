"""Prompts with images, in stages, against mlx-vlm's whole model; in the sweep of every family."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from stagering import combinations

from bench.images import small_towers
from sealring.node.engine import check_family, mlx_lm_import
from sealring.node.engine.staging import second_source
from sealring.node.engine.staging.denied import DENIED
from sealring.node.engine.staging.pictured import SHOWN, UNFIT, WRAPPED, pictured
from sealring.node.engine.vision import mlx_vlm_import
from sealring.node.engine.vision.sizes import can_see

ALL: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "archs-images.json").read_bytes()
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
        FAMILIES,
        [1, 2, 3],
        always=[("gemma3", 2), ("gemma4", 2), ("gemma4:both-ways", 3), ("qwen2_5_vl", 2), ("qwen3_5", 3)],
    ),
)
def test_logits_are_those_of_mlx_vlms_whole_model(key: str, stages: int) -> None:
    family = FAMILIES[key]
    with small_towers():
        report = check_family(family, stages=stages)
    assert report.alone is not None
    assert report.alone <= family.get("rounding", 0)
    assert report.cut is not None
    assert report.cut <= ROUNDING * report.largest
    assert report.text is not None
    assert report.text <= ROUNDING * report.largest
    assert report.together is not None
    assert report.together <= ROUNDING * report.largest
    assert report.counted_bytes == report.tower_bytes
    assert report.blind is not None
    assert report.blind > 100 * ROUNDING * report.largest


def with_towers() -> set[str]:
    """mlx-vlm's folders of models that have a tower."""
    (place,) = importlib.util.find_spec("mlx_vlm").submodule_search_locations  # type: ignore[union-attr]
    return {
        folder.name
        for folder in Path(place, "models").iterdir()
        if any(file.stem == "vision" or "VisionModel" in file.read_text() for file in folder.glob("*.py"))
    }


def test_every_tower_of_mlx_vlm_is_served_or_the_page_of_models_says_why_not() -> None:
    served = {(pictured(one).known_as or one) for one in SHOWN | UNFIT.keys()}
    assert with_towers() - served <= DENIED.keys() | set(second_source.MODEL_TYPES.values())
    assert not served & DENIED.keys()


def test_whatever_mlx_lm_and_mlx_vlm_both_have_with_a_tower_is_served_or_refused_by_name() -> None:
    utils = mlx_lm_import.import_utils()
    types = {file.stem for file in Path(utils.__file__).parent.glob("models/*.py")} | {*utils.MODEL_REMAPPING}
    towers = with_towers()
    seeing = {one for one in types if (pictured(one).known_as or one) in towers}
    assert seeing == (SHOWN | UNFIT.keys()) - WRAPPED.keys()
    assert not SHOWN & UNFIT.keys()
    assert all(mlx_vlm_import.knows(one) for one in SHOWN)


def test_every_family_that_is_said_to_be_right_is_checked() -> None:
    assert {family["config"]["model_type"] for family in FAMILIES.values()} == SHOWN
