"""Conversations of any kind in the chat templates of real models: nothing is lost but what is refused by name
(`make templates`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from markedchats import conversations, missing, rendering

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text import (
    CALLS,
    DETAILS,
    LAST,
    MESSAGES,
    THOUGHTS,
    TOOLS,
    Shape,
    kinds_of,
    shape_of,
    with_images,
)
from sealring.v1 import inference_pb2 as inference

pytestmark = pytest.mark.sweep

FOLDER = Path(__file__).parents[2] / "build" / "templates" / "jinja"
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja"))

REFUSED = {
    "NVIDIA-Nemotron-Nano-v2": {LAST},
    "fireworks-ai-llama-3-firefunction-v2": {MESSAGES},
    "google-gemma-2-2b-it": {CALLS, TOOLS},
    "llama-cpp-deepseek-r1": {CALLS, TOOLS},
    "llama-cpp-rwkv-world": {CALLS, TOOLS},
    "microsoft-Phi-3.5-mini-instruct": {CALLS, TOOLS},
}
"""The kinds that each template has requests refused for, without what consists of them (docs/clients.md)."""

DEFAULT = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
"""Beside a template that is for chats with tools alone."""

PLACEHOLDERS = {
    "Apriel-1.6-15b-Thinker-fixed": "[IMG]",
    "Kimi-K3": "<|kimi_image_placeholder|>",
    "MiniMax-M3": "]<]image[>[",
    "Mistral-Small-3.2-24B-Instruct-2506": "[IMG]",
    "Qwen3.5-4B": "<|image_pad|>",
    "Reka-Edge": "<image>",
    "StepFun3.5-Flash": "<im_patch>",
    "google-gemma-4-31B-it": "<|image|>",
    "mistralai-Ministral-3-14B-Reasoning-2512": "[IMG]",
    "unsloth-Apriel-1.5": "[IMG]",
}
"""What templates write for an image."""


@cache
def asked(name: str) -> tuple[Any, Shape]:
    source = (FOLDER / f"{name}.jinja").read_text("utf-8")
    render = rendering(DEFAULT, source) if name.endswith("tool_use") else rendering(source)
    return render, shape_of(render)


@pytest.mark.parametrize("name", NAMES)
@given(chat=conversations())
def test_nothing_is_lost_silently(name: str, chat: inference.Chat) -> None:
    render, shape = asked(name)
    lost = set(shape.lost) - {THOUGHTS, DETAILS}
    assert lost >= (known := REFUSED.get(name, set()))
    assert not lost or known
    if lost & kinds_of(chat):
        with pytest.raises(InvalidInput, match="does not show") as caught:
            missing(render, shape, chat)
        assert caught.value.reason == "CHAT_TEMPLATE_LOSES"
    elif MESSAGES not in lost:
        assert missing(render, shape, chat) == []


@pytest.mark.parametrize("name", PLACEHOLDERS)
@given(chat=conversations(images=True))
def test_no_image_is_lost(name: str, chat: inference.Chat) -> None:
    render, shape = asked(name)
    shape = with_images(render, shape, PLACEHOLDERS[name])
    assert not set(shape.lost) - {THOUGHTS, DETAILS}
    assert missing(render, shape, chat, PLACEHOLDERS[name]) == []


def test_templates_were_fetched() -> None:
    assert len(NAMES) == 70
