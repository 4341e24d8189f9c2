"""Answers that a gateway has changed or made up beside a true receipt, in the form of each API."""

from __future__ import annotations

from typing import Any

import pytest
from refusals import refused

from sealring.api.receipts import ChoiceDigests, read_answer
from sealring.mesh.errors import ReceiptError
from sealring.mesh.prompt.images import NOTE
from sealring.mesh.receipt.digests import AnswerHash
from sealring.mesh.receipt.form import NAME, receipts_json
from sealring.v1 import inference_pb2 as inference

SIGNED = inference.Receipt(
    head=inference.HeadReceipt(statement=b"s", signature=b"h"), roster=b"roster", root_metadata=b"root"
)
RECEIPTS = {NAME: receipts_json([SIGNED])}
CALL = {"type": "function_call", "id": "i", "call_id": "c", "status": "completed"}
SAID = {"type": "message", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]}


def chat(finish: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "Hi", "refusal": None, **message}
    return {"object": "chat.completion", "choices": [{"message": said, "finish_reason": finish}], **RECEIPTS}


def response(*items: Any, status: str = "completed") -> dict[str, Any]:
    return {"object": "response", "output": [SAID, *items], "status": status, **RECEIPTS}


def message(*blocks: Any) -> dict[str, Any]:
    text = {"type": "text", "text": "Hi", "citations": None}
    return {"type": "message", "content": [text, *blocks], "stop_reason": "end_turn", **RECEIPTS}


def ollama(field: str = "message", **more: Any) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": "Hi", **more}} if field == "message" else more
    if field == "response":
        said["response"] = "Hi"
    return {"model": "demo", "done": True, "done_reason": "stop", **said, **RECEIPTS}


def told(*calls: tuple[str, str], text: str = "Hi") -> ChoiceDigests:
    answer = AnswerHash()
    answer.add(text, "", [inference.ToolCall(name=name, arguments=said) for name, said in calls])
    found = answer.digests()
    return ChoiceDigests(found.text, found.reasoning, found.calls, "stop")


@pytest.mark.parametrize(
    "answer", [chat(), response(), message(), ollama(), ollama("response"), chat("tool_calls")]
)
def test_an_answer_as_it_was_sent_is_read(answer: dict[str, Any]) -> None:
    assert read_answer(answer).choices == [told()]


@pytest.mark.parametrize(
    "answer",
    [
        chat(function_call={"name": "rm", "arguments": "{}"}),
        chat(audio={"data": "x"}),
        chat("content_filter"),
        chat(content=[{"type": "text", "text": "Hi"}]),
        response({"type": "computer_call", "action": {}}),
        response({"type": "message", "content": [{"type": "output_text", "text": "", "annotations": [1]}]}),
        response(status="failed"),
        message({"type": "server_tool_use", "name": "rm", "input": {}}),
        message({"type": "text", "text": "", "citations": [{}]}),
        ollama(images=["x"]),
        ollama("response", image="x"),
        {"object": "chat.completion.chunk", "choices": [], **RECEIPTS},
        {"object": "chat.completion", "choices": [], **RECEIPTS},
        {"object": "of a form that nobody knows", **RECEIPTS},
    ],
)
def test_an_answer_with_a_part_that_no_receipt_covers_is_refused(answer: dict[str, Any]) -> None:
    with refused("RECEIPT_MALFORMED", ReceiptError):
        read_answer(answer)


def test_a_receipt_alone_has_nothing_beside_it() -> None:
    assert read_answer(RECEIPTS[NAME]).choices == []
    with refused("RECEIPT_MISSING", ReceiptError):
        read_answer({**RECEIPTS[NAME], "output_text": "Hi"})


def test_calls_under_names_of_the_clients_are_those_of_its_request() -> None:
    """Codex names tools by namespace, and has custom ones, which the model calls otherwise."""
    body = {
        "model": "demo",
        "input": "Hi",
        "tools": [
            {"type": "namespace", "name": "disk", "tools": [{"type": "function", "name": "look"}]},
            {"type": "custom", "name": "patch"},
        ],
    }
    answer = response(
        {**CALL, "name": "look", "namespace": "disk", "arguments": '{"a": 1}'},
        {**CALL, "type": "custom_tool_call", "name": "patch", "input": "+x"},
    )
    expected = told(("disk__look", '{"a":1}'), ("patch", '{"input": "+x"}'))
    assert read_answer(answer, body).choices == [expected]
    assert read_answer(answer).choices[0].calls is None, "without the request it is not known"
    forged = response({**CALL, "name": "look", "namespace": "other", "arguments": '{"a": 1}'})
    assert read_answer(forged, body).choices[0].calls != told(("disk__look", '{"a":1}')).calls


def test_each_choice_of_each_prompt_has_a_place_of_its_own() -> None:
    texts = [{"text": text, "finish_reason": "stop"} for text in "abcd"]
    answer = {"object": "text_completion", "choices": texts, NAME: receipts_json([SIGNED] * 4)}
    body = {"model": "demo", "prompt": ["x", "x"], "n": 2}
    found = read_answer(answer).asking(body)
    assert [one.choice for one in found] == [0, 1, 0, 1]
    assert len({one.request for one in found}) == 1


def test_a_request_with_earlier_images_may_have_words_in_their_place() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    asked = [
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
    ]
    (found,) = read_answer(chat()).asking({"model": "demo", "messages": asked, "max_tokens": 9})
    (shown,) = read_answer(chat()).asking({"model": "demo", "messages": asked[:1], "max_tokens": 9})
    words = [{"role": "user", "content": f"What is it?\n{NOTE}"}, *asked[1:]]
    (told_so,) = read_answer(chat()).asking({"model": "demo", "messages": words, "max_tokens": 9})
    assert found.in_words == told_so.request != found.request
    assert told_so.in_words is None
    assert shown.in_words is None, "a model that does not see refuses what was just asked"
