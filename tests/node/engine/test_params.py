from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.node.engine import RowParameters, params
from sealring.node.engine.params import BLOCK
from sealring.node.engine.staging.grid import Grid
from sealring.v1 import inference_pb2 as inference


@st.composite
def made(draw: st.DrawFn) -> RowParameters:
    penalty = draw(st.just(1.0) | st.floats(0.125, 8, width=32))
    size = draw(st.integers(1, 4096)) if penalty != 1 else 0
    ids = st.integers(0, 2**31 - 1)
    biases = st.floats(-100, 100, width=32).filter(bool)
    presence, frequency = draw(st.floats(-2, 2, width=32)), draw(st.floats(-2, 2, width=32))
    answered = tuple(draw(st.lists(ids, max_size=60))) if presence or frequency else ()
    return RowParameters(
        temperature=draw(st.floats(0, 2, width=32)),
        top_p=draw(st.floats(0, 1, width=32, exclude_min=True)),
        min_p=draw(st.floats(0, 1, width=32)),
        top_k=draw(st.integers(0, 1 << 20)),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=penalty,
        repetition_context_size=size,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(sorted(draw(st.dictionaries(ids, biases, max_size=300)).items())),
        prompt_tail=tuple(draw(st.lists(ids, max_size=min(size, 60)))),
        position=len(answered) if presence or frequency else draw(st.integers(0, 2**32 - 1)),
        answered=answered,
        logprobs=draw(st.none() | st.integers(0, 20)),
        masked_until=draw(st.integers(0, 2**32 - 1)),
        masked=tuple(sorted(draw(st.sets(ids, max_size=10)))),
        masked_always=tuple(sorted(draw(st.sets(ids, max_size=10)))),
        grids=draw(st.sampled_from([(), (), (Grid(3, 1, 4, 5),), (Grid(0, 1, 2, 1), Grid(2, 1, 1, 30))])),
    )


parameters = made()


@given(parameters, st.booleans())
def test_a_record_comes_back(row: RowParameters, apart: bool) -> None:
    record = params.encode(row, apart=apart)
    assert len(record) % BLOCK == 0
    assert len(record) == BLOCK or row.logit_bias or row.prompt_tail or row.answered
    assert params.decode(memoryview(record)) == row


def is_refused_or_canonical(record: bytes) -> bool:
    try:
        row = params.decode(record)
    except InvalidInput as error:
        return error.reason == "BAD_PARAMETERS"
    return record in (params.encode(row), params.encode(row, apart=True))


@given(
    st.binary(max_size=600)
    | st.binary(max_size=600).map(lambda rest: len(rest).to_bytes(4, "little") + rest.ljust(1020, b"\0"))
)
def test_any_bytes_are_refused_or_canonical(record: bytes) -> None:
    assert is_refused_or_canonical(record)


@given(parameters, st.integers(0, 1 << 20), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_canonical(row: RowParameters, place: int, flip: int) -> None:
    record = bytearray(params.encode(row))
    record[place % len(record)] ^= flip
    assert is_refused_or_canonical(bytes(record))


def test_token_ids_change_no_length() -> None:
    """A length that depends on token ids would show tokens of the prompt or the answer."""
    few, many = (
        RowParameters(
            repetition_penalty=2.0,
            repetition_context_size=300,
            prompt_tail=(token,) * 300,
            logit_bias=((token, 1.0),),
        )
        for token in (1, 2**31 - 1)
    )
    assert len(params.encode(few)) == len(params.encode(many))


@pytest.mark.parametrize("length", [0, 255, 257, 512])
def test_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(InvalidInput):
        params.decode(params.encode(RowParameters()).ljust(512, b"\0")[:length])


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    seeds = {params.from_sampling(inference.Sampling(temperature=1)).seed for _ in range(8)}
    assert len(seeds) == 8


def test_what_a_request_asks_for_is_taken_over() -> None:
    row = params.from_sampling(inference.Sampling(seed=5))
    assert row == RowParameters(seed=5)
    assert row.greedy
    sampling = inference.Sampling(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=9)
    assert params.from_sampling(sampling) == RowParameters(0.5, 0.25, 0.125, 7, 9)


def test_penalties_biases_and_the_prompts_end_are_taken_over() -> None:
    sampling = inference.Sampling(
        seed=1,
        repetition_penalty=1.25,
        repetition_context_size=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={9: -100.0, 4: 2.0, 5: 0.0},
        logprobs=3,
    )
    row = params.from_sampling(sampling, [7, 8, 9])
    assert (row.repetition_penalty, row.repetition_context_size, row.prompt_tail) == (1.25, 2, (8, 9))
    assert (row.presence_penalty, row.frequency_penalty) == (0.5, -0.5)
    assert row.logit_bias == ((4, 2.0), (9, -100.0))
    assert row.logprobs == 3
    assert row.adjusts
    assert params.decode(params.encode(row)) == row


def test_without_a_repetition_penalty_no_token_of_the_prompt_travels() -> None:
    for sampling in (
        inference.Sampling(seed=1, repetition_context_size=2),
        inference.Sampling(seed=1, repetition_penalty=1.0, repetition_context_size=2),
    ):
        row = params.from_sampling(sampling, [7, 8, 9])
        assert row == RowParameters(seed=1)
        assert not row.adjusts


def test_a_repetition_penalty_looks_at_twenty_tokens_unless_told() -> None:
    row = params.from_sampling(inference.Sampling(repetition_penalty=2), range(50))
    assert row.prompt_tail == tuple(range(30, 50))


GOOD = RowParameters(
    repetition_penalty=2.0, repetition_context_size=2, prompt_tail=(1,), logit_bias=((3, 1.0),)
)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 1.0},
        {"repetition_context_size": 0},
        {"repetition_context_size": 4097},
        {"prompt_tail": (1, 2, 3)},
        {"prompt_tail": (2**31,)},
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"logit_bias": ((3, 101.0),)},
        {"logit_bias": ((3, 0.0),)},
        {"logit_bias": ((3, 1.0), (3, 1.0))},
        {"logit_bias": ((4, 1.0), (3, 1.0))},
        {"logit_bias": ((2**31, 1.0),)},
        {"logit_bias": tuple((token, 1.0) for token in range(301))},
        {"logprobs": 21},
        {"masked": (3, 3)},
        {"masked_always": (4, 3)},
        {"masked": (2**31,)},
        {"masked": tuple(range(1025))},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    assert params.decode(params.encode(GOOD)) == GOOD
    with pytest.raises(InvalidInput):
        params.decode(params.encode(dataclasses.replace(GOOD, **changes)))


def test_every_member_reads_where_images_are() -> None:
    grids = (Grid(3, 1, 4, 5), Grid(23, 1, 1, 30))
    record = params.encode(RowParameters(grids=grids))
    assert params.grids_in(record) == grids
    assert params.grids_in(b"") == params.grids_in(params.encode(RowParameters())) == ()
    assert len(record) == BLOCK


@pytest.mark.parametrize("grids", [(Grid(3, 1, 4, 5), Grid(22, 1, 1, 1)), (Grid(3, 1, 0, 5),)])
def test_images_that_cannot_be_are_refused(grids: tuple[Grid, ...]) -> None:
    record = params.encode(RowParameters(grids=grids))
    for read in (params.grids_in, params.decode):
        with pytest.raises(InvalidInput) as caught:
            read(record)
        assert caught.value.reason == "BAD_PARAMETERS"
