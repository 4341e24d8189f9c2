from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sealring.cli.fitting.fitting import CHUNK, fit
from sealring.cli.fitting.known import WIDTHS, known_models
from sealring.cli.fitting.machines import mac, parse_memory
from sealring.cli.fitting.showing import suggestion
from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.planner import DEFAULT_CONTEXT, plan
from sealring.mesh.errors import InvalidInput
from sealring.node import engine
from sealring.v1 import admin_pb2

ROOT = Path(__file__).parents[3]
MODELS = {one.name: one for one in known_models()}
SIZES = st.lists(st.sampled_from([8, 16, 24, 36, 64, 128, 512]), min_size=1, max_size=3)


def test_a_macs_chunk_is_that_of_its_engine() -> None:
    assert engine.CHUNK == CHUNK


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from(WIDTHS), SIZES, st.integers(0, 2))
@example("Llama-4-Maverick-17B-128E-Instruct", 6, [512, 8], 1)
@example("gemma-4-31B-it", 4, [16, 16, 16], 0)
def test_more_memory_never_fits_less(name: str, bits: int, sizes: list[int], place: int) -> None:
    """Nor with a shorter context, on more machines, or lacking more."""
    profile = MODELS[name].profile(bits)
    larger = [*sizes]
    larger[place % len(sizes)] *= 2
    less, more = (fit(profile, [mac(size) for size in each]) for each in (sizes, larger))
    assert more.fits or not less.fits
    assert more.context >= less.context
    assert more.fits or more.lacking <= less.lacking
    assert less.fits == (less.context > 0) == (less.lacking == 0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(MODELS)), SIZES)
def test_it_is_what_the_planner_would_plan(name: str, sizes: list[int]) -> None:
    macs = [mac(size) for size in sizes]
    candidates = [Candidate(str(place), one.name, one.usable, 1) for place, one in enumerate(macs)]
    found = fit(MODELS[name].profile(4), macs)
    if not found.fits:
        return
    spec = admin_pb2.DeploymentSpec(name="x", model="x", context=found.context, max_rows=1)
    made = plan(spec, MODELS[name].profile(4), candidates)
    assert len(made.rings[0].stages) == len(found.machines)


def test_what_is_lacking_makes_it_fit() -> None:
    profile = MODELS["Llama-3.3-70B-Instruct"].profile(4)
    lacking = fit(profile, parse_memory("36")).lacking
    assert 0 < lacking < 30 << 30
    needed = 36 + -(-lacking // (1 << 30)) * 4 // 3 + 8
    assert fit(profile, [mac(needed)]).fits
    assert fit(profile, [mac(needed)]).context >= DEFAULT_CONTEXT


def test_a_context_that_is_asked_for_has_to_fit() -> None:
    profile = MODELS["Qwen3-32B"].profile(4)
    assert fit(profile, parse_memory("36"), 16384).context == 16384
    assert not fit(profile, parse_memory("36"), 40960).fits
    with pytest.raises(InvalidInput, match="context"):
        fit(profile, parse_memory("36"), 1 << 20)


def test_a_mixture_is_rated_by_the_experts_that_it_chooses() -> None:
    sparse, dense = (
        fit(one.profile(4), parse_memory("64"), read_share=one.read_share(4)).rate
        for one in (MODELS["Qwen3-30B-A3B"], MODELS["Qwen3-32B"])
    )
    assert sparse > 4 * dense


def test_a_refusal_names_fewer_bits_of_the_same_model_and_others_that_fit() -> None:
    said = suggestion("mlx-community/Qwen3-32B-8bit", parse_memory("36"))
    assert said.startswith("what fits: Qwen3-32B in 4 bits, ")
    assert len(said.split(", ")) > 2
    assert suggestion("/models/own", parse_memory("36")).startswith("what fits: ")
    assert suggestion("own", [mac(1)]) == ""


def test_the_tables_of_the_page_are_what_the_code_says() -> None:
    checked = subprocess.run(
        [sys.executable, ".ci/models.py", "--check-tables"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.stdout, checked.returncode) == ("", 0)
