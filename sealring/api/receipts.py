"""Requests and answers of all APIs, as their receipts have to name them.

Bodies and answers are those of the HTTP APIs. A body is read by the code that gateways read it with.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sealring.api.answers import Asked
from sealring.api.whole import FORMS, Said, fits, read_whole
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.prompt.images import has_images, without_images
from sealring.mesh.receipt.digests import AnswerHash, parse_json, request_digest
from sealring.mesh.receipt.form import NAME, receipts_of
from sealring.v1 import inference_pb2 as inference

_Object = dict[str, Any]

CHAT = "sealring chat"
"""What prints an answer and its receipt as JSON, beside the APIs."""

APIS = (*FORMS, CHAT)
"""Everything that gives answers with receipts."""

_OF_CHAT = {
    **dict.fromkeys(("model", "ring", "min_trust", "finish", "answer"), str),
    **dict.fromkeys(("prompt_tokens", "completion_tokens"), int),
    **dict.fromkeys(("ttft_s", "tok_s"), (int, float)),
    "sealed": bool,
    "logprobs": [dict],
    NAME: dict,
}


@dataclass(frozen=True)
class ChoiceDigests:
    """The hashes of one choice, as in AnswerDigests; None for what this API does not give unchanged."""

    text: bytes | None = None
    reasoning: bytes | None = None
    calls: bytes | None = None
    finish: str | None = None
    order: bytes | None = None


@dataclass(frozen=True)
class Asking:
    """A question as the receipt of one answer names it: the number of the choice, and the request's hashes.

    Each hash has in words how its head has read the request. There are words in the place of images, which
    gateways put there for a model that cannot see. Where the request names no options, those of the API hold,
    as in earlier releases, or those of the model.
    """

    requests: Mapping[bytes, str]
    choice: int


@dataclass(frozen=True)
class Answered:
    """An answer: its receipts, its choices, the model that it names, and what was asked for it.

    A receipt alone has no choices, and nothing was `asked` where no request is known. `unsigned` are paths of
    parts of the answer that are compared with nothing.
    """

    receipts: list[inference.Receipt]
    choices: list[ChoiceDigests]
    model: str | None = None
    asked: list[Asking] | None = None
    unsigned: tuple[str, ...] = ()


def _asking(asked: Asked) -> list[Asking]:
    """The question that each receipt of the answer has to name."""
    return [
        Asking(requests, choice)
        for one in (asked.request, *asked.others)
        for requests in [_requests(one)]
        for choice in range(one.choices or 1)
    ]


def _requests(asked: inference.GenerateRequest) -> dict[bytes, str]:
    prompts = {"": asked.envelope.clear}
    if has_images(prompts[""]):
        with contextlib.suppress(InvalidInput):  # the last message shows an image: its model has to see
            words = ", with words in the place of the images"
            prompts[words] = without_images(prompts[""], asked.model)
    found = {}
    for words, prompt in prompts.items():
        own = {True: ", with the model's own options", False: ", with the API's options"}
        for unnamed, options in own.items() if prompt.sampling.unnamed else [(True, "")]:
            told = options and f"{options} where it names none"
            found[request_digest(prompt, asked.max_tokens, unnamed=unnamed)] = words + told
    return found


def read_answer(value: _Object, api: str, body: _Object | None = None) -> Answered:
    """An answer of `api`, or what `receipts_json` makes. `body` is what asked for it.

    The API is named by its client, and never by the answer: a program reads what it has asked for.
    Raises ReceiptError (RECEIPT_MISSING; RECEIPT_MALFORMED also for an answer with a part that receipts do
    not cover), InvalidInput for a malformed body, BAD_OPTION for an API that is not known.
    """
    if api not in APIS:
        raise InvalidInput(
            f"there is no API {api[:64]!r}",
            hint=f"name one of {', '.join(APIS)}",
            reason="BAD_OPTION",
            param="api",
        )
    if api == CHAT and body is not None:
        raise InvalidInput(
            f"{CHAT} sends no body", hint="leave out --request", reason="BAD_OPTION", param="request"
        )
    if set(value) == {"choices", "rosters"}:
        asked = None if body is None else _asking(FORMS[api].ask(body, ""))
        return Answered(receipts_of(value), [], asked=asked)
    if NAME not in value:
        raise ReceiptError(
            "the answer has no receipt",
            hint="ask with the header `sealring-receipt` and a nonce of 32 hexadecimal digits or more; of a "
            f"stream the value of {NAME} in its last event is read alone",
            reason="RECEIPT_MISSING",
        )
    receipts = receipts_of(value[NAME])
    if api == CHAT:
        return _of_chat(value, receipts)
    whole = read_whole(value, api, body)
    if len(whole.said) != len(receipts):
        raise _malformed(f"the answer has {len(whole.said)} choices and {len(receipts)} receipts")
    choices = [_digests(one) for one in whole.said]
    if not whole.plain:
        choices = [replace(one, calls=None) for one in choices]
    if not whole.ordered:
        choices = [replace(one, order=None) for one in choices]
    asked = None if body is None else _asking(whole.asked)
    return Answered(receipts, choices, value["model"], asked, whole.unsigned)


def _of_chat(value: _Object, receipts: list[inference.Receipt]) -> Answered:
    """The text of `sealring chat --json`, which has no reasoning apart."""
    if set(value) != set(_OF_CHAT) or not fits(value, _OF_CHAT) or len(receipts) != 1:
        raise _malformed(f"it is not what {CHAT} --json prints")
    unsigned = tuple(sorted(set(_OF_CHAT) - {NAME, "answer", "model", "finish"}))
    text = replace(text_digests(value["answer"]), finish=value["finish"])
    return Answered(receipts, [text], value["model"], unsigned=unsigned)


def text_digests(text: str) -> ChoiceDigests:
    """A choice of which only the text is known."""
    return ChoiceDigests(hashlib.sha256(text.encode()).digest())


def _digests(said: Said) -> ChoiceDigests:
    answer = AnswerHash()
    for kind, piece, _ in said.choice.parts():
        if isinstance(piece, str):
            answer.say(kind, piece)
        else:
            answer.call(piece)
    found = answer.digests()
    finish = "length" if said.finish == inference.FINISH_REASON_LENGTH else "stop"
    return ChoiceDigests(found.text, found.reasoning, found.calls, finish, found.order)


def _malformed(why: str) -> ReceiptError:
    return ReceiptError(
        why,
        hint="give the answer as it came; of a stream the value of sealring_receipt alone",
        reason="RECEIPT_MALFORMED",
    )


def parse_body(data: bytes, what: str) -> _Object:
    """A JSON object that every reader of JSON reads alike: UTF-8, no name twice in an object, no NaN.

    Raises InvalidInput (BAD_FILE).
    """
    try:
        value = parse_json(data.decode())
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError):
        pass
    raise InvalidInput(
        f"{what} is no JSON object, or has a name twice",
        reason="BAD_FILE",
        hint="give the file as it was sent; of a stream the value of sealring_receipt in its last event, and "
        "the text with --text",
    )
