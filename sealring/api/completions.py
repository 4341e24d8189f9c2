"""`POST /v1/completions`: prompts of text or token ids, continued without the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import Field

from sealring.api.answers import Asked, Choice, Logprobs, Renderer, event, usage_of
from sealring.api.fields import check_body, unsupported
from sealring.api.logprobs import CompletionLogprobs
from sealring.api.sampling import CommonBody, clean, make_request
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.validate import MAX_CONTENT_BYTES, MAX_TOKEN_ID
from sealring.v1 import inference_pb2 as inference

MAX_PROMPTS = 64
"""In one body; each is a row of its own."""

_Id = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Ids = Annotated[list[_Id], Field(fail_fast=True, min_length=1, max_length=MAX_CONTENT_BYTES // 4)]


class CompletionBody(CommonBody):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
        | _Ids
        | Annotated[list[_Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


def parse_completion(value: dict[str, Any]) -> CompletionBody:
    """Raises InvalidInput with `param`: as check_body, BAD_FIELD."""
    body = check_body(value, CompletionBody)
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream", reason="BAD_FIELD", param="stream_options")
    return body


def completion_requests(body: CompletionBody, request_id: str) -> list[inference.GenerateRequest]:
    """One for each prompt. Raises InvalidInput (BAD_UTF8)."""
    return [
        # 16 is OpenAI's own default for this endpoint
        make_request(body, _prompt(each), body.max_tokens or 16, f"{request_id}-{at}" if at else request_id)
        for at, each in enumerate(_prompts(body))
    ]


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [body.prompt] if isinstance(body.prompt[0], int) else cast(Any, body.prompt)


def _prompt(given: str | list[int]) -> inference.Prompt:
    if isinstance(given, str):
        return inference.Prompt(text=clean(given, "prompt"))
    return inference.Prompt(tokens=inference.TokenIds(ids=given))


def _echoed(body: CompletionBody) -> list[str]:
    """What stands before each answer. Raises InvalidInput (UNSUPPORTED_FIELD)."""
    prompts = _prompts(body)
    if not body.echo:
        return [""] * len(prompts)
    if body.logprobs is not None or not all(isinstance(each, str) for each in prompts):
        raise unsupported("echo", "it is for prompts of text, without logprobs")
    return [str(each) for each in prompts]


def ask_completion(value: dict[str, Any], request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    body = parse_completion(value)
    echoed = _echoed(body)
    request, *others = completion_requests(body, request_id)

    def render(started: inference.Started) -> Renderer:
        before = [text for text in echoed for _ in range(request.choices)]
        return CompletionRenderer(started, before, include_usage=body.include_usage, likeliest=body.likeliest)

    return Asked(request, render, bool(body.stream), body.user or "", tuple(others))


class CompletionRenderer(Renderer):
    """Answers in OpenAI's form."""

    def __init__(
        self, started: inference.Started, echoed: list[str], *, include_usage: bool, likeliest: int | None
    ) -> None:
        """`echoed` stands before each answer."""
        super().__init__(started)
        self._echoed = echoed
        self._common = self.common(started, "cmpl", "text_completion")
        self._usage = include_usage
        self._logprobs: list[CompletionLogprobs] = []
        if likeliest is not None:
            self._logprobs = [CompletionLogprobs(likeliest) for _ in echoed]

    def _choice(self, index: int, text: str, reason: str | None, tokens: Logprobs) -> dict[str, Any]:
        logprobs = self._logprobs[index](tokens) if self._logprobs and tokens is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        return event({**self._common, "choices": choices, **({"usage": usage} if self._usage else {})})

    def first(self) -> bytes:
        told = [(index, text) for index, text in enumerate(self._echoed) if text]
        return b"".join(self._event(self._choice(index, text, None, None)) for index, text in told)

    def delta(self, delta: inference.Delta) -> bytes:
        return self._event(self._choice(delta.choice, delta.text, None, delta.logprobs or None))

    def last(self, finished: inference.Finished) -> bytes:
        """The finish reasons, the usage where it was asked for, and the end of the stream."""
        events = [
            self._event(self._choice(index, "", reason, None))
            for index, reason in enumerate(self.reasons(finished))
        ]
        if self._usage:
            events.append(self._event(usage=usage_of(finished)))
        return b"".join(events) + b"data: [DONE]\n\n"

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        choices = [
            self._choice(index, self._echoed[index] + answer.text, reason, answer.logprobs)
            for index, (answer, reason) in enumerate(zip(answers, self.reasons(finished), strict=True))
        ]
        return json.dumps({**self._common, "choices": choices, "usage": usage_of(finished)}).encode()
