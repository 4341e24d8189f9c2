"""The request parser: every field, and bodies that hypothesis makes up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sealring.api.chat import ChatBody, ask_chat, chat_request, parse_chat
from sealring.api.completions import ask_completion, completion_requests, parse_completion
from sealring.api.fields import renamed
from sealring.edge.http.body import MAX_DIGITS, parse_object
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import validate_request
from sealring.v1 import inference_pb2 as inference

GOOD: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


def parse(body: dict[str, Any]) -> inference.GenerateRequest:
    """What the edge and the backend do with a chat's body."""
    asked = ask_chat(body, "id")
    try:
        validate_request(asked.request)
    except InvalidInput as error:
        raise renamed(error, asked.names) from None
    return asked.request


def test_a_developer_speaks_as_the_system_and_nobody_else_does() -> None:
    roles = ["developer", "system", "user", "assistant"]
    body = {"model": "demo", "messages": [{"role": role, "content": "x"} for role in [*roles, "user"]]}
    found = [message.role for message in parse(body).envelope.clear.chat.messages]
    assert found == ["system", "system", "user", "assistant", "user"]


def test_a_model_of_null_is_the_only_one() -> None:
    assert parse(GOOD | {"model": None}) == parse({"messages": GOOD["messages"]})


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"SECRET_x": 1}, "unknown_field", "SECRET_x"),
    ({"messages": []}, "bad_field", "messages"),
    ({"messages": "hello"}, "bad_field", "messages"),
    ({"messages": [{"role": "robot", "content": "SECRET"}]}, "bad_field", "messages[0].role"),
    ({"messages": [{"role": "user", "content": ""}]}, "empty_prompt", "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "empty_prompt", "messages"),
    ({"messages": [{"role": "user", "content": []}]}, "empty_prompt", "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "unsupported_content",
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": "x", "SECRET": 1}]}, "unknown_field", "messages[0].SECRET"),
    ({"temperature": -1}, "bad_field", "temperature"),
    ({"temperature": 2.1}, "bad_field", "temperature"),
    ({"temperature": 1e400}, "bad_field", "temperature"),
    ({"temperature": "hot"}, "bad_field", "temperature"),
    ({"temperature": True}, "bad_field", "temperature"),
    ({"top_p": -1}, "bad_field", "top_p"),
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
    ({"stream_options": {"include_used": True}}, "unknown_field", "stream_options.include_used"),
    ({"repeat_penalty": "x"}, "bad_field", "repeat_penalty"),
    ({"repeat_penalty": 0.05}, "bad_sampling", "repeat_penalty"),
    ({"repeat_penalty": 1.5, "repetition_penalty": 1.25}, "bad_field", "repeat_penalty"),
    ({"guided_json": [1]}, "bad_field", "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "unsupported_field", "structured_outputs.regex"),
    (
        {"messages": [{"role": "user", "content": "x", "prefix": True}]},
        "bad_field",
        "messages[0]",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "content": "x", "prefix": True},
                {"role": "user", "content": "x"},
            ]
        },
        "bad_field",
        "messages[0].prefix",
    ),
    ({"continue_final_message": True}, "bad_field", "messages[0]"),
    ({"add_generation_prompt": False}, "unsupported_field", "add_generation_prompt"),
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
    ({"guided_regex": "a"}, "unsupported_field", "guided_regex"),
    ({"ignore_eos": 1}, "bad_field", "ignore_eos"),
    ({"priority": 11}, "bad_field", "priority"),
    ({"priority": -11}, "bad_field", "priority"),
    ({"priority": 0.5}, "bad_field", "priority"),
    ({"deadline_ms": 0}, "bad_field", "deadline_ms"),
    ({"deadline_ms": 86_400_001}, "bad_field", "deadline_ms"),
    ({"min_tokens": -1}, "bad_field", "min_tokens"),
    ({"xtc_probability": 0.5}, "unsupported_field", "xtc_probability"),
    ({"stop_token_ids": [-1]}, "bad_field", "stop_token_ids[0]"),
    ({"tools": [{"type": "function"}]}, "missing_field", "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "bad_field", "tools[0].type"),
    ({"response_format": {"type": "grammar"}}, "bad_field", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "bad_field", "response_format.json_schema.schema"),
    ({"model": 3}, "bad_field", "model"),
    ({"user": "x" * 300}, "bad_field", "user"),
    ({"prompt_cache_key": "x" * 257}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": "x" * 10_240}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": "\ud800"}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": b"\xff"}, "bad_field", "prompt_cache_key"),
    ({"prompt_cache_key": 7}, "bad_field", "prompt_cache_key"),
]


LIMITS: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 2], [-0.01, 2.01]),
    ("top_p", [0, 0.01, 1], [-0.01, 1.01]),
    ("top_k", [-1, 0, 1 << 20], [-2, (1 << 20) + 1]),
    ("min_p", [0, 1], [-0.01, 1.01]),
    ("n", [1, 8], [0, 9]),
    ("seed", [-(1 << 63), (1 << 64) - 1], [-(1 << 63) - 1, 1 << 64]),
    ("max_tokens", [-1, 1, (1 << 31) - 1], [0, -2, 1 << 31]),
    ("max_completion_tokens", [-1, 1, (1 << 31) - 1], [0, -2, 1 << 31]),
    ("presence_penalty", [-2, 2], [-2.01, 2.01]),
    ("frequency_penalty", [-2, 2], [-2.01, 2.01]),
    ("repetition_penalty", [0, 10], [-0.01, 10.01]),
    ("repetition_context_size", [1, 4096], [0, 4097]),
    ("min_tokens", [0, (1 << 31) - 1], [-1, 1 << 31]),
    ("stop_token_ids", [[], [0, (1 << 31) - 1], [1] * 16], [[1 << 31], [1] * 17]),
    ("priority", [-10, 10], [-11, 11]),
    ("deadline_ms", [1, 86_400_000], [0, 86_400_001]),
    ("min_trust", [0, 30], [-1, 31]),
    ("stop", ["x", ["x"] * 16], [["x"] * 17]),
    ("user", ["x" * 256], ["x" * 257]),
    ("prompt_cache_key", ["x" * 256], ["x" * 257]),
    ("logit_bias", [{str(token): 1 for token in range(300)}, {"2147483647": 1}], [{"2147483648": 1}]),
    ("messages", [[{"role": "user", "content": "x"}] * 4096], [[{"role": "user", "content": "x"}] * 4097]),
]


@pytest.mark.parametrize(("field", "taken", "refused"), LIMITS)
def test_a_field_is_taken_up_to_its_limits(field: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        parse_chat({**GOOD, field: value})
        chat_request(parse_chat({**GOOD, field: value}), "id")
    for value in refused:
        with pytest.raises(InvalidInput) as caught:
            chat_request(parse_chat({**GOOD, field: value}), "id")
        assert caught.value.metadata["param"].startswith(field)


def test_a_message_has_so_many_parts_and_so_long_a_name() -> None:
    part = {"type": "text", "text": "x"}
    for message, good in (
        ({"content": [part] * 1024}, True),
        ({"content": [part] * 1025}, False),
        ({"content": "x", "name": "n" * 64}, True),
        ({"content": "x", "name": "n" * 65}, False),
    ):
        body = {"model": "demo", "messages": [{"role": "user", **message}]}
        if good:
            parse(body)
        else:
            with pytest.raises(InvalidInput):
                parse(body)


NEUTRAL: dict[str, tuple[list[Any], list[Any]]] = {
    "best_of": ([1, 1.0], [0, 2, True, "1"]),
    "echo": ([False], [True, 0]),
    "suffix": ([""], ["x"]),
    "functions": ([[]], [[{}]]),
    "function_call": (["none", "auto"], [{}]),
    "modalities": ([["text"]], [["audio"], []]),
    "audio": ([], [{}]),
    "web_search_options": ([], [{}]),
    "cache_salt": ([""], ["x"]),
    "guided_choice": ([], [["a"], []]),
    "mirostat": ([0], [1, 2, False]),
    "tfs_z": ([1, 1.0], [0.5]),
    "separate_reasoning": ([True], [False]),
    "add_special_tokens": ([], [True, False]),
    "allowed_token_ids": ([], [[]]),
    "bad_words": ([[]], [["x"]]),
    "chat_template": ([], ["x"]),
    "include_stop_str_in_output": ([False], [True]),
    "length_penalty": ([1, 1.0], [0, 2]),
    "logits_processors": ([[]], [["x"]]),
    "prompt_logprobs": ([], [0]),
    "return_tokens_as_token_ids": ([False], [True]),
    "skip_special_tokens": ([True], [False]),
    "spaces_between_special_tokens": ([True], [False]),
    "truncate_prompt_tokens": ([], [1]),
    "use_beam_search": ([False], [True]),
    "adapters": ([], ["x"]),
    "xtc_probability": ([0, 0.0], [1, 0.5]),
    "xtc_threshold": ([0.1], [0.2]),
}


@pytest.mark.parametrize("field", NEUTRAL)
def test_what_is_not_served_is_taken_where_it_asks_for_nothing(field: str) -> None:
    taken, refused = NEUTRAL[field]
    for value in (None, *taken):
        assert parse({**GOOD, field: value}) == parse(GOOD)
    for value in refused:
        with pytest.raises(InvalidInput) as caught:
            parse({**GOOD, field: value})
        assert (caught.value.reason, caught.value.metadata["param"]) == ("UNSUPPORTED_FIELD", field)


def test_a_completion_takes_no_chats_log_probabilities() -> None:
    base = {"model": "demo", "prompt": "x"}
    for value in (None, 0):
        assert parse_completion({**base, "top_logprobs": value})
    for value in (1, False):
        with pytest.raises(InvalidInput):
            parse_completion({**base, "top_logprobs": value})
    body = parse_completion({**base, "prompt": ["y"], "logprobs": 0, "max_tokens": 3})
    (request,) = completion_requests(body, "id")
    assert (request.envelope.clear.text, request.max_tokens, request.request_id) == ("y", 3, "id")
    assert request.envelope.clear.sampling.HasField("logprobs")
    for prompt in ([], [[]], ["a", 1], [1, "a"], [[1], "a"], [-1], [True], ["a"] * 65):
        with pytest.raises(InvalidInput):
            parse_completion({**base, "prompt": prompt})


def test_what_is_left_out_or_means_off_is_as_documented() -> None:
    plain = parse(GOOD)
    assert (plain.choices, plain.max_tokens, plain.min_trust) == (1, 0, 0)
    sampling = plain.envelope.clear.sampling
    assert not any(sampling.HasField(name) for name in ("seed", "logprobs"))
    asked = parse({**GOOD, "n": 3, "min_trust": 20, "max_completion_tokens": 5, "max_tokens": 5, "stop": "x"})
    assert (asked.choices, asked.max_tokens, asked.min_trust) == (3, 5, 20)
    assert list(asked.envelope.clear.stop) == ["x"]
    found = parse({**GOOD, "top_k": -1, "seed": -1, "top_p": 0.5, "min_p": 0.25}).envelope.clear.sampling
    assert (found.top_k, found.seed, found.top_p, found.min_p) == (0, (1 << 64) - 1, 0.5, 0.25)


def test_what_is_told_of_a_fault_is_short() -> None:
    for name, expected in (("x" * 65, "x" * 64), ("x" * 64, "x" * 64)):
        with pytest.raises(InvalidInput) as caught:
            parse_chat({**GOOD, name: 1})
        assert caught.value.metadata["param"] == expected
    with pytest.raises(InvalidInput) as caught:
        parse({**GOOD, "messages": [{"role": "user", "content": "x", "y" * 200: 1}]})
    assert caught.value.metadata["param"] == f"messages[0].{'y' * 64}"
    with pytest.raises(InvalidInput, match="model is refused: input should be a valid string"):
        parse_chat({**GOOD, "model": 3})


def test_whether_usage_is_told() -> None:
    for options, expected in ((None, False), ({}, False), ({"include_usage": True}, True)):
        body = parse_chat({**GOOD, "stream": True, "stream_options": options})
        assert body.include_usage is expected


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
        "service_tier": "auto",
        "metadata": {"a": "b"},
        "reasoning_effort": None,
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
            "min_tokens": 8,
            "ignore_eos": True,
            "stop_token_ids": [7, 8],
        }
    ).envelope.clear.sampling
    assert asked == inference.Sampling(
        temperature=1.0,
        unnamed=0b11110,  # temperature, top_p, top_k, min_p
        repetition_penalty=1.25,
        repetition_context_size=4096,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -100, 50256: 100, 7: 0.5},
        logprobs=20,
        min_tokens=8,
        ignore_eos=True,
        stop_token_ids=[7, 8],
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
    body = parse_completion({**base, "logprobs": 5})
    assert completion_requests(body, "id")[0].envelope.clear.sampling.logprobs == 5
    with pytest.raises(InvalidInput) as caught:
        parse_completion({**base, "logprobs": logprobs})
    assert caught.value.metadata["param"] == "logprobs"


def test_completion_defaults() -> None:
    (request,) = completion_requests(parse_completion({"model": "demo", "prompt": "x"}), "id")
    assert request.max_tokens == 16
    assert request.envelope.clear.sampling.temperature == 1.0
    assert not request.envelope.clear.sampling.HasField("seed")


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, found: list[Any]) -> None:
    asked = ask_completion({"model": "demo", "prompt": prompt, "n": 2}, "id")
    requests = [asked.request, *asked.others]
    for request in requests:
        validate_request(request)
    clear = [request.envelope.clear for request in requests]
    assert [one.text or list(one.tokens.ids) for one in clear] == found
    assert len({request.request_id for request in requests}) == len(found)
    assert asked.choices == 2 * len(found)


@pytest.mark.parametrize(
    ("change", "param"), [({"prompt": [1], "echo": True}, "echo"), ({"max_tokens": 0}, "max_tokens")]
)
def test_an_echo_that_cannot_be_told_is_refused(change: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ask_completion({"model": "demo", "prompt": "x", **change}, "id")
    assert caught.value.metadata["param"] == param


def test_a_prompt_is_told_with_its_log_probabilities() -> None:
    asked = ask_completion({"prompt": [[5, 6]], "echo": True, "logprobs": 0, "max_tokens": 0}, "id").request
    assert (asked.max_tokens, asked.envelope.clear.sampling.prompt_logprobs) == (1, True)
    for less in ({"echo": True}, {"logprobs": 1}):
        asked = ask_completion({"prompt": "x", **less}, "id").request
        assert (asked.max_tokens, asked.envelope.clear.sampling.prompt_logprobs) == (16, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "robot"}] * 4096},
        {"messages": [{"role": "user", "content": [0] * 1024}]},
    ],
)
def test_of_a_list_only_the_first_fault_is_looked_for(fields: dict[str, Any]) -> None:
    """Each fault costs an object of its own, and only one is reported."""
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
    max_leaves=5,
)


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


TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}, "strict": True},
}


def test_what_sdks_pass_back_is_taken() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}, "index": 0}
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "provider_specific_fields": {"a": 1},
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "look",
        "content": [{"type": "text", "text": "ok"}],
    }
    body = {**GOOD, "messages": [*GOOD["messages"], dumped, result], "tools": [TOOL]}
    chat = parse(body).envelope.clear.chat
    assert chat.messages[1] == inference.ChatMessage(
        role="assistant",
        reasoning="hm",
        tool_calls=[inference.ToolCall(id="c1", name="look", arguments="{}")],
    )
    assert chat.messages[2] == inference.ChatMessage(
        role="tool", content="ok", tool_call_id="c1", name="look"
    )
    assert list(chat.tools) == [
        inference.Tool(name="look", description="looks", parameters='{"type": "object"}', strict=True)
    ]


@pytest.mark.parametrize(
    ("choice", "tools", "required", "one"),
    [
        (None, 2, False, False),
        ("auto", 2, False, False),
        ("none", 0, False, False),
        ("required", 2, True, False),
        ({"type": "function", "function": {"name": "look"}}, 1, True, True),
    ],
)
def test_a_tool_is_chosen_as_asked(choice: Any, tools: int, required: bool, one: bool) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    chat = parse({**GOOD, "tools": [other, TOOL], "tool_choice": choice}).envelope.clear.chat
    assert (len(chat.tools), chat.call_required, chat.one_call) == (tools, required, one)
    assert parse({**GOOD, "tools": [TOOL], "parallel_tool_calls": False}).envelope.clear.chat.one_call


@pytest.mark.parametrize(
    ("change", "reason", "param"),
    [
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "BAD_FIELD",
            "tool",
        ),
        ({"tool_choice": "required"}, "NO_TOOLS", "tools"),
        ({"tools": [TOOL] * 129}, "BAD_FIELD", "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "BAD_TOOL_NAME", "tools[0].name"),
        ({"chat_template_kwargs": {"messages": []}}, "BAD_JSON_FIELD", "chat_template_kwargs"),
        (
            {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": 1}}]},
            "BAD_FIELD",
            "messages[0]",
        ),
    ],
)
def test_what_is_refused_of_tools(change: dict[str, Any], reason: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse({**GOOD, **change})
    assert caught.value.reason == reason
    assert caught.value.metadata["param"].startswith(param)


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"a": schema}
    with pytest.raises(InvalidInput) as caught:
        parse({**GOOD, "tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}]})
    assert caught.value.metadata["param"].startswith("tools")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "x": [1]}},
            {"reasoning_effort": "low", "enable_thinking": False, "x": [1]},
        ),
    ],
)
def test_how_much_to_think_reaches_the_template(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    arguments = parse({**GOOD, **fields}).envelope.clear.chat.template_arguments
    assert json.loads(arguments or "{}") == expected


NOTHING_ASKED: list[dict[str, Any]] = [
    {"documents": None, "extra_body": {}, "made_up": [], "another": False, "one_more": ""},
    {"metadata": "x", "safety_identifier": 7, "service_tier": ["a"]},
    {"num_ctx": 4096, "keep_alive": None, "num_keep": 24, "num_batch": 512, "mirostat_tau": 5.0},
    {"request_id": "r", "id_slot": 3, "ttl": None, "provider": {"order": ["a"]}, "usage": {"include": True}},
    {"verbosity": "low", "reasoning_effort": "default", "stream_options": {"include_usage": True}},
    {"thinking": {"type": "adaptive"}, "max_tokens": -1, "stream": False},
    {"messages": [{"role": "user", "content": "hello", "id": "m1", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {}}]}]},
    {"messages": [{"role": "user", "content": "hello", "prefix": False, "made_up": None}]},
]


@pytest.mark.parametrize("change", NOTHING_ASKED, ids=lambda change: str(change)[:40])
def test_what_asks_for_nothing_changes_nothing(change: dict[str, Any]) -> None:
    assert parse({**GOOD, **change}) == parse(GOOD)


@pytest.mark.parametrize(
    ("asked", "marks", "begun"),
    [
        ({}, {}, False),
        ({"add_generation_prompt": True, "continue_final_message": False}, {"prefix": False}, False),
        ({"add_generation_prompt": False, "continue_final_message": True}, {}, True),
        ({}, {"prefix": True}, True),
        ({}, {"partial": True}, True),
    ],
)
def test_an_answer_is_continued_where_that_is_asked(
    asked: dict[str, Any], marks: dict[str, Any], begun: bool
) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yes", **marks}]
    assert parse({**GOOD, **asked, "messages": said}).envelope.clear.chat.begun is begun


FUNCTION = {"type": "function", "function": {"name": "a"}}
OBJECT = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repeat_penalty": 1.5, "repeat_last_n": 9}, {"repetition_penalty": 1.5, "repetition_context_size": 9}),
    ({"promptCacheKey": "ses"}, {"prompt_cache_key": "ses"}),
    ({"think": False}, {"enable_thinking": False}),
    ({"think": "high"}, {"enable_thinking": True, "reasoning_effort": "high"}),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
    ({"reasoning_effort": "max"}, {"reasoning_effort": "xhigh"}),
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"model": "default_model"}, {"model": ""}),
    ({"guided_json": {"type": "object"}}, {"response_format": OBJECT}),
    ({"guided_json": '{"type": "object"}'}, {"response_format": OBJECT}),
    ({"structured_outputs": {"json": {"type": "object"}}}, {"response_format": OBJECT}),
    ({"tools": [{**FUNCTION, "cache_control": {"type": "x"}}]}, {"tools": [FUNCTION]}),
]


@pytest.mark.parametrize(("change", "other"), SAME, ids=lambda change: str(change)[:40])
def test_what_other_servers_call_it_is_taken(change: dict[str, Any], other: dict[str, Any]) -> None:
    assert parse({**GOOD, **change}) == parse({**GOOD, **other})


def test_functions_are_called_and_answer_as_before_there_were_tools() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}}
    answer = {"role": "function", "name": "look", "content": "ok"}
    messages = parse({**GOOD, "messages": [*GOOD["messages"], call, answer]}).envelope.clear.chat.messages
    assert [one.name for one in messages[1].tool_calls] == ["look"]
    assert (messages[2].role, messages[2].name, messages[2].content) == ("tool", "look", "ok")


SOUND = {"type": "input_audio"}
HEARD = "[a sound; this model cannot read it]"
SENT = {"role": "user", "content": [SOUND]}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([SENT, {"role": "assistant", "content": "no"}, *GOOD["messages"]], HEARD),
        ([{"role": "tool", "content": [{"type": "text", "text": "a"}, SOUND]}], f"a\n{HEARD}"),
        ([{"role": "tool", "tool_call_id": "c", "content": "ok"}, SENT], HEARD),
    ],
)
def test_a_sound_in_the_history_does_not_end_a_conversation(messages: list[Any], said: str) -> None:
    found = parse({**GOOD, "messages": messages}).envelope.clear.chat.messages
    assert said in [one.content for one in found]


@pytest.mark.parametrize("after", [[], [{"role": "system", "content": "x"}], GOOD["messages"]])
def test_a_sound_that_the_user_has_just_sent_is_refused_by_name(after: list[Any]) -> None:
    sent = {"role": "user", "content": [{"type": "text", "text": "hear"}, SOUND]}
    with pytest.raises(InvalidInput) as caught:
        parse({**GOOD, "messages": [sent, *after]})
    assert caught.value.metadata["param"] == "messages[0].content[1]"


@pytest.mark.parametrize(
    "content", ["the answer", [{"type": "text", "text": "the "}, {"type": "text", "text": "answer"}]]
)
def test_a_prediction_is_a_text_or_its_parts(content: Any) -> None:
    body = {**GOOD, "prediction": {"type": "content", "content": content}}
    assert parse(body).envelope.clear.prediction == "the answer"
    assert not parse({**GOOD, "prediction": None}).envelope.clear.prediction


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 2}, "UNSUPPORTED_FIELD"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "UNSUPPORTED_FIELD"),
        ({"prediction": "the answer"}, "BAD_FIELD"),
        ({"prediction": {"type": "text", "content": "x"}}, "BAD_FIELD"),
        ({"prediction": {"type": "content"}}, "MISSING_FIELD"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "BAD_FIELD"),
        ({"prediction": {"type": "content", "content": "x", "more": 1}}, "UNKNOWN_FIELD"),
        ({"prediction": {"type": "content", "content": "\ud800"}}, "BAD_UTF8"),
    ],
)
def test_other_predictions_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse({**GOOD, "prediction": {"type": "content", "content": "x"}, **change})
    assert caught.value.reason == reason
    assert caught.value.metadata["param"].startswith("prediction")
