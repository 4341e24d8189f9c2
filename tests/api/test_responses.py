"""Responses: tools that are bounded before their grammars are translated; log-probabilities of the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sealring.api.answers import Choice
from sealring.api.responses import ask_responses
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from sealring.v1 import inference_pb2 as inference
from sealring.v1.model_pb2 import ModelCard

GRAMMAR = 'start: "x"\n'


def tool(name: str, definition: str = GRAMMAR) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": "lark", "definition": definition}
    return {"type": "custom", "name": name, "format": form}


def padded(size: int) -> str:
    return GRAMMAR + "//" + "x" * (size - len(GRAMMAR) - 2)


@pytest.mark.parametrize("place", ["tools", "namespace", "additional_tools"])
def test_a_tool_too_many_is_refused_before_its_grammar_is_read(place: str) -> None:
    tools = [tool(f"t{number}") for number in range(MAX_TOOLS)]
    more = tool("one_more", "malformed")
    body: dict[str, Any] = {"input": "x", "tools": [*tools, more]}
    if place == "namespace":
        body["tools"] = [*tools, {"type": "namespace", "name": "space", "tools": [more]}]
    elif place == "additional_tools":
        body = {"tools": tools, "input": [{"type": "additional_tools", "tools": [more]}]}
    with pytest.raises(InvalidInput) as caught:
        ask_responses(body, "id")
    assert caught.value.reason == "TOO_MANY_TOOLS"


def test_all_grammars_of_a_request_have_one_bound() -> None:
    quarter = padded(MAX_SCHEMA_BYTES // 4)
    tools = [tool(f"t{number}", quarter) for number in range(4)]
    assert len(ask_responses({"input": "x", "tools": tools}, "id").request.envelope.clear.chat.tools) == 4
    with pytest.raises(InvalidInput) as caught:
        ask_responses({"input": "x", "tools": [*tools, tool("one_more", "malformed")]}, "id")
    assert caught.value.reason == "GRAMMARS_TOO_LONG"


def logged(token: str) -> list[inference.TokenLogprob]:
    return [inference.TokenLogprob(spelling=token.encode(), logprob=-0.5)]


def test_the_text_and_no_more_has_the_log_probabilities_that_were_asked_for() -> None:
    body: dict[str, Any] = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 3}
    asked = ask_responses(body, "id")
    assert asked.request.envelope.clear.sampling.logprobs == 3
    reasoning, call = inference.Delta(logprobs=logged("r")), inference.Delta(logprobs=logged("c"))
    reasoning.parsed.reasoning = "r"
    call.parsed.tool_calls.add(name="f", arguments="{}")
    held = inference.Delta(logprobs=logged("a"))  # its text comes with the next one
    deltas = [reasoning, held, inference.Delta(text="ab", logprobs=logged("b")), call]
    started, finished, choice = inference.Started(request_id="id"), inference.Finished(), Choice()
    streaming = asked.render(started)
    events = b"".join([streaming.first(), *map(streaming.delta, deltas), streaming.last(finished)])
    for delta in deltas:
        choice.add(delta)
    told = [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: ")]
    whole = json.loads(asked.render(started).whole([choice], finished))
    (part,) = whole["output"][1]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["a", "b"]
    assert told[-1]["response"]["output"] == whole["output"]
    for name in ("response.output_text.delta", "response.output_text.done"):
        assert [one["logprobs"] for one in told if one["type"] == name] == [part["logprobs"]]
    assert not ask_responses({"input": "x", "include": []}, "id").request.envelope.clear.sampling.HasField(
        "logprobs"
    )


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.8}),
        ({"temperature": 0.2}, {"temperature": 0.2, "top_p": 0.8}),
        ({"temperature": None, "top_p": 1}, {"temperature": 0.7, "top_p": 1}),
    ],
)
def test_a_response_repeats_what_was_used_where_its_request_names_none(
    named: dict[str, Any], told: dict[str, float]
) -> None:
    own = ModelCard(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.5)
    asked = ask_responses({"input": "x", **named}, "id")
    for model_has, expected in ((own, told), (ModelCard(), {"temperature": 1, "top_p": 1} | named)):
        whole = json.loads(
            asked.render(inference.Started(own=model_has)).whole([Choice()], inference.Finished())
        )
        used = {name: 1 if one is None else one for name, one in expected.items()}
        assert {name: whole[name] for name in told} == used
        assert "top_k" not in whole
