"""A model's own options of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sealring.mesh.prompt.options import BOUNDS, MODELS_OWN
from sealring.node.engine import RowParameters, own_options, params, with_own
from sealring.v1 import inference_pb2 as inference


def read(folder: Path, content: str | bytes) -> tuple[dict[str, float], int]:
    """The options, and the number of lines in the log."""
    content = content.encode() if isinstance(content, str) else content
    (folder / "generation_config.json").write_bytes(content)
    with capture_logs() as logs:
        return own_options(folder), len(logs)


def test_a_folder_without_the_file_has_none(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert own_options(tmp_path) == {}
    assert logs == []


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "7", b"\xff", "null"])
def test_a_file_that_is_no_object_has_none(tmp_path: Path, content: str | bytes) -> None:
    assert read(tmp_path, content) == ({}, 1)


@pytest.mark.parametrize("name", MODELS_OWN)
@pytest.mark.parametrize(
    "value", ["true", '"x"', "[]", "1e400", "NaN", "-2", "1" + "0" * 400, "0.5e30", "1e-60"]
)
def test_a_number_that_is_no_good_is_left_out(tmp_path: Path, name: str, value: str) -> None:
    found, lines = read(tmp_path, f'{{"{name}": {value}, "eos_token_id": 2}}')
    zero = value == "1e-60" and name in ("temperature", "min_p")  # which are 0 in float32
    assert (found, lines) == (({name: 0}, 0) if zero else ({}, 1))


def test_a_number_that_is_good_stays_beside_one_that_is_not(tmp_path: Path) -> None:
    content = {"temperature": 3, "top_p": 0.5, "top_k": -1, "min_p": None, "do_sample": True}
    assert read(tmp_path, json.dumps(content)) == ({"top_p": 0.5, "top_k": 0}, 1)


NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.dictionaries(st.sampled_from(sorted(MODELS_OWN)), NUMBERS))
def test_any_file_gives_rows_that_tails_take(tmp_path: Path, content: dict[str, Any]) -> None:
    own, _ = read(tmp_path, json.dumps(content))
    assert all(BOUNDS[name].hold(value) for name, value in own.items())
    row = params.from_sampling(with_own(inference.Sampling(unnamed=(1 << 32) - 1, seed=1), own))
    assert params.decode(params.encode(row)) == row
    assert params.from_sampling(with_own(inference.Sampling(seed=1), own)) == RowParameters(seed=1)


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True}, {"do_sample": False}, {"do_sample": None}])
@pytest.mark.parametrize("own", [{}, {"temperature": 0.5, "top_p": 0.5, "top_k": 0}, {"top_k": 9}])
def test_what_a_file_says_is_what_transformers_reads(
    tmp_path: Path, own: dict[str, Any], sampled: dict[str, Any]
) -> None:
    """But for what it does not say: transformers is greedy without `do_sample`, and takes 50 for `top_k`."""
    from transformers import GenerationConfig

    found, lines = read(tmp_path, json.dumps(own | sampled))
    theirs = GenerationConfig.from_pretrained(tmp_path)
    assert lines == 0
    if theirs.do_sample is False:
        assert theirs.get_generation_mode() == "greedy_search"
        assert found.pop("temperature") == 0
    assert found == {name: one for name in MODELS_OWN if (one := getattr(theirs, name)) is not None} or (
        theirs.do_sample is False and found == {k: v for k, v in own.items() if k != "temperature"}
    )
