"""Agents and frameworks call a tool, tell its result and go on: in clear, and sealed as the proxy does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agents import NAMES, converse
from conversing import ConversingBackend, conversing
from scriptedgateway import on_stage

from sealring.client.sealing import SealingBackend
from sealring.gateway.http.app import create_app
from sealring.gateway.http.server import HttpServer
from sealring.gateway.metrics import Metrics

pytestmark = pytest.mark.agents


@pytest.fixture(params=["clear", "sealed"])
async def url(request: Any) -> AsyncIterator[str]:
    async with on_stage() as stage, stage.client() as client:
        stage.gateway.script = conversing
        backend = ConversingBackend() if request.param == "clear" else SealingBackend(client, Metrics())
        server = HttpServer(create_app(backend, exposition=lambda: b""))
        port = server.listen("127.0.0.1:0")
        await server.start()
        yield f"http://127.0.0.1:{port}"
        await server.stop()


@pytest.mark.parametrize("name", NAMES)
async def test_a_tool_is_called_and_its_result_told(name: str, url: str, tmp_path: Path) -> None:
    steps = await converse(name, url, tmp_path, tools=True)
    if name == "mini_swe_agent":
        assert steps == ["Submitted"]
    else:
        assert "21 degrees in Paris" in steps[0]
        assert all(step.startswith("It is so: ") for step in steps[1:])
