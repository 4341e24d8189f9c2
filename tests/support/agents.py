"""Runs a script of tests/clients in an environment that `make clients` makes."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ringtest import HANG_SECONDS, PROXY_KEY

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / "build" / "clients"
NEWEST = INSTALLED / "newest"
NAMES = ["instructor", "langchain", "litellm", "llm", "mini_swe_agent", "openai_agents", "pydantic_ai"]


async def converse(
    name: str, urls: list[str], home: Path, script: str = "conversations.py", environment: Path = INSTALLED
) -> list[Any]:
    """What each step of a script came to, by server."""
    python = environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no environment for agents in {environment}: make clients")
    process = await asyncio.create_subprocess_exec(
        *(str(python), str(ROOT / "tests" / "clients" / script), name, "demo", *urls),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "API_KEY": PROXY_KEY,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
        },
    )
    try:
        async with asyncio.timeout(HANG_SECONDS):
            told, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-3000:]
    steps: list[Any] = json.loads(told.decode().strip().splitlines()[-1])
    return steps
