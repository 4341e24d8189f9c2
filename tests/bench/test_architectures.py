from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench import architectures
from sealring.node.engine.staging.second_source import MODEL_TYPES

DATA = Path(__file__).parents[1] / "data"


def test_the_page_says_what_was_found() -> None:
    found = json.loads(architectures.FOUND.read_bytes())
    assert architectures.PAGE.read_text() == architectures.page(found)


def test_every_configuration_of_the_tests_is_in_it() -> None:
    configurations = {
        key: one["model_type"]
        for file in ("archs.json", "archs-more.json")
        for key, one in json.loads((DATA / file).read_bytes()).items()
    }
    found = json.loads(architectures.FOUND.read_bytes())
    assert {key: one.get("model_type", configurations[key]) for key, one in found.items()} == configurations


def test_nothing_wrong_is_published() -> None:
    with pytest.raises(AssertionError, match="wrong in stages"):
        architectures.page({"llama": {"outcome": "wrong"}})


def test_what_a_text_model_of_mlx_vlm_lacks_has_its_reason_and_nothing_else_has() -> None:
    found = {
        key.partition(":")[0]: one
        for key, one in json.loads(architectures.FOUND.read_bytes()).items()
        if key.partition(":")[0] in MODEL_TYPES and key != "glm_moe_dsa"
    }
    assert {key for key, one in found.items() if not one["rows_together"]} == architectures.IN_TURN.keys()
    assert {key for key, one in found.items() if not one["kv_bits"]} == architectures.NO_KV_BITS.keys()
    assert all(one["drafts"] for one in found.values())
    (place,) = importlib.util.find_spec("mlx_vlm").submodule_search_locations  # type: ignore[union-attr]
    towers = {key for key in found if Path(place, "models", MODEL_TYPES[key], "vision.py").is_file()}
    assert towers == architectures.BLIND.keys()
