"""Requests and answers of all APIs, as their receipts have to name them.

Bodies and answers are those of the HTTP APIs. A body is read by the code that gateways read it with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sealring.api.answers import Asked
from sealring.api.anthropic import ask_messages
from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.receipt.digests import AnswerHash, request_digest
from sealring.mesh.receipt.form import NAME, receipts_of
from sealring.v1 import inference_pb2 as inference

_Object = dict[str, Any]
_FINISHES = {
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "incomplete": "length",
}
"""Words of the APIs for an answer that a limit has ended; all others mean `stop`."""


@dataclass(frozen=True)
class ChoiceDigests:
    """The hashes of one choice, as in AnswerDigests; None for what this API does not give unchanged."""

    text: bytes | None = None
    reasoning: bytes | None = None
    calls: bytes | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Answered:
    """A whole answer: its receipts and its choices, and what reads the body that asked for it."""

    receipts: list[inference.Receipt]
    choices: list[ChoiceDigests]
    ask: Callable[[_Object, str], Asked] | None

    def requests(self, body: _Object) -> list[bytes]:
        """The hash of the request that each receipt is of. Raises InvalidInput for a malformed body."""
        if self.ask is None:
            raise ReceiptError(
                "a receipt alone does not say which API was asked",
                hint="give the whole answer",
                reason="RECEIPT_API",
            )
        asked = self.ask(body, "")
        return [
            request_digest(one.envelope.clear, one.max_tokens)
            for one in (asked.request, *asked.others)
            for _ in range(one.choices or 1)
        ]


def read_answer(value: _Object) -> Answered:
    """An answer of any of the APIs, or what `receipts_json` makes. Raises ReceiptError (RECEIPT_MALFORMED,
    RECEIPT_MISSING)."""
    if NAME not in value and "rosters" in value:
        return Answered(receipts_of(value), [], None)
    if NAME not in value:
        raise ReceiptError(
            "the answer has no receipt",
            hint="ask with the header `sealring-receipt` and a nonce of 32 hexadecimal digits or more",
            reason="RECEIPT_MISSING",
        )
    receipts = receipts_of(value[NAME])
    try:
        choices, ask = _read(value)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _malformed("the answer has not the form of any of the APIs") from None
    if choices and len(choices) != len(receipts):
        raise _malformed(f"the answer has {len(choices)} choices and {len(receipts)} receipts")
    return Answered(receipts, choices, ask)


def text_digests(text: str) -> ChoiceDigests:
    """A choice of which only the text is known."""
    return ChoiceDigests(hashlib.sha256(text.encode()).digest())


def _read(value: _Object) -> tuple[list[ChoiceDigests], Callable[[_Object, str], Asked] | None]:
    kind = value.get("object") or value.get("type")
    if kind == "chat.completion":
        return [_chat(one["message"], one["finish_reason"]) for one in value["choices"]], ask_chat
    if kind == "text_completion":
        return [
            _digests(one["text"], "", [], one["finish_reason"]) for one in value["choices"]
        ], ask_completion
    if kind == "response":
        return [_response(value)], ask_responses
    if kind == "message":
        return [_message(value)], ask_messages
    if "message" in value:
        return [_ollama(value["message"], value["done_reason"])], ask_ollama_chat
    if "response" in value:
        return [_ollama({**value, "content": value["response"]}, value["done_reason"])], ask_ollama_generate
    if isinstance(value.get("answer"), str):  # of `sealring chat --json`, which has no reasoning apart
        return [text_digests(value["answer"])], None
    return [], None


def _chat(message: _Object, finish: str) -> ChoiceDigests:
    calls = [
        (one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or []
    ]
    return _digests(message.get("content") or "", message.get("reasoning_content") or "", calls, finish)


def _response(value: _Object) -> ChoiceDigests:
    text, reasoning, calls, plain = "", "", [], True
    for item in value["output"]:
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in item["summary"])
        elif item["type"] == "function_call" and "namespace" not in item:
            calls.append((item["name"], item["arguments"]))
        else:
            plain = False  # the API gives the call another name
    digests = _digests(text, reasoning, calls, value["status"])
    return digests if plain else replace(digests, calls=None)


def _message(value: _Object) -> ChoiceDigests:
    text, reasoning, calls = "", "", []
    for block in value["content"]:
        if block["type"] == "text":
            text += block["text"]
        elif block["type"] == "thinking":
            reasoning += block["thinking"]
        elif block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
    return _digests(text, reasoning, calls, value["stop_reason"])


def _ollama(message: _Object, finish: str) -> ChoiceDigests:
    functions = [one["function"] for one in message.get("tool_calls") or []]
    calls = [(one["name"], json.dumps(one["arguments"])) for one in functions]
    return _digests(message.get("content") or "", message.get("thinking") or "", calls, finish)


def _digests(text: str, reasoning: str, calls: list[tuple[str, str]], finish: str) -> ChoiceDigests:
    answer = AnswerHash()
    answer.add(text, reasoning, [inference.ToolCall(name=name, arguments=said) for name, said in calls])
    found = answer.digests()
    return ChoiceDigests(found.text, found.reasoning, found.calls, _FINISHES.get(finish, "stop"))


def _malformed(why: str) -> ReceiptError:
    return ReceiptError(why, hint="give the answer as it came", reason="RECEIPT_MALFORMED")


def parse_body(data: bytes, what: str) -> _Object:
    """A JSON object. Raises InvalidInput (BAD_FILE)."""
    try:
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise InvalidInput(f"{what} is no JSON object", reason="BAD_FILE", hint="give the file as it was sent")
