"""Penalties, biases and log-probabilities of rows are theirs, in whatever batch, lane and ring they are."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import make_steps
from stagering import Prompts, Ring, prompt_of, run, stages_of, whole

from sealring.node.engine import RowParameters, TokenLogprobs, params
from sealring.node.engine.seats import results
from sealring.v1 import control_pb2 as control


def demanding_rows(
    family: str, lengths: dict[int, tuple[int, int]]
) -> dict[int, tuple[list[int], RowParameters]]:
    """Every third row asks for nothing, the others for penalties, biases and log-probabilities."""
    rows = {}
    for row, (length, _) in lengths.items():
        prompt = prompt_of(family, row, length)
        size = 4 + row
        parameters = RowParameters(
            temperature=0.0 if row % 2 else 1.0,
            seed=row,
            repetition_penalty=1.5,
            repetition_context_size=size,
            prompt_tail=tuple(prompt[-size:]),
            presence_penalty=0.5 * (row % 4 - 1),
            frequency_penalty=0.75,
            logit_bias=tuple((token, 2.0) for token in range(70 * (row % 2))),
            logprobs=(0, None, 3, 20)[row % 4],
        )
        rows[row] = (prompt, parameters if row % 3 else RowParameters(temperature=1.0 * (row % 2), seed=row))
    return rows


def raw_logits(family: str, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The whole model's logits after each token, float64 [tokens, vocabulary]."""
    logits = whole(family)(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits).astype(np.float64)


def adjusted_by_hand(
    logits: np.ndarray[Any, np.dtype[np.float64]], row: RowParameters, prompt: list[int], answer: list[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    adjusted = logits.copy()
    for token, bias in row.logit_bias:
        adjusted[token] += bias
    for token in set([*prompt, *answer][-row.repetition_context_size :] if row.repeats else []):
        adjusted[token] *= row.repetition_penalty if adjusted[token] < 0 else 1 / row.repetition_penalty
    for token in set(answer):
        adjusted[token] -= answer.count(token) * row.frequency_penalty + row.presence_penalty
    return adjusted


def check_by_hand(
    family: str, prompt: list[int], row: RowParameters, answer: list[int], told: list[TokenLogprobs]
) -> None:
    """A row's answer against the whole model run over it once, one row, one token after the other."""
    logits = raw_logits(family, [*prompt, *answer])[len(prompt) - 1 : -1]
    assert len(told) == (0 if row.logprobs is None else len(answer))
    for index, token in enumerate(answer):
        adjusted = adjusted_by_hand(logits[index], row, prompt, answer[:index])
        if row.greedy:
            assert adjusted[token] >= adjusted.max() - 1e-3, index
        if row.logprobs is None:
            continue
        raw = logits[index] - np.logaddexp.reduce(logits[index])
        assert told[index].logprob == pytest.approx(raw[token], abs=1e-3)
        assert len(told[index].top) == row.logprobs
        for place, (each, logprob) in enumerate(told[index].top):
            assert logprob == pytest.approx(raw[each], abs=1e-3)
            assert logprob == pytest.approx(np.sort(raw)[::-1][place], abs=1e-3)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(2, 12)), min_size=2, max_size=7),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
    lanes=st.integers(1, 3),
    family=st.sampled_from(["llama", "gemma3_text"]),
)
def test_any_schedule_keeps_penalties_and_log_probabilities(
    lengths: list[tuple[int, int]], choices: random.Random, size: int, lanes: int, family: str
) -> None:
    numbered = dict(enumerate(lengths, start=1))
    rows = demanding_rows(family, numbered)
    cancelled: set[int] = set()
    sizes = {row: len(params.encode(parameters)) for row, (_, parameters) in rows.items()}
    steps = make_steps(choices, numbered, lanes, cancelled, sizes)
    prompts = run(family, size, steps, rows)
    for row, length in numbered.items():
        prompt, parameters = rows[row]
        answer = prompts.answers[row]
        assert len(answer) >= length[1] or row in cancelled
        if answer:
            check_by_hand(family, prompt, parameters, answer, prompts.logprobs[row])
            steps = make_steps(random.Random(0), {1: (length[0], len(answer))}, 1, None, {1: sizes[row]})
            alone = run(family, 1, steps, {1: rows[row]})
            assert alone.answers[1][: len(answer)] == answer


def test_the_tokens_record_has_room_for_what_rows_ask_and_no_more() -> None:
    asks = {1: None, 2: 0, 3: 5}
    rows = {row: (prompt_of("llama", row, 4), RowParameters(logprobs=asked)) for row, asked in asks.items()}
    chunks = [
        control.Chunk(row=row, start=0, end=4, prompt_tokens=4, params_bytes=params.BLOCK) for row in rows
    ]
    joins = [control.Change(admit=control.Admit(row=row, lane=0)) for row in (3, 1, 2)]
    leaves = [control.Change(evict=control.Evict(row=3))]
    steps = [
        control.Step(number=1, prefill=control.Prefill(chunks=chunks[:1])),
        control.Step(number=2, prefill=control.Prefill(chunks=chunks[1:])),
        control.Step(number=3, changes=joins, decode=control.Decode(lane=0)),
        control.Step(number=4, changes=leaves, decode=control.Decode(lane=0)),
    ]
    ring = Ring(stages_of("llama", 2), Prompts(rows))
    try:
        for step in steps:
            ring.announce(step)
        ring.wait_for(4)
    finally:
        ring.close()
    seen = [(header.step, header.shape) for header in ring.links[1].seen]
    assert seen == [(1, (1,)), (2, (2 + 1 + 11,)), (3, (3 + 1 + 11,)), (4, (2 + 1,))]


@pytest.mark.parametrize(("size", "cuts"), [(1, False), (2, False), (2, True)])
def test_a_row_gets_its_prompts_log_probabilities_of_the_whole_model(
    size: int, cuts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "SCORED_AT_ONCE", 3)
    monkeypatch.setattr(stages_of("llama", size)[-1], "cuts", cuts)
    lengths = {1: (20, 2), 2: (9, 1), 3: (1, 1)}
    rows = {}
    for row, (length, _) in lengths.items():
        prompt = prompt_of("llama", row, length)
        rows[row] = (prompt, RowParameters(logprobs=2 * (row % 2), scored=tuple(prompt if row != 2 else ())))
    sizes = {row: len(params.encode(parameters)) for row, (_, parameters) in rows.items()}
    steps = make_steps(random.Random(1), lengths, 2, None, sizes)
    prompts = run("llama", size, steps, rows)
    for row, (prompt, parameters) in rows.items():
        first, *others = prompts.logprobs[row]
        assert not any(told.prompt for told in others)
        check_by_hand("llama", prompt, parameters, prompts.answers[row], prompts.logprobs[row])
        assert len(first.prompt) == max(0, len(parameters.scored) - 1)
        logits = raw_logits("llama", prompt)
        for place, told in enumerate(first.prompt):
            raw = logits[place] - np.logaddexp.reduce(logits[place])
            assert told.logprob == pytest.approx(raw[prompt[place + 1]], abs=1e-3)
            assert [value for _, value in told.top] == pytest.approx(np.sort(raw)[::-1][:2], abs=1e-3)
