"""Any body is asked or refused by name, in every API."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markedchats import conversations

from sealring.api.anthropic import MESSAGES, ask_count, ask_messages
from sealring.api.chat import ChatBody, ask_chat
from sealring.api.completions import CompletionBody, ask_completion
from sealring.api.ollama import CHAT, GENERATE, ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import RESPONSES, ask_responses
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt import numbers, options
from sealring.mesh.prompt.validate import validate_request
from sealring.node.engine import own_options, params, with_own
from sealring.v1 import inference_pb2 as inference


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


ASKED = [{"role": "user", "content": "Hi"}]
APIS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (ask_chat, {"messages": ASKED}),
    "completions": (ask_completion, {"prompt": "Hi"}),
    "responses": (ask_responses, {"input": "Hi"}),
    "messages": (ask_messages, {"messages": ASKED, "max_tokens": 9}),
    "ollama": (ask_ollama_chat, {"messages": ASKED}),
    "generate": (ask_ollama_generate, {"prompt": "Hi"}),
}
EVERY_API = pytest.mark.parametrize("api", APIS)
VALUES_OF = {
    **{name: 1 for name in (options.PLAIN | numbers.PLAIN) if name not in ("n", "logprobs")},
    **{name: True for name, kind in options.PLAIN.items() if kind is bool},
    **{"stop": ["x"], "logit_bias": {"5": 1.0}, "stop_token_ids": [7], "prompt_cache_key": "k"},
    **{"repetition_penalty": 1.5, "keep_alive": 60, "temperature": 0.5},
}
"""Every option and number, with a value that asks for something."""


def asked_of(api: str, more: dict[str, Any], inside: str = "") -> Any:
    ask, body = APIS[api]
    return ask({"model": "demo", **body, **({inside: more} if inside else more)}, "r").request


def told(request: Any) -> tuple[Any, ...]:
    """What a request says of the options and numbers."""
    prompt = request.envelope.clear
    named = [getattr(request, name) for name in numbers.PLAIN if name not in ("n", "max_tokens")]
    return prompt.sampling, list(prompt.stop), request.prompt_cache_key, *named


def test_every_option_of_sampling_has_a_value_here() -> None:
    contract = {field.name for field in inference.Sampling.DESCRIPTOR.fields}
    known = options.SamplingOptions.__annotations__.keys()
    assert contract - known == {"prompt_logprobs", "unnamed"}, (
        "which `echo` asks for, and which tells of others"
    )
    assert known - VALUES_OF.keys() == {"logprobs"}
    numbers_of = inference.Sampling.DESCRIPTOR.fields_by_name
    assert {name: 1 << numbers_of[name].number for name in OWN} == options.MODELS_OWN
    assert numbers.PLAIN.keys() - VALUES_OF.keys() == {"n"}


@EVERY_API
def test_a_request_without_a_model_asks_the_only_one(api: str) -> None:
    ask, body = APIS[api]
    for more in ({}, {"model": None}):
        assert ask({**body, **more}, "r").request.model == ""


@EVERY_API
@pytest.mark.parametrize("name", VALUES_OF)
def test_an_option_that_one_api_has_all_have(api: str, name: str) -> None:
    """There is one list: mesh/prompt/options.py and numbers.py."""
    more = {name: VALUES_OF[name]}
    assert told(asked_of(api, more)) == told(asked_of("chat", more))
    if name != "max_tokens":
        assert told(asked_of(api, more)) != told(asked_of(api, {}))
    if api in ("ollama", "generate") and name in options.SamplingOptions.__annotations__:
        assert told(asked_of(api, more, "options")) == told(asked_of("chat", more))


OWN = {
    "temperature": st.floats(0, 2, width=32),
    "top_p": st.floats(0.125, 1, width=32),
    "top_k": st.integers(0, 1 << 20),
    "min_p": st.floats(0, 1, width=32),
    "repetition_penalty": st.floats(0.125, 8, width=32),
}
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@EVERY_API
@given(named=st.fixed_dictionaries({}, optional=OWN), own=st.fixed_dictionaries({}, optional=OWN))
def test_what_is_not_named_is_the_models_own_or_else_the_apis(
    api: str, tmp_path_factory: pytest.TempPathFactory, named: dict[str, Any], own: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_text(json.dumps(own))
    asked = asked_of(api, named)
    validate_request(asked)
    found = params.from_sampling(with_own(asked.envelope.clear.sampling, own_options(folder)))
    assert {name: getattr(found, name) for name in OWN} == {**DEFAULTS, **own, **named}


@EVERY_API
@pytest.mark.parametrize(
    ("more", "name", "off"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"repetition_penalty": 0}, "repetition_penalty", 1),
        ({"options": {"repeat_last_n": 0}}, "repetition_penalty", 1),
        ({"options": {"repeat_last_n": 0, "repeat_penalty": 1.5}}, "repetition_penalty", 1),
    ],
)
def test_what_is_named_as_off_is_not_the_models_own(
    api: str, more: dict[str, Any], name: str, off: float
) -> None:
    if "options" in more and api not in ("ollama", "generate"):
        return
    sampling = asked_of(api, more).envelope.clear.sampling
    assert getattr(params.from_sampling(with_own(sampling, {name: 7})), name) == off


TABLES = {
    "chat": {**ChatBody.model_fields, **ChatBody.rules},
    "completions": {**CompletionBody.model_fields, **CompletionBody.rules},
    "responses": RESPONSES,
    "messages": MESSAGES,
    "ollama": CHAT,
    "generate": GENERATE,
}


def refusal(api: str, more: dict[str, Any]) -> InvalidInput | None:
    try:
        asked_of(api, more)
    except InvalidInput as error:
        return error
    return None


@EVERY_API
def test_a_field_that_one_api_knows_is_no_misspelling_in_another(api: str) -> None:
    known = {name for table in TABLES.values() for name in table}
    within = ("json", "choice", "regex", "grammar", "structural_tag")
    bodies = {name: {name: "something"} for name in sorted(known)}
    bodies |= {f"in {name}": {"structured_outputs": {name: "something"}} for name in within}
    refusals = {name: refusal(api, more) for name, more in bodies.items()}
    misspelt = [name for name, error in refusals.items() if error is not None and "spelling" in error.hint]
    assert misspelt == []
    with pytest.raises(InvalidInput) as caught:
        asked_of(api, {"temprature": 1})
    assert (caught.value.reason, caught.value.hint) == ("UNKNOWN_FIELD", "check its spelling")


@pytest.mark.parametrize("api", ["chat", "responses", "messages", "ollama", "generate"])
def test_a_schema_is_taken_in_every_spelling_in_every_api(api: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for more in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"response_format": {"type": "json_object", "schema": schema}},
        {"response_format": {"type": "json_schema", "schema": schema}},
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
        {"json_schema": schema},
    ):
        assert json.loads(asked_of(api, more).envelope.clear.schema) == schema
    with pytest.raises(InvalidInput) as caught:
        asked_of(api, {"structured_outputs": {"regex": "a+"}})
    assert caught.value.reason == "UNSUPPORTED_FIELD"
    assert "JSON Schema" in caught.value.hint


B64 = base64.b64encode(b"\x89PNG picture").decode()
URL = f"data:image/png;base64,{B64}"


def _arguments(call: inference.ToolCall) -> Any:
    return json.loads(call.arguments)


def _schema(tool: inference.Tool) -> Any:
    return json.loads(tool.parameters or "{}")


def as_chat(chat: inference.Chat) -> dict[str, Any]:
    said = []
    for one in chat.messages:
        shown = [{"type": "image_url", "image_url": {"url": URL}} for _ in one.images]
        told: dict[str, Any] = {"role": one.role, "content": [*shown, {"type": "text", "text": one.content}]}
        if one.tool_calls:
            told["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in one.tool_calls
            ]
        if one.role == "tool":
            told["tool_call_id"] = one.tool_call_id
        said.append(told)
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": _schema(tool)}
        for tool in chat.tools
    ]
    return {"messages": said, "tools": [{"type": "function", "function": one} for one in functions]}


def as_responses(chat: inference.Chat) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for one in chat.messages:
        kind = "output_text" if one.role == "assistant" else "input_text"
        content = [{"type": "input_image", "image_url": URL} for _ in one.images]
        content += [{"type": kind, "text": one.content}] * bool(one.content)
        if one.role == "tool":
            items.append({"type": "function_call_output", "call_id": one.tool_call_id, "output": content})
        elif content:
            items.append({"type": "message", "role": one.role, "content": content})
        items += [
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in one.tool_calls
        ]
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": _schema(tool),
        }
        for tool in chat.tools
    ]
    return {"input": items, "tools": tools}


def as_messages(chat: inference.Chat) -> dict[str, Any]:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": B64}}
    said: list[dict[str, Any]] = []
    for one in chat.messages:
        blocks: list[dict[str, Any]] = [image] * len(one.images)
        blocks += [{"type": "text", "text": one.content}] * bool(one.content)
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)}
            for call in one.tool_calls
        ]
        if one.role == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": one.tool_call_id, "content": blocks}]
        said.append({"role": "user" if one.role == "tool" else one.role, "content": blocks})
    tools = [
        {"name": tool.name, "description": tool.description, "input_schema": _schema(tool)}
        for tool in chat.tools
    ]
    return {"messages": said, "tools": tools, "max_tokens": 9}


def as_ollama(chat: inference.Chat) -> dict[str, Any]:
    said = []
    for one in chat.messages:
        told: dict[str, Any] = {"role": one.role, "content": one.content, "images": [B64] * len(one.images)}
        if one.tool_calls:
            functions = [{"name": call.name, "arguments": _arguments(call)} for call in one.tool_calls]
            told["tool_calls"] = [{"function": function} for function in functions]
        if one.role == "tool":
            told["tool_name"] = one.name
        said.append(told)
    return {"messages": said, "tools": as_chat(chat)["tools"]}


WRITERS = {
    "chat": as_chat,
    "responses": as_responses,
    "messages": as_messages,
    "ollama": as_ollama,
}
"""A chat of the contract in the form of each API; over gRPC it goes as it is."""


@pytest.mark.parametrize("api", WRITERS)
@given(chat=conversations(images=True))
def test_no_text_and_no_image_is_lost_on_the_way_in(api: str, chat: inference.Chat) -> None:
    """Neither in clear nor sealed: one translation is for both."""
    ask, _ = APIS[api]
    request = ask({"model": "demo", **WRITERS[api](chat)}, "r").request
    validate_request(request)
    found = request.envelope.clear.chat

    def marks(told: inference.Chat) -> Counter[str]:
        return Counter(re.findall(r"zq\w+", str(told)))

    assert marks(found) >= marks(chat)
    assert sum(len(one.images) for one in found.messages) == sum(len(one.images) for one in chat.messages)
    spoken = [one.content for one in chat.messages if one.role in ("user", "tool")]
    assert [one.content for one in found.messages if one.role in ("user", "tool")] == spoken


@pytest.mark.parametrize("status", [None, "completed", "incomplete", "in_progress"])
def test_an_answer_that_the_client_has_begun_goes_on(status: str | None) -> None:
    """In Ollama's API, as in Anthropic's, behind any last text of the assistant; in Responses behind an item
    that is not complete, for a new item begins behind others."""
    begun = {"role": "assistant", "content": "The capital of"}
    for api in ("ollama", "messages"):
        assert asked_of(api, {"messages": [*ASKED, begun]}).envelope.clear.chat.begun
        assert not asked_of(api, {"messages": [*ASKED, begun, *ASKED]}).envelope.clear.chat.begun
    item = {"type": "message", **begun, **({"status": status} if status else {})}
    responses = asked_of("responses", {"input": [*ASKED, item]}).envelope.clear.chat
    assert responses.begun is (status in ("incomplete", "in_progress"))
    assert responses.messages[-1].content == "The capital of"
    thought = {"type": "reasoning", "summary": [], "status": "incomplete"}
    assert not asked_of("responses", {"input": [*ASKED, item, thought]}).envelope.clear.chat.begun
    call = {"function": {"name": "f", "arguments": {}}}
    called = {"role": "assistant", "content": "x", "tool_calls": [call]}
    assert not asked_of("ollama", {"messages": [*ASKED, called]}).envelope.clear.chat.begun


def test_a_field_of_an_api_that_nobody_has_imported_is_refused_as_its_own() -> None:
    """Otherwise an error depends on what else the process has done."""
    code = """
from sealring.api.completions import ask_completion
from sealring.mesh.errors import InvalidInput
try:
    ask_completion({"model": "demo", "prompt": "Hi", "messages": [1]}, "")
except InvalidInput as error:
    print(error.reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "UNSUPPORTED_FIELD"
