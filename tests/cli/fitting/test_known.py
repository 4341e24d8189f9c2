from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.fitting.known import WIDTHS, find_known, known_models
from sealring.mesh.errors import NotFound

ROOT = Path(__file__).parents[3]
PUBLISHED = json.loads((ROOT / "tests/data/published.json").read_text("utf-8"))
LISTED = {row["id"]: row for row in json.loads((ROOT / "cli/fitting/models.json").read_text("utf-8"))}


def test_the_list_has_each_published_model_once_with_its_source() -> None:
    assert list(LISTED) == list(PUBLISHED)
    assert len(LISTED) >= 40
    assert all(one.source for one in known_models())


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_models", ROOT / ".ci/models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("widths", [(4,), pytest.param(WIDTHS, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("id", PUBLISHED)
def test_layers_parameters_and_bytes_are_what_the_engine_measures(id: str, widths: tuple[int, ...]) -> None:
    listed = LISTED[id]["widths"]
    row = LISTED[id] | {"widths": {str(bits): listed[str(bits)] for bits in widths}}
    assert maker().made(id, PUBLISHED[id], widths) == row


BILLIONS = {
    "Qwen3-0.6B": 0.6,
    "Llama-3.1-8B-Instruct": 8.03,
    "Qwen3-32B": 32.8,
    "Llama-3.3-70B-Instruct": 70.6,
    "Qwen3-235B-A22B": 235,
    "DeepSeek-R1": 671,
    "Kimi-K2-Instruct": 1026,
}
"""As their publishers say."""


def test_parameters_are_as_published() -> None:
    found = {one.name: one.parameters / 1e9 for one in known_models() if one.name in BILLIONS}
    assert found == pytest.approx(BILLIONS, rel=0.01)


@pytest.mark.parametrize("bits", WIDTHS)
def test_profiles_are_such_as_a_plan_takes(bits: int) -> None:
    from sealring.coordinator.planning.demand import check_profile

    for one in known_models():
        profile = one.profile(bits)
        check_profile(profile)
        assert 0 < one.read_share(bits) <= 1
        whole = sum(profile.layer_bytes) + profile.embed_bytes + (0 if profile.tied else profile.head_bytes)
        least = 4 if one.name == "DeepSeek-V4-Flash" and bits < 16 else bits  # its experts stay in 4 bits
        assert least - 0.001 <= 8 * whole / one.parameters < bits + 1


@pytest.mark.parametrize(
    ("text", "name", "bits"),
    [
        ("Qwen/Qwen3-32B", "Qwen3-32B", None),
        ("qwen3-32b", "Qwen3-32B", None),
        ("mlx-community/Qwen3-32B-4bit", "Qwen3-32B", 4),
        ("mlx-community/Llama-3.3-70B-Instruct-8bit", "Llama-3.3-70B-Instruct", 8),
        ("lmstudio-community/Llama-3.3-70B-Instruct-MLX-4bit", "Llama-3.3-70B-Instruct", 4),
        ("llama-3.3-70b", "Llama-3.3-70B-Instruct", None),
        ("mlx-community/Qwen3-8B-bf16", "Qwen3-8B", 16),
        ("Qwen3-8B-3bit", "Qwen3-8B", None),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16-4bit", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 4),
        ("mlx-community/NVIDIA-Nemotron-3-Nano-30B-A3B-8bit", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8),
    ],
)
def test_a_model_is_found_by_the_names_that_it_goes_by(text: str, name: str, bits: int | None) -> None:
    found, width = find_known(text)
    assert (found.name, width) == (name, bits)


def test_each_listed_model_is_found_by_the_names_that_the_list_shows() -> None:
    for one in known_models():
        assert find_known(one.name) == find_known(one.id) == (one, None)
        for bits in WIDTHS:
            assert find_known(f"mlx-community/{one.name}-{bits}bit") == (one, bits)


def test_an_unknown_name_is_answered_with_those_like_it() -> None:
    with pytest.raises(NotFound) as caught:
        find_known("Qwen/Qwen3-33B")
    assert caught.value.reason == "MODEL_NOT_LISTED"
    assert "Qwen3-32B" in caught.value.hint
