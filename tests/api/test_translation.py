"""Any body is asked or refused by name, in every API."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.api.anthropic import ask_count, ask_messages
from sealring.api.chat import ChatBody, ask_chat
from sealring.api.completions import CompletionBody, ask_completion
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import validate_request


def _words(text: str) -> list[str]:
    return text.split()


WORDS = st.sampled_from(
    _words(
        "user assistant system tool developer text tool_use tool_result thinking function custom "
        "namespace auto any message function_call function_call_output custom_tool_call reasoning "
        "additional_tools input_text x"
    )
)
NAMES = st.sampled_from(
    _words(
        "role content type text id name input tool_use_id thinking call_id arguments output tools "
        "function format parameters input_schema summary namespace tool_calls definition images effort"
    )
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 99) | st.floats(-2, 2) | WORDS | st.just("\ud800")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
FIELDS = st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields]) | st.sampled_from(
    _words(
        "model messages system tools tool_choice thinking output_config stop_sequences max_tokens input "
        "instructions reasoning text include prompt options think stream stop response_format metadata "
        "user"
    )
)


@pytest.mark.parametrize(
    "ask",
    [ask_chat, ask_completion, ask_messages, ask_count, ask_responses, ask_ollama_chat, ask_ollama_generate],
)
@settings(max_examples=25)
@given(body=st.dictionaries(FIELDS, VALUES, max_size=6))
def test_a_body_is_asked_or_refused(ask: Any, body: dict[str, Any]) -> None:
    for whole in (body, {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **body}):
        try:
            asked = ask(whole, "id")
        except InvalidInput as error:
            named = error.metadata["param"]
        else:
            named = asked.request.SerializeToString()
            if not asked.loads:
                with contextlib.suppress(InvalidInput):
                    validate_request(asked.request)
        assert named


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
SAID = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (ask_chat, {**SAID, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (
            ask_responses,
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}},
            },
        ),
        (
            ask_messages,
            {**SAID, "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (ask_ollama_chat, {**SAID, "model": "m", "format": SCHEMA}),
        (ask_ollama_generate, {"model": "m", "prompt": "x", "format": SCHEMA}),
    ],
)
def test_a_schema_goes_with_the_prompt_from_every_api(ask: Any, body: dict[str, Any]) -> None:
    assert json.loads(ask(body, "id").request.envelope.clear.schema) == SCHEMA


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (ask_chat, {**SAID, "response_format": {"type": "json_object"}}),
        (ask_responses, {"input": "x", "text": {"format": {"type": "json_object"}}}),
        (ask_ollama_chat, {**SAID, "model": "m", "format": "json"}),
    ],
)
def test_any_object_is_a_schema_too(ask: Any, body: dict[str, Any]) -> None:
    assert json.loads(ask(body, "id").request.envelope.clear.schema) == {"type": "object"}


def test_no_form_is_no_schema() -> None:
    for form in ({"type": "text"}, None):
        assert not ask_chat({**SAID, "response_format": form}, "id").request.envelope.clear.schema
    assert not ask_responses(
        {"input": "x", "text": {"format": {"type": "text"}}}, "id"
    ).request.envelope.clear.schema


@pytest.mark.parametrize(
    ("ask", "body", "param", "why"),
    [
        (ask_completion, {"prompt": ["x"] * 65}, "prompt", "at most 64 items"),
        (ask_completion, {"prompt": [1, 2, -1]}, "prompt[2]", "greater than or equal to 0"),
        (ask_chat, {"messages": [{"role": "user"}], "stop": ["x"] * 17}, "stop", "at most 16"),
        (ask_responses, {"input": []}, "input", "at least 1"),
    ],
)
def test_a_refusal_names_the_limit_that_was_met(ask: Any, body: dict[str, Any], param: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        ask(body, "id")
    assert caught.value.metadata["param"] == param
    assert caught.value.message.startswith(f"{param} ")


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (ask_chat, {"messages": [{"role": "user", "content": "Hi"}]}),
        (ask_completion, {"prompt": "Hi"}),
        (ask_responses, {"input": "Hi"}),
    ],
)
def test_a_stream_that_is_to_be_padded_is_refused_by_name(ask: Any, body: dict[str, Any]) -> None:
    for wanted in (False, None):
        ask({"model": "demo", "stream_options": {"include_obfuscation": wanted}, **body}, "r")
    with pytest.raises(InvalidInput) as caught:
        ask({"model": "demo", "stream_options": {"include_obfuscation": True}, **body}, "r")
    assert caught.value.reason == "UNSUPPORTED_FIELD"
    assert caught.value.metadata["param"] == "stream_options.include_obfuscation"
