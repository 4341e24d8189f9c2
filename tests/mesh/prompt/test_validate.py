"""Prompts from outside: what passes, what does not, and that no error repeats content."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import (
    MAX_CONTENT_BYTES,
    MAX_MESSAGES,
    MAX_PREDICTION_BYTES,
    check_text_envelope,
    validate_prompt,
    validate_prompt_cache_key,
    validate_request,
    validate_request_id,
)
from sealring.mesh.trust.levels import MAX_SCORE
from sealring.v1 import inference_pb2 as inference


def chat(*messages: tuple[str, str]) -> inference.Prompt:
    return inference.Prompt(
        chat=inference.Chat(messages=[inference.ChatMessage(role=r, content=c) for r, c in messages])
    )


def refused(prompt: inference.Prompt) -> tuple[str, str]:
    with pytest.raises(InvalidInput) as caught:
        validate_prompt(prompt)
    assert "SECRET" not in str(caught.value)
    return caught.value.reason, caught.value.metadata["param"]


def test_good_prompts_pass() -> None:
    validate_prompt(chat(("system", ""), ("user", "SECRET"), ("assistant", "y"), ("user", "z")))
    prompt = inference.Prompt(text="once upon a time", stop=["\n", "x" * 256])
    prompt.sampling.CopyFrom(inference.Sampling(temperature=2, top_p=1, top_k=0, min_p=0, seed=(1 << 64) - 1))
    validate_prompt(prompt)


def test_empty_prompts() -> None:
    assert refused(inference.Prompt()) == ("EMPTY_PROMPT", "prompt")
    assert refused(inference.Prompt(text="")) == ("EMPTY_PROMPT", "prompt")
    assert refused(inference.Prompt(tokens=inference.TokenIds())) == ("EMPTY_PROMPT", "prompt")
    validate_prompt(chat(("user", "hello"), ("assistant", "")))
    assert refused(chat()) == ("EMPTY_PROMPT", "messages")
    assert refused(chat(("user", ""), ("assistant", ""))) == ("EMPTY_PROMPT", "messages")


def test_roles() -> None:
    for role in ("", "function", "User", "SECRET"):
        assert refused(chat(("user", "x"), (role, "x"))) == ("BAD_ROLE", "messages[1].role")


def test_lengths_are_bytes_of_all_messages() -> None:
    half = "é" * (MAX_CONTENT_BYTES // 4)
    validate_prompt(chat(("user", half), ("assistant", half)))
    assert refused(chat(("user", half), ("user", half + "x"))) == ("CONTENT_TOO_LONG", "messages[1].content")
    assert refused(inference.Prompt(text="x" * (MAX_CONTENT_BYTES + 1)))[0] == "CONTENT_TOO_LONG"
    predicted = inference.Prompt(text="x", prediction="é" * (MAX_PREDICTION_BYTES // 2))
    validate_prompt(predicted)
    predicted.prediction += "x"
    assert refused(predicted) == ("PREDICTION_TOO_LONG", "prediction")
    assert refused(chat(*[("user", "x")] * (MAX_MESSAGES + 1)))[0] == "TOO_MANY_MESSAGES"


def test_log_probabilities_of_a_prompt_need_those_of_the_answer() -> None:
    for sampling, good in (
        ({"prompt_logprobs": True}, False),
        ({"prompt_logprobs": True, "logprobs": 0}, True),
        ({"logprobs": 0}, True),
    ):
        prompt = inference.Prompt(text="x", sampling=inference.Sampling(**sampling))
        if good:
            validate_prompt(prompt)
        else:
            assert refused(prompt) == ("BAD_SAMPLING", "logprobs")


def test_prompts_of_tokens_are_as_long_as_their_bytes() -> None:
    most = MAX_CONTENT_BYTES // 4
    validate_prompt(inference.Prompt(tokens=inference.TokenIds(ids=[7] * most)))
    long = inference.Prompt(tokens=inference.TokenIds(ids=[7] * (most + 1)))
    assert refused(long) == ("CONTENT_TOO_LONG", "prompt")


def test_request_ids() -> None:
    for good in ("a", "A-z_09", "x" * 64):
        validate_request_id(good)
    for bad in ("", "x" * 65, "a b", "a\n", "é", "a/b"):
        with pytest.raises(InvalidInput):
            validate_request_id(bad)


@given(st.binary(max_size=300))
def test_any_message_passes_or_is_refused(data: bytes) -> None:
    prompt = inference.Prompt()
    try:
        prompt.ParseFromString(data)
    except Exception:
        return
    try:
        validate_prompt(prompt)
    except InvalidInput as error:
        assert error.metadata["param"]  # noqa: PT017
    else:
        assert prompt.WhichOneof("input")


def test_a_cache_key_is_taken_up_to_its_length_and_beside_no_sealed_prompt() -> None:
    for key, sealed, good in (
        ("", False, True),
        ("", True, True),
        ("x" * 256, False, True),
        ("x" * 257, False, False),
        ("x", True, False),
    ):
        if good:
            validate_prompt_cache_key(key, sealed=sealed)
        else:
            with pytest.raises(InvalidInput) as caught:
                validate_prompt_cache_key(key, sealed=sealed)
            assert caught.value.reason == "BAD_PROMPT_CACHE_KEY"


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 2], [-0.01, 2.01, math.nan, math.inf, -math.inf, 1e30]),
        ("top_p", [0.01, 1], [0, 1.01, math.nan, math.inf]),
        ("min_p", [0, 1], [-0.01, 1.01, math.nan]),
        ("top_k", [0, 1 << 20], [(1 << 20) + 1]),
        ("logprobs", [0, 20], [21]),
        ("num_draft_tokens", [0, 256], [257]),
        ("min_tokens", [0, (1 << 31) - 1], [1 << 31]),
        ("stop_token_ids", [[0, (1 << 31) - 1], [1] * 16], [[1 << 31], [1] * 17]),
        ("repetition_penalty", [0.11, 10], [0.09, 10.01, math.nan]),
        ("repetition_context_size", [1, 4096], [0, 4097]),
        ("presence_penalty", [-2, 2], [-2.01, 2.01, math.nan]),
        ("frequency_penalty", [-2, 2], [-2.01, 2.01, math.nan]),
    ],
)
def test_a_number_is_taken_up_to_its_bounds(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        validate_prompt(inference.Prompt(text="x", sampling=inference.Sampling(**{field: value})))
    for value in bad:
        prompt = inference.Prompt(text="x", sampling=inference.Sampling(**{field: value}))
        assert refused(prompt) == ("BAD_SAMPLING", field)


def test_biases_are_taken_up_to_their_bounds() -> None:
    for biases, good in (
        (dict.fromkeys(range(300), 1.0), True),
        (dict.fromkeys(range(301), 1.0), False),
        ({(1 << 31) - 1: 100.0}, True),
        ({1 << 31: 1.0}, False),
        ({1: math.nan}, False),
        ({1: -100.0}, True),
        ({1: -100.1}, False),
    ):
        prompt = inference.Prompt(text="x", sampling=inference.Sampling(logit_bias=biases))
        if good:
            validate_prompt(prompt)
        else:
            assert refused(prompt) == ("BAD_SAMPLING", "logit_bias")


def test_messages_and_stops_are_taken_up_to_their_numbers() -> None:
    validate_prompt(chat(*[("user", "x")] * 4096))
    validate_prompt(inference.Prompt(text="x", stop=["s"] * 16))
    assert refused(inference.Prompt(text="x", stop=["s"] * 17))[1].startswith("stop")
    for stop in ("", "x" * 257, "SECRET" * 50):
        assert refused(inference.Prompt(text="x", stop=["s", stop])) == ("BAD_STOP", "stop[1]")


@pytest.mark.parametrize(
    ("field", "good", "bad", "reason"),
    [
        ("max_tokens", [0, (1 << 31) - 1], [1 << 31], "BAD_MAX_TOKENS"),
        ("priority", [-10, 0, 10], [-11, 11], "BAD_PRIORITY"),
        ("deadline_ms", [0, 86_400_000], [86_400_001], "BAD_DEADLINE"),
        ("choices", [0, 8], [9], "BAD_CHOICES"),
        ("min_trust", [0, MAX_SCORE], [MAX_SCORE + 1], "BAD_MIN_TRUST"),
        ("request_id", ["", "x" * 64], ["x" * 65, "a b"], "BAD_REQUEST_ID"),
        ("prompt_cache_key", ["", "x" * 256], ["x" * 257], "BAD_PROMPT_CACHE_KEY"),
    ],
)
def test_a_requests_numbers_are_taken_up_to_their_bounds(
    field: str, good: list[object], bad: list[object], reason: str
) -> None:
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    for value in good:
        validate_request(inference.GenerateRequest(envelope=envelope, **{field: value}))
    for value in bad:
        with pytest.raises(InvalidInput) as caught:
            validate_request(inference.GenerateRequest(envelope=envelope, **{field: value}))
        assert caught.value.reason == reason


def test_an_envelope_holds_something_and_not_too_much() -> None:
    validate_request(inference.GenerateRequest(envelope=inference.Envelope(sealed=bytes(32 << 20))))
    for envelope, reason in (
        (inference.Envelope(sealed=bytes((32 << 20) + 1)), "ENVELOPE_TOO_LONG"),
        (inference.Envelope(sealed=b""), "EMPTY_ENVELOPE"),
        (inference.Envelope(), "EMPTY_ENVELOPE"),
        (inference.Envelope(clear=inference.Prompt()), "EMPTY_PROMPT"),
    ):
        with pytest.raises(InvalidInput) as caught:
            validate_request(inference.GenerateRequest(envelope=envelope))
        assert caught.value.reason == reason


def test_an_envelope_for_a_model_that_cannot_see_holds_a_text() -> None:
    check_text_envelope(bytes(8 << 20))
    with pytest.raises(InvalidInput) as caught:
        check_text_envelope(bytes((8 << 20) + 1))
    assert caught.value.reason == "ENVELOPE_TOO_LONG"


def test_no_client_of_a_gateway_says_how_far_its_answer_has_come() -> None:
    """It would be believed by the head, and not by the gateway's scheduler."""
    prompt = inference.Prompt(text="once", resume=inference.Resume(tokens=[1]))
    validate_prompt(prompt)
    with pytest.raises(InvalidInput) as caught:
        validate_request(inference.GenerateRequest(envelope=inference.Envelope(clear=prompt)))
    assert caught.value.reason == "BAD_RESUME"
