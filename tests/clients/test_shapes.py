"""The shapes of what real programs send are taken: parsed, translated, rendered strictly, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scriptedmodel import write_scripted
from shapes import FOLDER, requests

from sealring.node.engine.text import Tokenizer, encode_chat, load_tokenizer

NAMES = sorted(file.stem for file in FOLDER.iterdir())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """With a template that refuses a later system message, and two messages of a user in a row."""
    folder = tmp_path_factory.mktemp("model")
    write_scripted(folder, [])
    tokenizer = load_tokenizer(folder, context=1 << 20)
    yield tokenizer
    tokenizer.close()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("name", NAMES)
async def test_every_request_of_a_program_is_taken(
    name: str, port: int, backend: Any, tokenizer: Tokenizer
) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
        for sent in requests(name):
            body = sent["body"] | {"model": "demo"}
            answer = await http.post(sent["path"], json=body, headers=sent.get("headers"))
            assert answer.status_code == 200, answer.text
            assert '"error": {' not in answer.text
            prompt = backend.requests[-1].envelope.clear
            if "prompt" in body:
                assert prompt.text == body["prompt"]
                continue
            chat = prompt.chat
            said = body.get("messages") or body["input"]
            longest = max((text for text in _texts(said)), key=len)
            assert any(longest[:200] in message.content for message in chat.messages), "a text is lost"
            assert bool(chat.tools) is bool(body.get("tools"))
            tokens = encode_chat(tokenizer, chat)
            assert len(tokens) > len(longest) / 8, "the template has left it out"
            if sent["path"].startswith("/v1/messages"):
                counted = {key: one for key, one in body.items() if key not in ("max_tokens", "stream")}
                answer = await http.post("/v1/messages/count_tokens", json=counted)
                assert answer.json() == {"input_tokens": 5}
                assert backend.requests[-1].envelope.clear.chat == chat
