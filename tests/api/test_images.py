"""Images in each API's messages: where they stand, and how their refusals are named."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from sealring.api.answers import Asked
from sealring.api.anthropic import ask_count, ask_messages
from sealring.api.chat import ask_chat
from sealring.api.fields import renamed
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.images import MAX_IMAGE_BYTES
from sealring.mesh.prompt.validate import validate_request
from sealring.v1 import inference_pb2 as inference

PNG = b"\x89PNG picture"
B64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{B64}"

Ask = Callable[[dict[str, Any], str], Asked]


def chat_part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def block(data: Any = B64, kind: Any = "image/png") -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat(*parts: Any, role: str = "user") -> tuple[Ask, dict[str, Any]]:
    return ask_chat, {"messages": [{"role": "user", "content": "hi"}, {"role": role, "content": list(parts)}]}


def messages(*blocks: Any, role: str = "user") -> tuple[Ask, dict[str, Any]]:
    earlier = [{"role": "user", "content": "hi"}]
    return ask_messages, {
        "max_tokens": 5,
        "messages": [*earlier, {"role": role, "content": list(blocks)}],
    }


def responses(*parts: Any, role: str = "user") -> tuple[Ask, dict[str, Any]]:
    earlier = [{"role": "user", "content": "hi"}]
    return ask_responses, {"input": [*earlier, {"role": role, "content": list(parts)}]}


def ollama(*images: Any, content: str = "see", role: str = "user") -> tuple[Ask, dict[str, Any]]:
    earlier = [{"role": "user", "content": "hi"}]
    return ask_ollama_chat, {
        "messages": [*earlier, {"role": role, "content": content, "images": list(images)}]
    }


def told(ask: Ask, body: dict[str, Any]) -> inference.ChatMessage:
    """The last message, as the rings get it."""
    asked = ask(body, "id")
    try:
        validate_request(asked.request)
    except InvalidInput as error:
        raise renamed(error, asked.names) from None
    return asked.request.envelope.clear.chat.messages[-1]


def places(message: inference.ChatMessage) -> list[tuple[int, bytes, bool]]:
    return [(one.at, one.data, one.low_detail) for one in message.images]


@pytest.mark.parametrize(
    ("asked", "content", "at", "low"),
    [
        (chat(chat_part(URL), text("see")), "see", 0, False),
        (chat(text("see"), chat_part(URL, detail="low")), "see", 3, True),
        (chat(text("a"), text("b"), chat_part(URL, detail="high"), text("c")), "a\nbc", 3, False),
        (chat({"type": "image_url", "image_url": URL.upper().replace(B64.upper(), B64)}), "", 0, None),
        (chat({"type": "file", "file": {"file_data": URL, "filename": "a.png"}}), "", 0, False),
        (chat(text("é"), chat_part(f"data:image/svg+xml;charset=x;base64,{B64}")), "é", 1, False),
        (chat(text("x"), chat_part(URL), role="tool"), "x", 1, False),
        (messages(text("a"), block(), text("b")), "ab", 1, False),
        (messages(block(kind=None)), "", 0, False),
        (
            responses({"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": URL}),
            "a",
            1,
            False,
        ),
        (responses({"type": "input_image", "image_url": URL, "detail": "low"}), "", 0, True),
        (responses({"type": "input_file", "file_data": URL, "filename": "a.png"}), "", 0, False),
        (ollama(B64), "see", 0, False),
        (ollama(URL, role="tool"), "see", 0, False),
        ((ask_ollama_generate, {"prompt": "see", "images": [B64]}), "see", 0, False),
        ((ask_ollama_generate, {"images": [B64]}), "", 0, False),
        ((ask_count, messages(block(), text("b"))[1]), "b", 0, False),
    ],
)
def test_an_image_stands_where_its_part_does(
    asked: tuple[Ask, dict[str, Any]], content: str, at: int, low: bool | None
) -> None:
    if low is None:  # base64 has cases
        low = False
        asked[1]["messages"][1]["content"][0]["image_url"] = "DATA:IMAGE/PNG;base64," + B64
    message = told(*asked)
    assert message.content == content
    assert places(message) == [(at, PNG, low)]


def test_several_images_keep_their_order() -> None:
    other = base64.b64encode(b"other").decode()
    assert places(told(*messages(block(), text("a"), block(other), block()))) == [
        (0, PNG, False),
        (1, b"other", False),
        (1, PNG, False),
    ]
    assert [one.data for one in told(*ollama(B64, other)).images] == [PNG, b"other"]


SHOT = {"type": "tool_result", "tool_use_id": "t", "content": [text("done"), block()]}


def test_screenshots_of_tools_are_images_of_their_messages() -> None:
    message = told(*messages({**SHOT, "is_error": True}))
    assert (message.role, message.content) == ("tool", "the tool failed:\ndone")
    assert places(message) == [(len(message.content), PNG, False)]
    output = [{"type": "input_text", "text": "done"}, {"type": "input_image", "image_url": URL}]
    body = {"input": [{"type": "function_call_output", "call_id": "c", "output": output}]}
    assert places(told(ask_responses, body)) == [(4, PNG, False)]


BAD, NO_URL, UNSUPPORTED = "BAD_IMAGE", "IMAGE_URL_REFUSED", "UNSUPPORTED_CONTENT"
REFUSED: list[tuple[tuple[Ask, dict[str, Any]], str, str]] = [
    (chat(chat_part("https://example.com/a.png")), NO_URL, "messages[1].content[0]"),
    (chat(text("x"), chat_part("file:///etc/passwd")), NO_URL, "messages[1].content[1]"),
    (
        messages({"type": "image", "source": {"type": "url", "url": "http://a/b"}}),
        NO_URL,
        "messages[1].content[0]",
    ),
    (responses({"type": "input_image", "image_url": "https://a/b"}), NO_URL, "input[1].content[0]"),
    (responses({"type": "input_image", "file_id": "file-1"}), BAD, "input[1].content[0]"),
    (chat(chat_part(f"data:image/png,{B64}")), BAD, "messages[1].content[0]"),
    (chat(chat_part(f"data:text/html;base64,{B64}")), BAD, "messages[1].content[0]"),
    (chat(chat_part("data:" + "x" * 999 + f";base64,{B64}")), BAD, "messages[1].content[0]"),
    (chat(chat_part("data:image/png;base64,")), BAD, "messages[1].content[0]"),
    (chat(chat_part(f"{URL}\n")), BAD, "messages[1].content[0]"),
    (chat(chat_part("data:image/png;base64,AA==AAAA")), BAD, "messages[1].content[0]"),
    (chat(chat_part("data:image/png;base64,AAé=")), BAD, "messages[1].content[0]"),
    (chat(chat_part("data:image/png;base64,AAA")), BAD, "messages[1].content[0]"),
    (chat(chat_part(URL, detail="huge")), BAD, "messages[1].content[0]"),
    (chat(chat_part(URL, detail=[])), BAD, "messages[1].content[0]"),
    (chat({"type": "image_url"}), BAD, "messages[1].content[0]"),
    (chat({"type": "image"}), BAD, "messages[1].content[0]"),
    (messages({"type": "image", "source": {"type": "file", "file_id": "f"}}), BAD, "messages[1].content[0]"),
    (messages(block(kind="application/pdf")), BAD, "messages[1].content[0]"),
    (messages(block(data=7)), BAD, "messages[1].content[0]"),
    (ollama("!"), BAD, "messages[1].images[0]"),
    (ollama(B64, 7), BAD, "messages[1].images[1]"),
    ((ask_ollama_generate, {"prompt": "x", "system": "s", "images": ["!"]}), BAD, "images[0]"),
    (
        messages({**SHOT, "is_error": True, "content": [block(data="!")]}),
        BAD,
        "messages[1].content[0].content[0]",
    ),
    (chat(chat_part(URL), role="assistant"), UNSUPPORTED, "messages[1].content[0]"),
    (chat(chat_part(URL), role="developer"), UNSUPPORTED, "messages[1].content[0]"),
    (messages(block(), role="assistant"), UNSUPPORTED, "messages[1].content[0]"),
    (responses({"type": "input_image", "image_url": URL}, role="system"), UNSUPPORTED, "input[1].content[0]"),
    (ollama(B64, role="assistant"), UNSUPPORTED, "messages[1].images[0]"),
    (
        (ask_chat, {"messages": [{"role": "user", "content": "x", "images": [B64]}]}),
        UNSUPPORTED,
        "messages[0].images",
    ),
]


@pytest.mark.parametrize(("asked", "reason", "param"), REFUSED)
def test_a_refusal_names_the_part(asked: tuple[Ask, dict[str, Any]], reason: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        told(*asked)
    assert (caught.value.reason, caught.value.metadata["param"]) == (reason, param)
    assert B64 not in str(caught.value)


def test_an_image_in_a_tools_output_is_named_as_the_client_has_it() -> None:
    output = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "https://a/b"}]
    with pytest.raises(InvalidInput) as caught:
        told(ask_responses, {"input": [{"type": "function_call_output", "call_id": "c", "output": output}]})
    assert caught.value.metadata["param"] == "input[0].output[1]"


def test_what_a_ring_says_of_an_image_is_named_as_the_client_has_it() -> None:
    for asked, param in (
        (chat(text("x"), chat_part(URL)), "messages[1].content[1]"),
        (messages(text("x"), SHOT), "messages[1].content[1].content[1]"),
        (messages(text("x"), block()), "messages[1].content[1]"),
        (responses(text("x"), {"type": "input_image", "image_url": URL}), "input[1].content[1]"),
        (ollama(B64), "messages[1].images[0]"),
    ):
        ask, body = asked
        made = ask(body, "id")
        index = next(at for at, one in enumerate(made.request.envelope.clear.chat.messages) if one.images)
        error = InvalidInput("it is broken", reason="BAD_IMAGE", param=f"messages[{index}].images[0]")
        assert renamed(error, made.names).metadata["param"] == param


def test_base64_that_is_too_long_is_not_decoded() -> None:
    longest = base64.b64encode(bytes(MAX_IMAGE_BYTES)).decode()
    assert len(told(*messages(block(longest))).images[0].data) == MAX_IMAGE_BYTES
    with pytest.raises(InvalidInput) as caught:
        told(*messages(block("!" * (len(longest) + 8))))  # malformed, too: nobody looked
    assert caught.value.reason == "IMAGE_TOO_LARGE"


def test_an_assistants_own_images_come_back_and_no_model_sees_them() -> None:
    said = {"role": "assistant", "content": "here", "images": [chat_part(URL)]}
    asked = ask_chat({"messages": [said, {"role": "user", "content": "x"}]}, "id")
    assert not asked.request.envelope.clear.chat.messages[0].images
