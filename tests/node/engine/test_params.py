from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import InvalidInput
from node.engine import params
from node.engine.params import BLOCK, RowParameters
from sealring.v1 import inference_pb2 as inference

parameters = st.builds(
    RowParameters,
    temperature=st.floats(0, 2, width=32),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    min_p=st.floats(0, 1, width=32),
    top_k=st.integers(0, 2**31 - 1),
    seed=st.integers(0, 2**64 - 1),
)


@given(parameters)
def test_a_record_comes_back(row: RowParameters) -> None:
    record = params.encode(row)
    assert len(record) == BLOCK
    assert params.decode(memoryview(record)) == row


def is_refused_or_canonical(record: bytes) -> bool:
    try:
        row = params.decode(record)
    except InvalidInput as error:
        return error.reason == "BAD_PARAMETERS"
    return params.encode(row) == record


@given(st.binary(max_size=600))
def test_any_bytes_are_refused_or_canonical(record: bytes) -> None:
    assert is_refused_or_canonical(record)


@given(parameters, st.integers(0, BLOCK - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_canonical(row: RowParameters, place: int, flip: int) -> None:
    record = bytearray(params.encode(row))
    record[place] ^= flip
    assert is_refused_or_canonical(bytes(record))


@pytest.mark.parametrize("length", [0, 255, 257, 512])
def test_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(InvalidInput):
        params.decode(params.encode(RowParameters()).ljust(512, b"\0")[:length])


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    seeds = {params.from_sampling(inference.Sampling(temperature=1)).seed for _ in range(8)}
    assert len(seeds) == 8


def test_defaults_are_greedy_and_off() -> None:
    row = params.from_sampling(inference.Sampling(seed=5))
    assert row == RowParameters(seed=5)
    assert row.greedy


def test_what_a_request_asks_for_is_taken_over() -> None:
    sampling = inference.Sampling(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, seed=9)
    assert params.from_sampling(sampling) == RowParameters(0.5, 0.25, 0.125, 7, 9)
