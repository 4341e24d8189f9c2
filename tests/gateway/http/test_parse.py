"""The request parser: every field, and bodies that hypothesis makes up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sealring.gateway.http.body import MAX_DIGITS, parse_object
from sealring.gateway.http.parse import ChatBody, CompletionBody, chat_request, completion_request, parse_body
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import validate_request
from sealring.v1 import inference_pb2 as inference

GOOD: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


def parse(body: dict[str, Any]) -> inference.GenerateRequest:
    """What the edge and the backend do with a chat's body."""
    request = chat_request(parse_body(body, ChatBody), "id")
    validate_request(request)
    return request


def test_a_developer_speaks_as_the_system_and_nobody_else_does() -> None:
    roles = ["developer", "system", "user", "assistant"]
    body = {"model": "demo", "messages": [{"role": role, "content": "x"} for role in [*roles, "user"]]}
    found = [message.role for message in parse(body).envelope.clear.chat.messages]
    assert found == ["system", "system", "user", "assistant", "user"]


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"SECRET_x": 1}, "unknown_field", "SECRET_x"),
    ({"messages": []}, "bad_field", "messages"),
    ({"messages": "hello"}, "bad_field", "messages"),
    ({"messages": [{"role": "robot", "content": "SECRET"}]}, "bad_field", "messages[0].role"),
    ({"messages": [{"role": "user", "content": ""}]}, "empty_prompt", "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "bad_field", "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "bad_field", "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "bad_field",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "SECRET": 1}]}, "unknown_field", "messages[0].SECRET"),
    ({"temperature": -1}, "bad_field", "temperature"),
    ({"temperature": 2.1}, "bad_field", "temperature"),
    ({"temperature": 1e400}, "bad_field", "temperature"),
    ({"temperature": "hot"}, "bad_field", "temperature"),
    ({"temperature": True}, "bad_field", "temperature"),
    ({"top_p": 0}, "bad_field", "top_p"),
    ({"top_p": 1e-60}, "bad_sampling", "top_p"),
    ({"top_k": -2}, "bad_field", "top_k"),
    ({"min_p": 1.5}, "bad_field", "min_p"),
    ({"seed": 1 << 65}, "bad_field", "seed"),
    ({"seed": 0.5}, "bad_field", "seed"),
    ({"max_tokens": 0}, "bad_field", "max_tokens"),
    ({"max_tokens": -5}, "bad_field", "max_tokens"),
    ({"max_tokens": 10**12}, "bad_field", "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "bad_field", "max_completion_tokens"),
    ({"stop": ["x"] * 17}, "bad_field", "stop"),
    ({"stop": ""}, "bad_stop", "stop[0]"),
    ({"stop": ["x" * 257]}, "bad_stop", "stop[0]"),
    ({"stop": [1]}, "bad_field", "stop[0]"),
    ({"stream": "yes"}, "bad_field", "stream"),
    ({"stream_options": {"include_usage": True}}, "bad_field", "stream_options"),
    ({"n": 9}, "bad_field", "n"),
    ({"n": 0}, "bad_field", "n"),
    ({"n": True}, "bad_field", "n"),
    ({"logprobs": 1}, "bad_field", "logprobs"),
    ({"top_logprobs": 3}, "bad_field", "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 3}, "bad_field", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "bad_field", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "bad_field", "top_logprobs"),
    ({"presence_penalty": 2.01}, "bad_field", "presence_penalty"),
    ({"frequency_penalty": -2.01}, "bad_field", "frequency_penalty"),
    ({"frequency_penalty": "0"}, "bad_field", "frequency_penalty"),
    ({"repetition_penalty": -1}, "bad_field", "repetition_penalty"),
    ({"repetition_penalty": 11}, "bad_field", "repetition_penalty"),
    ({"repetition_penalty": 0.05}, "bad_sampling", "repetition_penalty"),
    ({"repetition_context_size": 0}, "bad_field", "repetition_context_size"),
    ({"repetition_context_size": 4097}, "bad_field", "repetition_context_size"),
    ({"logit_bias": {"1": 100.5}}, "bad_sampling", "logit_bias"),
    ({"logit_bias": {"1": float("nan")}}, "bad_sampling", "logit_bias"),
    ({"logit_bias": {"1": "SECRET"}}, "bad_field", "logit_bias"),
    ({"logit_bias": {"SECRET": 1}}, "bad_field", "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "bad_field", "logit_bias"),
    ({"logit_bias": {"01": 1}}, "bad_field", "logit_bias"),
    ({"logit_bias": {"2147483648": 1}}, "bad_field", "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "bad_field", "logit_bias"),
    ({"logit_bias": [1]}, "bad_field", "logit_bias"),
    ({"presence_context_size": 20}, "unsupported_field", "presence_context_size"),
    ({"guided_json": {}}, "unsupported_field", "guided_json"),
    ({"ignore_eos": True}, "unsupported_field", "ignore_eos"),
    ({"priority": 11}, "bad_field", "priority"),
    ({"priority": -11}, "bad_field", "priority"),
    ({"priority": 0.5}, "bad_field", "priority"),
    ({"deadline_ms": 0}, "bad_field", "deadline_ms"),
    ({"deadline_ms": 86_400_001}, "bad_field", "deadline_ms"),
    ({"min_tokens": 3}, "unsupported_field", "min_tokens"),
    ({"xtc_probability": 0.5}, "unsupported_field", "xtc_probability"),
    ({"stop_token_ids": [2]}, "unsupported_field", "stop_token_ids"),
    ({"tools": [{"type": "function"}]}, "unsupported_field", "tools"),
    ({"response_format": {"type": "json_object"}}, "unsupported_field", "response_format"),
    ({"model": 3}, "bad_field", "model"),
    ({"user": "x" * 300}, "bad_field", "user"),
    ({"prompt_cache_key": "x" * 257}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": "x" * 10_240}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": "\ud800"}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": b"\xff"}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": 7}, "bad_field", "prompt_cache_key"),
]


@pytest.mark.parametrize(("change", "code", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_bad_fields(change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse({**GOOD, **change})
    assert caught.value.reason == code.upper()
    assert caught.value.metadata["param"].startswith(param)
    assert "SECRET" not in caught.value.message.replace(param, "")


def test_neutral_fields_pass() -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "metadata": None,
        "service_tier": "auto",
        "reasoning_effort": None,
        "repetition_penalty": 0,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "chat_template_kwargs": {},
        "min_tokens": 0,
        "safety_identifier": "abc",
    }
    assert parse({**GOOD, **neutral}) == parse(GOOD)


def test_where_it_waits_is_taken_over() -> None:
    request = parse({**GOOD, "priority": -10, "deadline_ms": 86_400_000})
    assert (request.priority, request.deadline_ms) == (-10, 86_400_000)
    assert (parse(GOOD).priority, parse(GOOD).deadline_ms) == (0, 0)


def test_a_cache_key_is_taken_over_and_none_is_not_an_empty_one() -> None:
    assert parse({**GOOD, "prompt_cache_key": "\0 \u2028 key"}).prompt_cache_key == "\0 \u2028 key"
    assert parse({**GOOD, "prompt_cache_key": ""}).HasField("prompt_cache_key")
    for body in (GOOD, {**GOOD, "prompt_cache_key": None}):
        assert not parse(body).HasField("prompt_cache_key")


def test_sampling_fields_are_taken_over() -> None:
    asked = parse(
        {
            **GOOD,
            "repetition_penalty": 1.25,
            "repetition_context_size": 4096,
            "presence_penalty": -2,
            "frequency_penalty": 2,
            "logit_bias": {"0": -100, "50256": 100, "7": 0.5},
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).envelope.clear.sampling
    assert asked == inference.Sampling(
        temperature=1.0,
        repetition_penalty=1.25,
        repetition_context_size=4096,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100, 50256: 100, 7: 0.5},
        logprobs=20,
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_what_a_chat_asks_of_log_probabilities(fields: dict[str, Any], expected: int | None) -> None:
    sampling = parse({**GOOD, **fields}).envelope.clear.sampling
    assert (sampling.logprobs if sampling.HasField("logprobs") else None) == expected


@pytest.mark.parametrize("logprobs", [6, -1, True, "1"])
def test_a_completion_is_told_at_most_five(logprobs: Any) -> None:
    base = {"model": "demo", "prompt": "x"}
    body = parse_body({**base, "logprobs": 5}, CompletionBody)
    assert completion_request(body, "id").envelope.clear.sampling.logprobs == 5
    with pytest.raises(InvalidInput) as caught:
        parse_body({**base, "logprobs": logprobs}, CompletionBody)
    assert caught.value.metadata["param"] == "logprobs"


def test_completion_defaults() -> None:
    request = completion_request(parse_body({"model": "demo", "prompt": "x"}, CompletionBody), "id")
    assert request.max_tokens == 16
    assert request.envelope.clear.sampling.temperature == 1.0
    assert not request.envelope.clear.sampling.HasField("seed")
    with pytest.raises(InvalidInput):
        parse_body({"model": "demo", "prompt": ["a", "b"]}, CompletionBody)
    with pytest.raises(InvalidInput):
        parse_body({"model": "demo", "prompt": [1, 2]}, CompletionBody)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "robot"}] * 4096},
        {"messages": [{"role": "user", "content": [0] * 1024}]},
    ],
)
def test_of_a_list_only_the_first_fault_is_looked_for(fields: dict[str, Any]) -> None:
    """Each fault costs an object of its own, and only one is told."""
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({**GOOD, **fields})
    assert caught.value.error_count() < 10


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 10**MAX_DIGITS, 10**MAX_DIGITS - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields, "n", "tools", "logprobs"])
bodies = st.dictionaries(names | st.text(max_size=8), json_values, max_size=8)


@given(changes=bodies)
def test_any_object_parses_or_is_refused(changes: dict[str, Any]) -> None:
    for base in (GOOD, {}):
        for model, make in ((ChatBody, chat_request), (CompletionBody, completion_request)):
            try:
                request = make(parse_body({**base, **changes}, model), "id")  # type: ignore[operator]
                validate_request(request)
            except InvalidInput:
                continue
            else:
                assert request.SerializeToString()


@given(json_values)
def test_objects_are_taken_and_nothing_else(value: Any) -> None:
    body = json.dumps(value).encode()
    if isinstance(value, dict):
        assert parse_object(body) == value
    else:
        with pytest.raises(InvalidInput):
            parse_object(body)


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    try:
        parsed = parse_object(body)
    except InvalidInput:
        return
    assert parsed == json.loads(body)
