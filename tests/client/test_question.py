"""Sampling options of the client: each reaches the prompt, or is refused by its name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sealring.client import ToolCall
from sealring.client.question import MAX_TIMEOUT_SECONDS, Question, chat_prompt, set_sampling, text_prompt
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.numbers import request_of
from sealring.mesh.prompt.options import SamplingOptions
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


@pytest.mark.parametrize("timeout", [1e-9, MAX_TIMEOUT_SECONDS])
def test_a_question_may_take_up_to_an_hour(timeout: float) -> None:
    assert Question(text_prompt("x"), request_of({}), timeout, b"").timeout == timeout


@pytest.mark.parametrize("timeout", [0.0, -1.0, MAX_TIMEOUT_SECONDS + 1, math.nan])
def test_any_other_time_is_refused(timeout: float) -> None:
    with pytest.raises(InvalidInput) as caught:
        Question(text_prompt("x"), request_of({}), timeout, b"")
    assert caught.value.reason == "BAD_TIMEOUT"


def test_texts_and_images_of_a_message_keep_their_order() -> None:
    (said,) = chat_prompt([{"role": "user", "content": ["a é", b"one", b"two", "b", b"three"]}]).chat.messages
    assert said.content == "a éb"
    assert [(one.at, one.data) for one in said.images] == [(3, b"one"), (3, b"two"), (4, b"three")]


@pytest.mark.parametrize("content", [b"image", ["x", 7], [None], {"x": b"image"}, 7])
def test_what_is_neither_text_nor_image_is_refused(content: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat_prompt([{"role": "user", "content": content}])
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_MESSAGE", "messages[0]")


def test_a_text_is_a_users_message() -> None:
    assert chat_prompt("hi") == chat_prompt([{"role": "user", "content": "hi"}])


LOOK_UP = {"name": "look_up", "description": "Looks it up.", "parameters": {"type": "object"}}


@pytest.mark.parametrize("tool", [LOOK_UP, {"type": "function", "function": LOOK_UP}])
def test_tools_are_functions_and_their_calls_are_answered(tool: dict[str, Any]) -> None:
    call = ToolCall("look_up", '{"word": "tail"}', id="1")
    messages = [
        {"role": "assistant", "content": "", "tool_calls": (call,)},
        {"role": "tool", "content": "a call", "tool_call_id": "1"},
    ]
    chat = chat_prompt(messages, [tool, {"name": "stop"}]).chat
    assert [(one.name, one.description, one.parameters) for one in chat.tools] == [
        ("look_up", "Looks it up.", '{"type": "object"}'),
        ("stop", "", ""),
    ]
    asked, answered = chat.messages
    assert [(one.id, one.name, one.arguments) for one in asked.tool_calls] == [
        ("1", "look_up", '{"word": "tail"}')
    ]
    assert answered.tool_call_id == "1"


@pytest.mark.parametrize(
    "tool", [{}, {"name": 7}, {"function": "look_up"}, {"name": "x", "parameters": {1, 2}}]
)
def test_what_is_no_tool_is_refused(tool: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat_prompt("hi", [tool])
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_TOOL", "tools[0]")


@pytest.mark.parametrize("more", [{"tool_calls": 7}, {"tool_calls": ["x"]}, {"tool_call_id": 7}])
def test_malformed_calls_of_a_message_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        chat_prompt([{"role": "assistant", "content": "", **more}])
    assert (caught.value.reason, caught.value.metadata["param"]) == ("BAD_MESSAGE", "messages[0]")
