"""Numbers of a request: by one table they have bounds and reach the contract."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.numbers import BOUNDS, numbers_of, request_of
from sealring.v1 import inference_pb2 as inference

REASONS = {
    "max_tokens": "BAD_MAX_TOKENS",
    "min_trust": "BAD_MIN_TRUST",
    "n": "BAD_CHOICES",
    "priority": "BAD_PRIORITY",
    "deadline_ms": "BAD_DEADLINE",
    "keep_alive": "BAD_KEEP_ALIVE",
}


@pytest.mark.parametrize("name", BOUNDS)
def test_a_number_goes_from_its_least_to_its_most(name: str) -> None:
    bounds = BOUNDS[name]
    for value in (bounds.least, bounds.most):
        assert numbers_of(request_of({name: value})).get(name, 0) == value
    for value in (bounds.least - 1, bounds.most + 1):
        with pytest.raises(InvalidInput) as caught:
            request_of({name: value})
        assert caught.value.reason == REASONS[name]
        assert caught.value.metadata["param"] == name


@given(st.fixed_dictionaries({}, optional={n: st.integers(b.least, b.most) for n, b in BOUNDS.items()}))
def test_all_numbers_reach_the_contract_and_come_back(numbers: Any) -> None:
    request = request_of(numbers)
    assert request_of(numbers_of(request)) == request
    assert request.choices == numbers.get("n", 1)
    assert request.priority == numbers.get("priority", 0)
    assert request.HasField("keep_alive") == ("keep_alive" in numbers)


def test_what_is_left_out_asks_for_nothing() -> None:
    unset: Any = dict.fromkeys(BOUNDS)
    assert request_of({}) == request_of(unset) == inference.GenerateRequest(choices=1)


def test_there_are_no_others() -> None:
    with pytest.raises(TypeError, match="prioriti"):
        request_of({"prioriti": 1})
