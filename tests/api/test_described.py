"""The description of the HTTP edge, held against what its readers of bodies take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import jsonschema
import pytest

from sealring.api.anthropic import ask_count, ask_messages
from sealring.api.chat import ask_chat
from sealring.api.compaction import Summaries, ask_compact
from sealring.api.completions import ask_completion
from sealring.api.described import openapi
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses
from sealring.api.vectors import ask_embed, ask_embedding, ask_embeddings, ask_rerank
from sealring.edge.http.app import PATHS
from sealring.mesh.errors import InvalidInput

SAID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}]
}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
ASKED: dict[str, tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]] = {
    "/v1/chat/completions": (
        ask_chat,
        [SAID, {**SAID, "num_ctx": 1, "guided_json": {}, "mirostat": 0, "made_up": None, "min_tokens": 1}],
        [{}, {"messages": 1}, {**SAID, "mirostat": 1}, {**SAID, "made_up": 1}, {**SAID, "min_tokens": -1}],
    ),
    "/v1/completions": (
        ask_completion,
        [{"prompt": "x"}, {"prompt": ["x"], "store": True, "best_of": 1}],
        [{}, {"prompt": {}}, {"prompt": "x", "best_of": 2}],
    ),
    "/v1/responses": (
        ask_responses,
        [
            {"input": "x"},
            {"input": [], "instructions": "s", "metadata": {"a": "b"}, "truncation": "disabled"},
        ],
        [{}, {"input": 1}, {"input": "x", "truncation": "auto"}, {"input": "x", "temperature": 3}],
    ),
    "/v1/responses/compact": (
        partial(ask_compact, summaries=Summaries("")),
        [{"model": "m", "input": "x"}, {"model": "m", "input": [], "tools": [TOOL], "instructions": "s"}],
        [{}, {"model": "m", "input": 1}, {"model": "m", "stream": True}, {"model": 5, "input": "x"}],
    ),
    "/v1/messages": (
        ask_messages,
        [
            {**SAID, "max_tokens": 1},
            {**SAID, "max_tokens": 1, "tools": [TOOL], "betas": ["a"], "fallbacks": []},
        ],
        [{}, SAID, {**SAID, "max_tokens": 0}, {**SAID, "max_tokens": 1, "mcp_servers": [1]}],
    ),
    "/v1/messages/count_tokens": (ask_count, [SAID], [{}, {"messages": 1}]),
    "/api/chat": (
        ask_ollama_chat,
        [{}, {**SAID, "options": {"num_ctx": 1}}],
        [{"messages": 1}, {"made_up": 1}],
    ),
    "/api/generate": (
        ask_ollama_generate,
        [{}, {"prompt": "x", "raw": False}],
        [{"prompt": 1}, {"raw": True}],
    ),
    "/v1/embeddings": (
        ask_embeddings,
        [{"input": "a"}, {"input": [[1, 2], [3]], "dimensions": 3, "encoding_format": "base64"}],
        [{}, {"input": []}, {"input": "a", "dimensions": 0}, {"input": "a", "temperature": 1}],
    ),
    "/api/embed": (ask_embed, [{}, {"input": ["a"], "truncate": False}], [{"input": [1]}]),
    "/api/embeddings": (ask_embedding, [{"prompt": "a"}], [{"prompt": 1}]),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank"),
        (
            ask_rerank,
            [{"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}],
            [{"query": "q"}, {"query": "", "documents": ["a"]}],
        ),
    ),
}


@pytest.mark.parametrize("path", ASKED)
def test_bodies_are_described_as_they_are_read(path: str) -> None:
    described = openapi("1", PATHS.operations())
    ask, taken, refused = ASKED[path]
    schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    for body in taken:
        assert not list(check.iter_errors(body)), body
        ask(body, "id")
    for body in refused:
        assert list(check.iter_errors(body)), body
        with pytest.raises(InvalidInput):
            ask(body, "id")


def test_every_body_has_a_description_and_every_operation_its_errors() -> None:
    described = openapi("1", PATHS.operations())
    posts = {path for path, operations in described["paths"].items() if "post" in operations}
    assert posts == {*ASKED, "/api/show"}
    for operations in described["paths"].values():
        for operation in operations.values():
            assert {"200", "4XX", "5XX"} <= set(operation["responses"])


SHOW = """
import json
from sealring.api.described import openapi
from sealring.edge.http.app import PATHS
print(json.dumps(openapi("1", PATHS.operations())), end="")
"""


def test_another_process_describes_in_the_same_order() -> None:
    """Sets are in another order there."""
    seeded = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.check_output([sys.executable, "-c", SHOW], env=seeded, text=True)
    assert other == json.dumps(openapi("1", PATHS.operations()))
