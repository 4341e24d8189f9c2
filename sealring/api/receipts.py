"""Requests and answers of all APIs, as their receipts have to name them.

Bodies and answers are those of the HTTP APIs. A body is read by the code that gateways read it with.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sealring.api.answers import Asked
from sealring.api.anthropic import ask_messages
from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses, called_names
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.prompt.images import has_images, without_images
from sealring.mesh.receipt.digests import AnswerHash, request_digest
from sealring.mesh.receipt.form import NAME, receipts_of
from sealring.mesh.receipt.statement import parse_statement
from sealring.v1 import inference_pb2 as inference

_Object = dict[str, Any]
_FINISHES = {
    **dict.fromkeys(("length", "max_tokens", "max_output_tokens", "incomplete"), "length"),
    **dict.fromkeys(("stop", "stop_sequence", "end_turn", "tool_calls", "tool_use", "completed"), "stop"),
}
"""Words of the APIs for the end of an answer."""

_APIS: dict[str, Callable[[_Object, str], Asked]] = {
    "/v1/chat/completions": ask_chat,
    "/v1/responses": ask_responses,
    "/v1/messages": ask_messages,
    "/v1/completions": ask_completion,
    "/api/chat": ask_ollama_chat,
    "/api/generate": ask_ollama_generate,
}

_BESIDE = frozenset(
    {"created_at", "done", "done_reason", "eval_count", "eval_duration", "load_duration", "model"}
    | {"prompt_eval_count", "prompt_eval_duration", "total_duration", NAME}
)
"""Fields of Ollama's answers beside what the model said."""


@dataclass(frozen=True)
class ChoiceDigests:
    """The hashes of one choice, as in AnswerDigests; None for what this API does not give unchanged."""

    text: bytes | None = None
    reasoning: bytes | None = None
    calls: bytes | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Asking:
    """A question as the receipt of one answer names it: the hash of its request, the number of the choice.

    `in_words` is the hash with words in the place of images, which gateways put there for a model that cannot
    see; None where there may be none. `api` is the path whose reading of the body the receipt names, if the
    answer does not say it.
    """

    request: bytes
    in_words: bytes | None
    choice: int
    api: str = ""


@dataclass(frozen=True)
class Answered:
    """A whole answer: its receipts, its choices, the model that it names, and what reads the body that asked
    for it."""

    receipts: list[inference.Receipt]
    choices: list[ChoiceDigests]
    model: str | None
    ask: Callable[[_Object, str], Asked] | None

    def asking(self, body: _Object) -> list[Asking]:
        """What each receipt has to be of.

        A receipt alone, as of a stream, does not say which API was asked. Then it is the one by whose reading
        of the body all receipts are of it. Raises InvalidInput for a malformed body, ReceiptError
        (RECEIPT_OTHER_REQUEST).
        """
        if self.ask is not None:
            return _asking(self.ask, body)
        signed = [parse_statement(one.head.statement).request for one in self.receipts]
        for path, ask in _APIS.items():
            try:
                found = _asking(ask, body, path)
            except InvalidInput:
                continue
            if len(found) == len(signed) and all(
                request in (one.request, one.in_words) for one, request in zip(found, signed, strict=True)
            ):
                return found
        raise ReceiptError(
            "the receipt is for another request, by whichever API the body was sent to",
            hint="give the body as it was sent",
            reason="RECEIPT_OTHER_REQUEST",
        )


def _asking(ask: Callable[[_Object, str], Asked], body: _Object, api: str = "") -> list[Asking]:
    """What a body asks for, as `ask` reads it. Raises InvalidInput."""
    asked = ask(body, "")
    return [
        Asking(request_digest(one.envelope.clear, one.max_tokens), _in_words(one), choice, api)
        for one in (asked.request, *asked.others)
        for choice in range(one.choices or 1)
    ]


def _in_words(asked: inference.GenerateRequest) -> bytes | None:
    prompt = asked.envelope.clear
    if not has_images(prompt):
        return None
    try:
        return request_digest(without_images(prompt, asked.model), asked.max_tokens)
    except InvalidInput:  # what was just asked shows an image: no model answers it without seeing
        return None


def read_answer(value: _Object, body: _Object | None = None) -> Answered:
    """An answer of any of the APIs, or what `receipts_json` makes. `body` is what asked for it.

    Raises ReceiptError (RECEIPT_MISSING; RECEIPT_MALFORMED also for an answer with a part that receipts do
    not cover), InvalidInput for a malformed body.
    """
    if set(value) == {"choices", "rosters"}:
        return Answered(receipts_of(value), [], None, None)
    if NAME not in value:
        raise ReceiptError(
            "the answer has no receipt",
            hint="ask with the header `sealring-receipt` and a nonce of 32 hexadecimal digits or more",
            reason="RECEIPT_MISSING",
        )
    receipts = receipts_of(value[NAME])
    try:
        choices, ask = _read(value, body)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _malformed("the answer has not the form of any of the APIs") from None
    if len(choices) != len(receipts):
        raise _malformed(f"the answer has {len(choices)} choices and {len(receipts)} receipts")
    model = value.get("model")
    return Answered(receipts, choices, model if isinstance(model, str) else None, ask)


def text_digests(text: str) -> ChoiceDigests:
    """A choice of which only the text is known."""
    return ChoiceDigests(hashlib.sha256(text.encode()).digest())


def _read(
    value: _Object, body: _Object | None
) -> tuple[list[ChoiceDigests], Callable[[_Object, str], Asked] | None]:
    kind = value.get("object") or value.get("type")
    if kind == "chat.completion":
        return [_chat(one["message"], one["finish_reason"]) for one in value["choices"]], ask_chat
    if kind == "text_completion":
        told = [_digests(one["text"], "", [], one["finish_reason"]) for one in value["choices"]]
        return told, ask_completion
    if kind == "response":
        return [_response(value, None if body is None else called_names(body))], ask_responses
    if kind == "message":
        return [_message(value)], ask_messages
    if "message" in value:
        _cover(value, _BESIDE | {"message"})
        return [_ollama(value["message"], value["done_reason"])], ask_ollama_chat
    if "response" in value:
        said = {name: part for name, part in value.items() if name not in _BESIDE}
        said["content"] = said.pop("response")
        return [_ollama(said, value["done_reason"])], ask_ollama_generate
    # of `sealring chat --json`, which has no reasoning apart
    return [text_digests(value["answer"])], None


def _cover(part: _Object, names: Iterable[str]) -> None:
    """Refuses a part of an answer with anything else in it: no receipt covers that, and programs may act on
    it."""
    for name in sorted(set(part).difference(names)):
        if part[name]:
            raise ReceiptError(
                f"the answer has a part that no receipt covers: {str(name)[:64]!r}",
                reason="RECEIPT_MALFORMED",
            )


def _chat(message: _Object, finish: str) -> ChoiceDigests:
    _cover(message, ("role", "content", "reasoning_content", "tool_calls"))
    calls = [
        (one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or []
    ]
    return _digests(message.get("content") or "", message.get("reasoning_content") or "", calls, finish)


def _response(value: _Object, names: Mapping[tuple[str, str], str] | None) -> ChoiceDigests:
    """`names` are those that the model has for the tools of a namespace; None where the body is not known."""
    text, reasoning, calls, plain = "", "", [], True
    for item in value["output"]:
        kind = item["type"]
        if kind == "message":
            for part in item["content"]:
                _cover(part, ("type", "text", "logprobs"))
                text += part["text"]
        elif kind == "reasoning":
            _cover(item, ("id", "type", "summary", "status"))
            reasoning += "".join(part["text"] for part in item["summary"])
        elif kind in ("function_call", "custom_tool_call"):
            name, space = item["name"], item.get("namespace") or ""
            if space or kind == "custom_tool_call":
                plain = names is not None
                name = (names or {}).get((space, name), name)
            said = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
            calls.append((name, said))
        else:
            _cover({kind: True}, ())
    digests = _digests(text, reasoning, calls, value["status"])
    return digests if plain else replace(digests, calls=None)


def _message(value: _Object) -> ChoiceDigests:
    text, reasoning, calls = "", "", []
    for block in value["content"]:
        if block["type"] == "text":
            _cover(block, ("type", "text"))
            text += block["text"]
        elif block["type"] == "thinking":
            _cover(block, ("type", "thinking"))
            reasoning += block["thinking"]
        elif block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
        else:
            _cover({block["type"]: True}, ())
    return _digests(text, reasoning, calls, value["stop_reason"])


def _ollama(message: _Object, finish: str) -> ChoiceDigests:
    _cover(message, ("role", "content", "thinking", "tool_calls"))
    functions = [one["function"] for one in message.get("tool_calls") or []]
    calls = [(one["name"], json.dumps(one["arguments"])) for one in functions]
    return _digests(message.get("content") or "", message.get("thinking") or "", calls, finish)


def _digests(text: str, reasoning: str, calls: list[tuple[str, str]], finish: str) -> ChoiceDigests:
    answer = AnswerHash()
    answer.add(text, reasoning, [inference.ToolCall(name=name, arguments=said) for name, said in calls])
    found = answer.digests()
    return ChoiceDigests(found.text, found.reasoning, found.calls, _FINISHES[finish])


def _malformed(why: str) -> ReceiptError:
    return ReceiptError(
        why,
        hint="give the answer as it came; of a stream the value of sealring_receipt alone",
        reason="RECEIPT_MALFORMED",
    )


def parse_body(data: bytes, what: str) -> _Object:
    """A JSON object. Raises InvalidInput (BAD_FILE)."""
    try:
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise InvalidInput(
        f"{what} is no JSON object",
        reason="BAD_FILE",
        hint="give the file as it was sent; of a stream the value of sealring_receipt in its last event, and "
        "the text with --text",
    )
