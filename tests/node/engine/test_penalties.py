"""Bias and penalties against a reference that knows one row and no arrays; and endings that are masked."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.node.engine import RowParameters, mlx_lm_import
from sealring.node.engine.logprobs import unpack
from sealring.node.engine.params import from_sampling
from sealring.node.engine.penalties import History
from sealring.node.engine.sampling import Sampler
from sealring.v1 import inference_pb2 as inference

VOCABULARY = 23

penalties = st.sampled_from([0.5, 0.75, 1.0, 1.25, 2.0])
additive = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.75, 2.0])


@st.composite
def parameters(draw: st.DrawFn) -> RowParameters:
    penalty = draw(penalties)
    size = draw(st.integers(1, 9)) if penalty != 1 else 0
    tail = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=size)) if size else []
    bias = draw(
        st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-100.0, -1.0, 3.0]), max_size=4)
    )
    return RowParameters(
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        seed=draw(st.integers(0, 99)),
        top_k=draw(st.sampled_from([0, 0, 5])),
        repetition_penalty=penalty,
        repetition_context_size=size,
        presence_penalty=draw(additive),
        frequency_penalty=draw(additive),
        logit_bias=tuple(sorted(bias.items())),
        prompt_tail=tuple(tail),
        logprobs=draw(st.sampled_from([None, None, 0, 3, 20])),
    )


def resumed(row: RowParameters, said: list[int]) -> RowParameters:
    """The row as a head gives it to an epoch that goes on with an answer."""
    sampling = inference.Sampling(
        temperature=row.temperature,
        seed=row.seed,
        top_k=row.top_k,
        repetition_penalty=row.repetition_penalty,
        presence_penalty=row.presence_penalty,
        frequency_penalty=row.frequency_penalty,
        logit_bias=dict(row.logit_bias),
        logprobs=row.logprobs,
    )
    if row.repeats:
        sampling.repetition_context_size = row.repetition_context_size
    return from_sampling(sampling, row.prompt_tail, said)


def logits_of(row: int, position: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    values = np.random.default_rng([row, position]).normal(0, 2, (1, VOCABULARY))
    return mx.array(values.astype(np.float32)).astype(dtype)


def reference_adjusted(logits: list[float], row: RowParameters, answer: list[int]) -> list[float]:
    """One row, one token after the other."""
    adjusted = list(logits)
    for token, bias in row.logit_bias:
        adjusted[token] += bias
    if row.repetition_penalty != 1:
        seen = [*row.prompt_tail, *answer][-row.repetition_context_size :]
        for token in set(seen):
            value = adjusted[token]
            adjusted[token] = value * row.repetition_penalty if value < 0 else value / row.repetition_penalty
    for token, count in Counter(answer).items():
        adjusted[token] -= count * row.frequency_penalty + row.presence_penalty
    return adjusted


def alone(number: int, row: RowParameters, tokens: int) -> tuple[list[int], list[Any]]:
    """The row's tokens and log-probabilities by a sampler of its own."""
    sampler, answer, reports = Sampler([row], [0]), [], []
    for position in range(tokens):
        logits = logits_of(number, position)
        token = sampler(logits)
        reports.append(words(sampler.report(logits, token)))
        answer.append(int(token.item()))
    return answer, reports


def words(report: mx.array | None) -> list[int] | None:
    return None if report is None else report.tolist()  # type: ignore[no-any-return]


@settings(deadline=None, max_examples=25)
@given(row=parameters(), number=st.integers(0, 10_000))
def test_a_token_is_the_references(row: RowParameters, number: int) -> None:
    answer, _ = alone(number, row, 12)
    for position, token in enumerate(answer):
        logits = logits_of(number, position)[0].tolist()
        adjusted = np.array(reference_adjusted(logits, row, answer[:position]))
        kept = np.argsort(-adjusted, kind="stable")[: row.top_k or VOCABULARY]
        if row.greedy:
            assert adjusted[token] >= adjusted.max() - 1e-4
            continue
        assert token in kept
        weights = np.where(np.isin(np.arange(VOCABULARY), kept), np.exp(adjusted - adjusted.max()), 0)
        upper = np.cumsum(weights) / weights.sum()
        lower = upper[token] - weights[token] / weights.sum()
        assert lower - 1e-4 <= uniform(row.seed, position) <= upper[token] + 1e-4


def uniform(seed: int, position: int) -> float:
    """SplitMix64 in Python's own integers; tokens are counted from 1."""
    mask = (1 << 64) - 1

    def mix(bits: int) -> int:
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        return bits ^ (bits >> 31)

    return (mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) & mask) >> 40) / 2**24


@settings(deadline=None, max_examples=25)
@given(
    penalty=penalties,
    size=st.integers(1, 30),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12),
    bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-5.0, 2.5]), max_size=3),
    number=st.integers(0, 10_000),
)
def test_repetition_and_bias_are_mlx_lms(
    penalty: float, size: int, prompt: list[int], bias: dict[int, float], number: int
) -> None:
    mlx_lm_import.install()
    utils = importlib.import_module("mlx_lm.sample_utils")
    processors = utils.make_logits_processors(bias or None, penalty, size)
    on = penalty != 1
    row = RowParameters(
        repetition_penalty=penalty,
        repetition_context_size=size if on else 0,
        prompt_tail=tuple(prompt[-size:]) if on else (),
        logit_bias=tuple(sorted(bias.items())),
    )
    sampler, tokens = Sampler([row], [0]), list(prompt)
    for position in range(10):
        logits = logits_of(number, position)
        expected = logits
        for process in processors:
            expected = process(mx.array(tokens), expected + 0)
        tokens.append(int(sampler(logits).item()))
        assert expected[0, tokens[-1]].item() >= mx.max(expected).item() - 1e-4


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(parameters() | st.builds(RowParameters, seed=st.integers(0, 9)), min_size=2, max_size=6),
    seed=st.integers(0, 1 << 32),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
)
def test_no_schedule_changes_what_a_row_says(rows: list[RowParameters], seed: int, dtype: mx.Dtype) -> None:
    """Rows begin several at once, join lanes, leave them, move between them, and go on in another epoch."""
    choices = random.Random(seed)
    length = 8
    said: dict[int, list[int]] = {number: [] for number in range(len(rows))}
    reports: dict[int, list[Any]] = {number: [] for number in range(len(rows))}
    lanes: list[tuple[list[int], Sampler]] = []

    def step(members: list[int], sampler: Sampler) -> None:
        logits = mx.concatenate([logits_of(number, len(said[number]), dtype) for number in members])
        tokens = sampler(logits)
        report = sampler.report(logits, tokens)
        found = {} if report is None else unpack(sampler.asking, np.array(report))
        for index, (number, token) in enumerate(zip(members, tokens.tolist(), strict=True)):
            said[number].append(token)
            reports[number].append(found.get(index))

    waiting = list(range(len(rows)))
    while waiting or lanes:
        action = choices.choice(["begin"] * 3 + ["step"] * 9 + ["move"] * 3 + ["leave"] * 3 + ["break"])
        if action == "begin" and waiting:
            count = choices.randint(1, len(waiting))
            members, waiting = waiting[:count], waiting[count:]
            begun = [resumed(rows[number], said[number]) for number in members]
            first = Sampler(begun, [row.position for row in begun])
            step(members, first)
            for index, number in enumerate(members):
                one = first.extract(index)
                if lanes and choices.random() < 0.7:
                    others, lane = choices.choice(lanes)
                    others.append(number)
                    lane.extend(one)
                else:
                    lanes.append(([number], one))
        elif action == "step" and lanes:
            step(*choices.choice(lanes))
        elif action == "break":
            waiting += [number for members, _ in lanes for number in members]
            lanes = []
        elif lanes:
            members, lane = choices.choice(lanes)
            gone = [n for n in members if len(said[n]) >= length]
            if action == "move" and len(lanes) > 1:
                gone = [choices.choice(members)]
                target = choices.choice([one for one in lanes if one[0] is not members])
                target[1].extend(lane.extract(members.index(gone[0])))
                target[0].append(gone[0])
            lane.filter([index for index, number in enumerate(members) if number not in gone])
            members[:] = [number for number in members if number not in gone]
            lanes = [one for one in lanes if one[0]]
    for number, row in enumerate(rows):
        sampler = Sampler([row], [0])
        for position, token in enumerate(said[number]):
            logits = logits_of(number, position, dtype)
            expected = sampler(logits)
            assert token == expected.item()
            report = sampler.report(logits, expected)
            found = None if report is None else unpack(sampler.asking, np.array(report))[0]
            assert reports[number][position] == found


def test_the_words_of_a_prompt_do_not_count_for_presence_and_frequency() -> None:
    row = RowParameters(
        repetition_penalty=1.5, repetition_context_size=4, prompt_tail=(1, 1, 2), presence_penalty=2.0
    )
    sampler = Sampler([row], [0])
    logits = mx.array([[0.0, 3.0, 0.5, 1.9]])
    assert sampler(logits).item() == 1  # 3 / 1.5 = 2, and not 0
    assert sampler(logits).item() == 3  # 2 - 2 = 0


def test_a_bias_can_forbid_and_force() -> None:
    logits = mx.array([[5.0, 4.0, 0.0]])
    assert Sampler([RowParameters(logit_bias=((0, -100.0),))], [0])(logits).item() == 1
    forced = RowParameters(temperature=1.0, seed=3, logit_bias=((2, 100.0),))
    assert Sampler([forced], [0])(logits).item() == 2


@pytest.mark.parametrize("token", [VOCABULARY, VOCABULARY + 1, 2**31 - 1])
def test_tokens_that_the_model_does_not_have_change_nothing(token: int) -> None:
    strange = RowParameters(
        repetition_penalty=2.0,
        repetition_context_size=3,
        prompt_tail=(token,),
        logit_bias=((token, 100.0),),
    )
    logits = logits_of(4, 4)
    assert Sampler([strange], [0])(logits).item() == mx.argmax(logits).item()


def test_a_history_without_penalties_is_empty() -> None:
    counting = RowParameters(presence_penalty=1.0)
    history = History.of_prompts([counting]).extended(History.of_prompts([RowParameters()]))
    history.begin_counts(VOCABULARY, [[], []])
    assert history.kept([0], [counting]).counts is not None
    left = history.kept([1], [RowParameters()])
    assert (left.counts, left.recent) == (None, None)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_penalties_stay_in_the_models_precision(temperature: float) -> None:
    """In bfloat16 two tokens tie that do not in the float32 in which the neighbour is computed."""
    values = np.full((1, 2000), -1.0, np.float32)
    values[0, :2] = 0.0, 0.01
    logits = mx.array(values).astype(mx.bfloat16)
    plain = RowParameters(temperature=temperature, top_k=1)
    alone = Sampler([plain], [0])(logits).item()
    assert (alone, mx.argmax(logits.astype(mx.float32)).item()) == (0, 1)
    lane = Sampler([plain, RowParameters(presence_penalty=1.0)], [0, 0])
    assert lane(mx.concatenate([logits, logits])).tolist() == [alone, 1]


END, STOP, OTHER = 2, 5, 7


def ending_logits(rows: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The end is the likeliest, then the stop, then another."""
    row = np.zeros(9, np.float32)
    row[[END, STOP, OTHER]] = 9, 8, 7
    return mx.array(np.tile(row, (rows, 1))).astype(dtype)


def asked(answered: int = 0, **fields: object) -> RowParameters:
    sampling = inference.Sampling(**fields)  # type: ignore[arg-type]
    return from_sampling(sampling, answered=[OTHER] * answered, ends=[END])


def answer_of(row: RowParameters, tokens: int) -> list[int]:
    sampler = Sampler([row], [row.position])
    return [int(sampler(ending_logits()).item()) for _ in range(tokens)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [END] * 4),
        ({"min_tokens": 2}, [STOP, STOP, END, END]),
        ({"min_tokens": 2, "stop_token_ids": [STOP]}, [OTHER, OTHER, END, END]),
        ({"ignore_eos": True}, [STOP] * 4),
        ({"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [STOP]}, [OTHER, OTHER, OTHER, STOP]),
        ({"min_tokens": 2, "logit_bias": {END: 100.0}}, [STOP, STOP, END, END]),
        ({"min_tokens": 1, "presence_penalty": 0.5}, [STOP, END, END, END]),
    ],
)
def test_an_end_is_not_sampled_before_its_time(fields: dict[str, object], expected: list[int]) -> None:
    assert answer_of(asked(**fields), 4) == expected
    assert answer_of(asked(**fields, temperature=0.05, seed=3), 4) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rows_come_and_go_and_each_has_its_own_time(dtype: mx.Dtype) -> None:
    late, soon, free = asked(min_tokens=4), asked(min_tokens=1), asked()
    sampler = Sampler([late, free], [0, 0])
    told = [sampler(ending_logits(2, dtype)).tolist()]
    sampler.extend(Sampler([soon], [0]))
    told += [sampler(ending_logits(3, dtype)).tolist() for _ in range(2)]
    sampler.filter([2, 0])
    told += [sampler(ending_logits(2, dtype)).tolist() for _ in range(2)]
    assert told == [[STOP, END], [STOP, END, STOP], [STOP, END, END], [END, STOP], [END, END]]


def test_an_answer_that_goes_on_after_a_fault_is_masked_as_before() -> None:
    assert answer_of(asked(2, min_tokens=3), 2) == [STOP, END]
    assert answer_of(asked(3, min_tokens=3), 2) == [END, END]


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_drafts_are_masked_by_their_own_places(accepted: int) -> None:
    sampler = Sampler([asked(min_tokens=2)], [0])
    tokens, _, _ = sampler.run(ending_logits(3)[None])
    assert tokens.tolist() == [STOP, STOP, END]
    sampler.settle([accepted])
    assert int(sampler(ending_logits()).item()) == (STOP if accepted < 2 else END)
