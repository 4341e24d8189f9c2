"""`POST /v1/completions`: one prompt of text, continued without the chat template."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from sealring.api.answers import Asked, Choice, Logprobs, Renderer, event, usage_of
from sealring.api.fields import check_body
from sealring.api.logprobs import CompletionLogprobs
from sealring.api.sampling import CommonBody, clean, make_request
from sealring.mesh.errors import InvalidInput
from sealring.v1 import inference_pb2 as inference


class CompletionBody(CommonBody):
    prompt: str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1)]
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


def completion_request(body: CompletionBody, request_id: str) -> inference.GenerateRequest:
    text = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    prompt = inference.Prompt(text=clean(text, "prompt"))
    # OpenAI's own default for this endpoint
    return make_request(body, prompt, body.max_tokens or 16, request_id)


def ask_completion(value: dict[str, Any], request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    body = parse_completion(value)
    request = completion_request(body, request_id)

    def render(started: inference.Started) -> Renderer:
        return CompletionRenderer(
            started, request.choices, include_usage=body.include_usage, likeliest=body.likeliest
        )

    return Asked(request, render, bool(body.stream), body.user or "")


class CompletionRenderer(Renderer):
    """Answers in OpenAI's form."""

    def __init__(
        self, started: inference.Started, choices: int, *, include_usage: bool, likeliest: int | None
    ) -> None:
        super().__init__(started)
        self._common = self.common(started, "cmpl", "text_completion")
        self._usage = include_usage
        self._logprobs: list[CompletionLogprobs] = []
        if likeliest is not None:
            self._logprobs = [CompletionLogprobs(likeliest) for _ in range(choices)]

    def _choice(self, index: int, text: str, reason: str | None, tokens: Logprobs) -> dict[str, Any]:
        logprobs = self._logprobs[index](tokens) if self._logprobs and tokens is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
        return event({**self._common, "choices": choices, **({"usage": usage} if self._usage else {})})

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
            self._choice(index, answer.text, reason, answer.logprobs)
            for index, (answer, reason) in enumerate(zip(answers, self.reasons(finished), strict=True))
        ]
        return json.dumps({**self._common, "choices": choices, "usage": usage_of(finished)}).encode()
