from __future__ import annotations

import gc
import importlib
import itertools
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine import RowParameters, mlx_lm_import, ranks
from sealring.node.engine.sampling import Sampler

VOCABULARY = 50


@cache
def reference() -> Any:
    """mlx_lm.sample_utils."""
    mlx_lm_import.install()
    return importlib.import_module("mlx_lm.sample_utils")


def logits_of(seed: int, rows: int = 1, vocabulary: int = VOCABULARY) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 2, (rows, vocabulary)).astype(np.float32))


def logprobs_of(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def reference_kept(logprobs: mx.array, parameters: RowParameters) -> list[bool]:
    """As make_sampler chains its filters."""
    utils = reference()
    if 0 < parameters.top_p < 1:
        logprobs = utils.apply_top_p(logprobs, parameters.top_p)
    if parameters.min_p:
        logprobs = utils.apply_min_p(logprobs, parameters.min_p, 1)
    if parameters.top_k:
        logprobs = utils.apply_top_k(logprobs, parameters.top_k)
    return [value > -float("inf") for value in logprobs[0].tolist()]


sampled_rows = st.builds(
    RowParameters,
    temperature=st.floats(0.0625, 2, width=32),
    top_p=st.one_of(st.just(1.0), st.floats(0.0625, 0.984375, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0.015625, 0.875, width=32)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCABULARY - 1)),
    seed=st.integers(0, 2**64 - 1),
)
rows = st.one_of(st.builds(RowParameters), sampled_rows)


@settings(deadline=None, max_examples=25)
@given(parameters=sampled_rows, seed=st.integers(0, 10_000))
def test_filters_keep_what_mlx_lm_keeps(parameters: RowParameters, seed: int) -> None:
    logprobs = logprobs_of(logits_of(seed))
    kept = Sampler([parameters], [0]).kept(logprobs)
    got = [True] * VOCABULARY if kept is None else kept[0].tolist()
    assert got == reference_kept(logprobs, parameters)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]))
def test_greedy_is_the_argmax_of_mlx_lm(seed: int, dtype: mx.Dtype) -> None:
    logits = logits_of(seed, 3).astype(dtype)
    expected = [int(reference().greedy_sampler(logprobs_of(logits[i : i + 1])).item()) for i in range(3)]
    assert Sampler([RowParameters()] * 3, [0] * 3)(logits).tolist() == expected


@settings(deadline=None, max_examples=25)
@given(
    company=st.lists(rows, min_size=1, max_size=6), place=st.integers(0, 5), own=rows, seed=st.integers(0, 99)
)
def test_a_row_gets_the_same_tokens_in_any_company(
    company: list[RowParameters], place: int, own: RowParameters, seed: int
) -> None:
    place = min(place, len(company))
    together = [*company[:place], own, *company[place:]]
    alone, joined = Sampler([own], [4]), Sampler(together, [9] * place + [4] + [2] * (len(company) - place))
    for step in range(4):
        logits = logits_of(seed + step, len(together))
        assert joined(logits)[place].item() == alone(logits[place : place + 1])[0].item()


@settings(deadline=None, max_examples=25)
@given(own=sampled_rows, other=sampled_rows, seed=st.integers(0, 99), stay=st.integers(0, 130))
def test_moving_between_lanes_changes_nothing(
    own: RowParameters, other: RowParameters, seed: int, stay: int
) -> None:
    alone, lane = Sampler([own], [0]), Sampler([other], [7])
    logits = logits_of(seed)
    moved = Sampler([own], [0])
    for _ in range(stay):
        assert moved(logits).item() == alone(logits).item()
    lane.extend(moved)
    for _ in range(3):
        assert lane(mx.concatenate([logits, logits]))[1].item() == alone(logits).item()
    lane.filter([1])
    assert lane(logits).item() == alone(logits).item()


@settings(deadline=None, max_examples=25)
@given(parameters=sampled_rows, seed=st.integers(0, 10_000))
def test_only_kept_tokens_are_drawn(parameters: RowParameters, seed: int) -> None:
    logits = logits_of(seed)
    sampler = Sampler([parameters], [0])
    kept = reference_kept(logprobs_of(logits), parameters)
    for _ in range(20):
        assert kept[int(sampler(logits).item())]


def test_tokens_are_drawn_by_their_probability() -> None:
    temperature = 0.8
    logits = logits_of(5, 1, 12)
    count = 4000
    parameters = [RowParameters(temperature=temperature, seed=seed) for seed in range(count)]
    drawn = np.array(Sampler(parameters, [0] * count)(mx.broadcast_to(logits, (count, 12))))
    wanted = np.array(mx.softmax(logits[0] / temperature)) * count
    found = np.bincount(drawn, minlength=12)
    squares = float(((found - wanted) ** 2 / wanted).sum())
    assert squares < 31.3  # chi squared, 11 degrees of freedom, one in a thousand


def test_positions_are_independent() -> None:
    logits = logits_of(1, 1, 2) * 0
    sampler = Sampler([RowParameters(temperature=1.0, seed=3)], [0])
    drawn = [int(sampler(logits).item()) for _ in range(400)]
    assert 150 < sum(drawn) < 250
    pairs = sum(one == two for one, two in itertools.pairwise(drawn))
    assert 150 < pairs < 250


@pytest.mark.parametrize("top_k", [1, 3])
def test_of_equal_tokens_just_top_k_are_kept(top_k: int) -> None:
    logprobs = logprobs_of(mx.zeros((1, 9)))
    kept = Sampler([RowParameters(temperature=1.0, top_k=top_k)], [0]).kept(logprobs)
    assert kept is not None
    assert kept[0].tolist() == [True] * top_k + [False] * (9 - top_k)


def test_extreme_parameters_give_the_likeliest() -> None:
    logits = logits_of(8, 4)
    likeliest = mx.argmax(logits, axis=-1).tolist()
    for parameters in (
        RowParameters(temperature=1e-6, seed=1),
        RowParameters(temperature=1.0, top_k=1, seed=1),
        RowParameters(temperature=1.0, top_p=1e-6, seed=1),
        RowParameters(temperature=1.0, min_p=1.0, seed=1),
    ):
        assert Sampler([parameters] * 4, [0] * 4)(logits).tolist() == likeliest


WIDE = 20_000
"""Words of a vocabulary that is not sorted whole."""


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("spread", [0.05, 1.5, 6.0])
def test_filters_of_a_wide_vocabulary_keep_what_mlx_lm_keeps(
    monkeypatch: pytest.MonkeyPatch, spread: float, looks: bool
) -> None:
    """Also where the nucleus is larger than what is looked at first, and beside rows that have no filters."""
    monkeypatch.setattr(ranks, "guesses", lambda vocabulary: looks)
    few = [
        RowParameters(temperature=1.0, top_p=0.75),
        RowParameters(temperature=1.0, top_p=0.875, top_k=40),
        RowParameters(temperature=1.0, top_k=7, min_p=0.25),
        RowParameters(temperature=1.0, top_k=5000),
        RowParameters(temperature=1.0, top_k=5000, top_p=0.5),
    ]
    together = [RowParameters(), *few, RowParameters(temperature=1.0)]
    logprobs = logprobs_of(logits_of(3, len(together), WIDE) * spread)
    kept = Sampler(together, [0] * len(together)).kept(logprobs)
    assert kept is not None
    for row, parameters in enumerate(together):
        expected = mx.array(reference_kept(logprobs[row : row + 1], parameters))
        found = mx.where(kept[row], logprobs[row], 0.0).min().item()
        lowest = mx.where(expected, logprobs[row], 0.0).min().item()
        assert mx.all(kept[row] | ~expected), "all of the nucleus is kept"
        assert lowest - 0.0005 < found <= lowest, "and nothing that is clearly less likely"
        own = None if parameters.greedy else Sampler([parameters], [0]).kept(logprobs[row : row + 1])
        assert own is None or mx.array_equal(own[0], kept[row]), "whatever is beside the row"


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.5, 0.9999999])
def test_a_nucleus_is_found_without_sorting(top_p: float) -> None:
    """With values apart as those of a model in half precision, many of which are equal."""
    values = np.random.default_rng(5).integers(-40, 0, (3, WIDE)) / 4
    logprobs = logprobs_of(mx.array(values.astype(np.float32)))
    rows = [RowParameters(temperature=1.0, top_p=top_p)] * 3
    kept = Sampler(rows, [0] * 3).kept(logprobs)
    assert kept is not None
    found, counts = np.unique(np.array(logprobs[0]), return_counts=True)
    descending, mass = found[::-1], (np.exp(found.astype(np.float64)) * counts)[::-1]
    wanted = max(1, int(np.sum(np.cumsum(mass) - mass < top_p * mass.sum() - 1e-6)))
    assert mx.array_equal(kept[0], logprobs[0] >= float(descending[wanted - 1]))


def test_a_wide_nucleus_waits_for_the_logits_and_other_rows_do_not() -> None:
    nucleus = Sampler([RowParameters(temperature=1.0, top_p=0.5)], [0])
    bounded = Sampler([RowParameters(temperature=1.0, top_p=0.5, top_k=20)], [0])
    assert [each.looks(WIDE) for each in (nucleus, bounded)] == [mx.default_device() == mx.cpu, False]
    assert not nucleus.looks(VOCABULARY)


def reachable(thing: object) -> int:
    """Bytes of the arrays that a sampler holds."""
    found: dict[int, object] = {}
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType | FunctionType):
            found[id(one)] = one
            waiting += gc.get_referents(one)
    return sum(one.nbytes for one in found.values() if isinstance(one, mx.array))


@pytest.mark.parametrize("accepted", [1, 5, 16, 17, 32])
def test_runs_with_penalties_hold_no_history_of_each_token(accepted: int) -> None:
    """And what counts of them is what it would be without."""
    vocabulary, row = (
        5000,
        RowParameters(
            temperature=0.8,
            seed=3,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            repetition_penalty=1.3,
            repetition_context_size=8,
            prompt_tail=(1, 2, 3),
        ),
    )
    logits = [logits_of(seed, vocabulary=vocabulary) for seed in range(34)]
    plain, drafted = Sampler([row], [0]), Sampler([row], [0])
    expected = [plain(each).item() for each in logits[: accepted + 2]]
    assert drafted(logits[0]).item() == expected[0]
    chains = [mx.stack(logits[1:17], axis=1), mx.stack(logits[17:33], axis=1)]
    sampled = [token for chain in chains for token in drafted.run(chain)[0].tolist()]
    assert sampled[:accepted] == expected[1 : accepted + 1]
    assert reachable(drafted) < 3 * 4 * vocabulary
    drafted.settle([accepted])
    assert drafted(logits[accepted + 1]).item() == expected[accepted + 1]
