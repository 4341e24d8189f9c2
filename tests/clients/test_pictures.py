"""The API makers' SDKs show pictures to the bundled model that sees, and get what is in them."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from programs import HABITS, INSTALLED, MAKERS, ROOT, environment, note
from ringtest import AGENTS, PROXY_KEY
from scriptedmodel import QUESTION
from scriptedring import WAYS, Served, run, seeing
from shownpictures import SEEN, SEES

pytestmark = AGENTS


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def _sees(served: Served) -> AsyncIterator[None]:
    async with seeing(served):
        yield


def _url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"


async def _openai(url: str, picture: bytes) -> list[Any]:
    import openai

    parts = [{"type": "image_url", "image_url": {"url": _url(picture)}}, {"type": "text", "text": QUESTION}]
    items = [{"type": "input_image", "image_url": _url(picture)}, {"type": "input_text", "text": QUESTION}]
    asked: dict[str, Any] = {"model": SEES, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=PROXY_KEY, max_retries=0) as client:
        said: list[Any] = [{"role": "user", "content": parts}]
        pieces: Any = await client.chat.completions.create(messages=said, stream=True, **asked)
        streamed = "".join([piece.choices[0].delta.content or "" async for piece in pieces])
        response = await client.responses.create(input=[{"role": "user", "content": items}], **asked)
        return [streamed, response.output_text]


async def _anthropic(url: str, picture: bytes) -> list[Any]:
    import anthropic

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    asked: dict[str, Any] = {"model": SEES, "max_tokens": 100, "extra_body": {"temperature": 0}}
    asked["messages"] = [{"role": "user", "content": blocks}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=PROXY_KEY, max_retries=0) as client:
        whole: Any = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed: Any = await stream.get_final_message()
        return [whole.content[0].text, streamed.content[0].text]


async def _ollama(url: str, picture: bytes) -> list[Any]:
    import ollama

    asked: dict[str, Any] = {"model": SEES, "options": {"temperature": 0}}
    async with ollama.AsyncClient(host=url, headers={"authorization": f"Bearer {PROXY_KEY}"}) as client:
        said = [{"role": "user", "content": QUESTION, "images": [picture]}]
        parts: Any = await client.chat(messages=said, stream=True, **asked)
        streamed = "".join([part.message.content or "" async for part in parts])
        whole = await client.generate(prompt=QUESTION, images=[picture], **asked)
        return [streamed, whole.response]


PYTHON: dict[str, Callable[[str, bytes], Awaitable[list[Any]]]] = {
    "openai": _openai,
    "anthropic": _anthropic,
    "ollama": _ollama,
}
"""What each SDK gets from a server at a URL for a picture: two answers, of which one was streamed."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("maker", MAKERS)
async def test_a_picture_of_an_sdk_for_python_is_seen(maker: str, way: str, served: Served) -> None:
    with note(f"{maker}-python.picture", way) as row:
        for picture, answer in SEEN.items():
            assert await PYTHON[maker](served.urls[way], picture) == [answer] * 2
        row["tools"] = HABITS[f"{maker}-python.picture"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("maker", MAKERS)
async def test_a_picture_of_an_sdk_for_node_is_seen(
    maker: str, way: str, served: Served, tmp_path: Path
) -> None:
    # imports look beside the script
    script = shutil.copy(ROOT / "tests" / "clients" / "conversations.mjs", INSTALLED)
    environ, file = environment(tmp_path, {"API_KEY": PROXY_KEY}), tmp_path / "picture.png"
    with note(f"{maker}-node.picture", way) as row:
        for picture, answer in SEEN.items():
            file.write_bytes(picture)
            command = ["node", str(script), f"{maker}-node", SEES, served.urls[way], str(file)]
            assert json.loads(await run(command, tmp_path, environ)) == [answer] * 2
        row["tools"] = HABITS[f"{maker}-node.picture"]
