"""The bound of a request's tokens, which no request passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.gateway.usage.bound import TEMPLATE_TOKENS, most_tokens
from sealring.mesh.prompt.images import VISION
from sealring.mesh.prompt.tools import EMBEDDING
from sealring.v1 import inference_pb2 as inference

CONTEXT = 4096
MODEL = inference.Model(context=CONTEXT)


def text(content: str) -> inference.Envelope:
    return inference.Envelope(clear=inference.Prompt(text=content))


def image() -> inference.Envelope:
    message = inference.ChatMessage(role="user", images=[inference.Image(data=b"\x89PNG")])
    return inference.Envelope(clear=inference.Prompt(chat=inference.Chat(messages=[message])))


@given(
    prompt=st.integers(0, 6000),
    max_tokens=st.integers(0, 6000),
    choices=st.integers(0, 8),
    sealed=st.booleans(),
)
def test_a_text_of_a_byte_a_token_stays_below_the_bound(
    prompt: int, max_tokens: int, choices: int, sealed: bool
) -> None:
    envelope = inference.Envelope(sealed=b"a" * prompt) if sealed else text("a" * prompt)
    request = inference.GenerateRequest(envelope=envelope, max_tokens=max_tokens, choices=choices)
    read = min(prompt, CONTEXT)
    answered = max(1, choices) * min(max_tokens or CONTEXT, CONTEXT - read)
    assert read + answered <= most_tokens(request, MODEL) <= max(1, choices) * CONTEXT


@pytest.mark.parametrize(
    ("envelope", "model", "most"),
    [
        (image(), MODEL, CONTEXT),
        (
            inference.Envelope(sealed=b"tiny"),
            inference.Model(context=CONTEXT, capabilities=[VISION]),
            CONTEXT,
        ),
        (text(""), MODEL, TEMPLATE_TOKENS + 4 + 7),
        (text(""), inference.Model(), TEMPLATE_TOKENS + 4 + 7),
        (text(""), inference.Model(context=CONTEXT, capabilities=[EMBEDDING]), TEMPLATE_TOKENS + 4),
    ],
)
def test_what_has_more_tokens_than_bytes(
    envelope: inference.Envelope, model: inference.Model, most: int
) -> None:
    assert most_tokens(inference.GenerateRequest(envelope=envelope, max_tokens=7), model) == most
