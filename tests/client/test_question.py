"""Sampling options of the client: each reaches the prompt, or is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.client.question import MAX_TIMEOUT_SECONDS, Question, set_sampling, text_prompt
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.options import MAX_TOKENS, SamplingOptions
from sealring.mesh.prompt.validate import MAX_DEADLINE_MS, MAX_PRIORITY
from sealring.mesh.ring.composition import MAX_CHOICES
from sealring.mesh.trust.levels import MAX_SCORE
from sealring.v1 import inference_pb2 as inference


def sampling_of(**options: Any) -> inference.Prompt:
    prompt = text_prompt("x")
    set_sampling(prompt, SamplingOptions(**options))  # type: ignore[typeddict-item]
    return prompt


def test_options_reach_the_prompt() -> None:
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "seed": 4,
        "repetition_penalty": 1.5,
        "repetition_context_size": 9,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {3: -100.0, 4: 1.0},
        "num_draft_tokens": 0,
        "min_tokens": 5,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "logprobs": 0,
    }
    assert set(options) | {"stop"} == SamplingOptions.__annotations__.keys()
    prompt = sampling_of(**options, stop=["a", "b"])
    assert prompt.sampling == inference.Sampling(**options)
    assert list(prompt.stop) == ["a", "b"]
    assert list(sampling_of(stop="ab").stop) == ["ab"]


def test_nothing_is_greedy_and_none_is_nothing() -> None:
    assert sampling_of() == text_prompt("x")
    assert sampling_of(top_p=None, seed=None, logprobs=None) == text_prompt("x")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 0.5},
        {"seed": 1 << 64},
        {"logprobs": -1},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: "b"}},
        {"logit_bias": 3},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        sampling_of(**options)
    assert caught.value.reason == "BAD_SAMPLING"
    assert caught.value.metadata["param"] == next(iter(options))


def test_an_option_that_there_is_not_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        sampling_of(temprature=1.0)


def test_where_a_question_waits_reaches_the_request_or_is_refused() -> None:
    def question(**fields: int) -> Question:
        return Question(text_prompt("x"), "m", 0, 0, 5.0, b"", **fields)

    assert question(priority=-10, deadline_ms=3).priority == -10
    for fields, reason in (
        ({"priority": 11}, "BAD_PRIORITY"),
        ({"deadline_ms": -1}, "BAD_DEADLINE"),
        ({"deadline_ms": 86_400_001}, "BAD_DEADLINE"),
    ):
        with pytest.raises(InvalidInput) as caught:
            question(**fields)
        assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("max_tokens", 0, MAX_TOKENS),
        ("choices", 1, MAX_CHOICES),
        ("min_trust", 0, MAX_SCORE),
        ("priority", -MAX_PRIORITY, MAX_PRIORITY),
        ("deadline_ms", 0, MAX_DEADLINE_MS),
        ("timeout", 1e-9, MAX_TIMEOUT_SECONDS),
    ],
)
def test_numbers_of_a_question_go_from_their_least_to_their_most(
    field: str, least: float, most: float
) -> None:
    def asked(value: float) -> Question:
        fields: dict[str, Any] = {"max_tokens": 1, "min_trust": 0, "timeout": 1.0, field: value}
        return Question(text_prompt("x"), "", prefix_salt=b"", **fields)

    for value in (least, most):
        assert getattr(asked(value), field) == value
    for value in (least - 1, most + 1):
        with pytest.raises(InvalidInput):
            asked(value)


def test_what_a_question_does_not_say_asks_for_nothing() -> None:
    plain = Question(text_prompt("x"), "demo", 0, 0, 5.0, b"salt")
    assert (plain.priority, plain.deadline_ms, plain.choices, plain.routing_key) == (0, 0, 1, b"")
