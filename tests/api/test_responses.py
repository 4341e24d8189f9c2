"""The tools of a request are bounded before any of their grammars is translated."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.api.responses import ask_responses
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.tools import MAX_SCHEMA_BYTES, MAX_TOOLS

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
