"""Fixtures of the edge: a backend that follows a script, and a port where the real server has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sealring.testing import ScriptedBackend, serve_edge
from sealring.v1 import inference_pb2 as inference


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def calling(backend: ScriptedBackend) -> ScriptedBackend:
    """Thinks, says something, and calls two tools at once."""
    calls = [inference.ToolCall(name="look", arguments='{"at": 1}'), inference.ToolCall(name="look")]
    backend.texts = ["", "Let me see.", ""]
    backend.parsed = [inference.Parsed(reasoning="hm"), None, inference.Parsed(tool_calls=calls)]
    return backend


@pytest.fixture
async def port(backend: ScriptedBackend) -> AsyncIterator[int]:
    async with serve_edge(backend) as port:
        yield port
