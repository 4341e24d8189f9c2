"""Fields that nobody knows, at every place of a body, in every API."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.api.answers import Asked
from sealring.api.anthropic import ask_messages
from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.api.fields import NOTHING
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses
from sealring.api.vectors import ask_embed, ask_embeddings, ask_rerank
from sealring.mesh.errors import InvalidInput

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALLED = {"name": "f", "arguments": "{}"}
TOLD = {"type": "text", "text": "x"}
NEVER = "(?!)"


class Api(NamedTuple):
    """How a body is read, one that has most of what bodies have, and the places where what nobody knows is
    ignored. What is in `opaque` is not the API's to read."""

    ask: Callable[..., Asked]
    body: dict[str, Any]
    ignores: str = NEVER
    opaque: tuple[str, ...] = ("parameters", "schema", "input_schema", "arguments", "input")


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [TOLD]},
        {"role": "assistant", "content": "y", "tool_calls": [{"id": "c", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", **CALLED},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"role": "user", "content": "z"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
}
MESSAGES = {
    "max_tokens": 5,
    "system": [TOLD],
    "messages": [
        {"role": "user", "content": [TOLD]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TOLD]}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "output_config": {"effort": "low"},
}
OLLAMA = {
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "r", "tool_name": "f"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "options": {"temperature": 0.5},
}
APIS = {
    "chat": Api(ask_chat, {**CHAT, **STREAM}, r"messages\[\d+\]\.content"),
    "completions": Api(ask_completion, {"prompt": "x", **STREAM}),
    "responses": Api(ask_responses, RESPONSES, r"input\[|tools\[", ("parameters", "schema", "arguments")),
    "messages": Api(ask_messages, MESSAGES, r"messages\[|system\[|tools\["),
    "ollama": Api(ask_ollama_chat, OLLAMA, r"messages\["),
    "generate": Api(ask_ollama_generate, {"prompt": "x", "options": {"temperature": 0.5}}),
    "embeddings": Api(ask_embeddings, {"input": "x"}),
    "embed": Api(ask_embed, {"input": "x", "options": {"num_ctx": 9}}, "options"),
    "rerank": Api(ask_rerank, {"query": "q", "documents": ["a"]}),
}
VALUES = st.recursive(
    st.sampled_from([None, False, True, 0, 1, 0.5, "", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.just("a"), inner, max_size=1),
    max_leaves=4,
)


def places(value: Any, opaque: tuple[str, ...], path: str = "") -> Iterator[str]:
    """The paths of the objects in a body."""
    if isinstance(value, dict):
        yield path
        for name, inside in value.items():
            if name not in opaque or isinstance(inside, list):
                yield from places(inside, opaque, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for at, inside in enumerate(value):
            yield from places(inside, opaque, f"{path}[{at}]")


PLACES = [(name, path) for name, api in APIS.items() for path in places(api.body, api.opaque)]


def asked(api: Api, path: str, value: Any) -> Asked:
    body = copy.deepcopy(api.body)
    place: Any = body
    for name, at in re.findall(r"(\w+)|\[(\d+)\]", path):
        place = place[name or int(at)]
    place["made_up"] = value
    return api.ask(body, "r")


@pytest.mark.parametrize(("name", "path"), PLACES)
@given(value=VALUES)
def test_what_asks_for_nothing_is_let_through_and_what_asks_is_refused_by_its_name(
    name: str, path: str, value: Any
) -> None:
    api = APIS[name]
    if any(type(value) is type(one) and value == one for one in NOTHING) or re.match(api.ignores, path):
        assert asked(api, path, value).request == api.ask(copy.deepcopy(api.body), "r").request
    else:
        with pytest.raises(InvalidInput) as caught:
            asked(api, path, value)
        named = f"{path}.made_up" if path else "made_up"
        assert (caught.value.reason, caught.value.metadata["param"]) == ("UNKNOWN_FIELD", named)
        assert named in caught.value.message
