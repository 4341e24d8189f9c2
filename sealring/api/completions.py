"""`POST /v1/completions`: prompts of text or token ids, continued without the chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import Field

from sealring.api.answers import Asked, Choice, Logprobs, Renderer, event, receipt_of, usage_of, usage_so_far
from sealring.api.fields import BOOKKEEPING, Translated, check_body, table, unsupported
from sealring.api.logprobs import CompletionLogprobs
from sealring.api.sampling import CommonBody, clean, make_request
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.options import MAX_TOKENS
from sealring.mesh.prompt.validate import MAX_CONTENT_BYTES, MAX_TOKEN_ID
from sealring.v1 import inference_pb2 as inference

MAX_PROMPTS = 64
"""Prompts of one body; each is a row of its own."""

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
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


table("/v1/completions", dict.fromkeys(CompletionBody.model_fields, BOOKKEEPING))


def parse_completion(value: dict[str, Any]) -> CompletionBody:
    """Raises InvalidInput with `param`: as check_body."""
    return check_body(value, CompletionBody)


def completion_requests(body: CompletionBody, request_id: str) -> list[inference.GenerateRequest]:
    """One for each prompt. Raises InvalidInput (BAD_UTF8)."""
    # 16 is OpenAI's own default for this endpoint; no row has no tokens: what it answers is then left out
    most = 16 if body.max_tokens is None else max(1, body.max_tokens)
    requests = [
        make_request(body, _prompt(each), most, f"{request_id}-{at}" if at else request_id)
        for at, each in enumerate(_prompts(body))
    ]
    for request in requests:
        request.envelope.clear.sampling.prompt_logprobs = bool(body.echo) and body.logprobs is not None
    return requests


def _prompts(body: CompletionBody) -> Sequence[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [body.prompt] if isinstance(body.prompt[0], int) else cast(Any, body.prompt)


def _prompt(given: str | list[int]) -> inference.Prompt:
    if isinstance(given, str):
        return inference.Prompt(text=clean(given, "prompt"))
    return inference.Prompt(tokens=inference.TokenIds(ids=given))


def _echoed(body: CompletionBody) -> list[str]:
    """The text of each prompt for `echo`, else nothing. The text of token ids comes with log-probabilities.

    Raises InvalidInput (UNSUPPORTED_FIELD, BAD_FIELD).
    """
    prompts = _prompts(body)
    if not body.echo:
        if body.max_tokens == 0:
            raise InvalidInput("max_tokens 0 needs echo", reason="BAD_FIELD", param="max_tokens")
        return [""] * len(prompts)
    texts = [each if isinstance(each, str) else "" for each in prompts]
    if body.logprobs is None and not all(texts):
        raise unsupported("echo", "prompts of token ids are echoed with logprobs only")
    return texts


def ask_completion(value: dict[str, Any], request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    names = Translated(names=CompletionBody.names(value))
    with names.naming():
        body = parse_completion(value)
    echoed = _echoed(body)
    request, *others = completion_requests(body, request_id)
    return Asked(
        request,
        lambda started: CompletionRenderer(started, body, echoed, request.choices),
        bool(body.stream),
        body.user or "",
        tuple(others),
        names.names,
    )


class CompletionRenderer(Renderer):
    """Answers in OpenAI's form."""

    def __init__(
        self, started: inference.Started, body: CompletionBody, echoed: list[str], choices: int
    ) -> None:
        """`echoed` stands before the `choices` answers to each prompt."""
        super().__init__(started)
        self._echoed = [text for text in echoed for _ in range(choices)]
        self._choices = choices
        self._common = self.common(started, "cmpl", "text_completion")
        self._usage = body.include_usage
        self._prompt_tokens = started.prompt_tokens
        self._tokens = [0] * len(self._echoed) if body.continuous_usage else []
        self._answers = body.max_tokens != 0
        self._logprobs: list[CompletionLogprobs] = []
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(body.logprobs, text) for text in self._echoed]

    def _choice(self, index: int, text: str, reason: str | None, tokens: Logprobs) -> dict[str, Any]:
        logprobs = self._logprobs[index](tokens) if self._logprobs and tokens is not None else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _event(self, *choices: dict[str, Any], usage: dict[str, Any] | None = None, **more: Any) -> bytes:
        if self._tokens and usage is None:
            usage = usage_so_far(self._prompt_tokens, self._tokens)
        return event(
            {**self._common, "choices": choices, **({"usage": usage} if self._usage else {}), **more}
        )

    def first(self) -> bytes:
        told = [(index, text) for index, text in enumerate(self._echoed) if text]
        return b"".join(self._event(self._choice(index, text, None, None)) for index, text in told)

    def delta(self, delta: inference.Delta) -> bytes:
        """The events of a delta. A prompt's tokens come with the first of its answers only, and are repeated
        for the others."""
        prompt, answer = _divided(delta.logprobs)
        if self._tokens:
            self._tokens[delta.choice] = delta.tokens
        events = [
            self._event(self._choice(index, self._spelt(index, prompt), None, prompt))
            for index in range(delta.choice, delta.choice + self._choices)
            if prompt
        ]
        if self._answers:
            events.append(self._event(self._choice(delta.choice, delta.text, None, answer or None)))
        return b"".join(events)

    def _spelt(self, index: int, prompt: list[inference.TokenLogprob]) -> str:
        """The text of a prompt of tokens."""
        return (
            "" if self._echoed[index] else b"".join(one.spelling for one in prompt).decode(errors="replace")
        )

    def _ends(self, finished: inference.Finished) -> tuple[list[str], dict[str, Any]]:
        """The answers' finish reasons, and the usage."""
        reasons, usage = self.reasons(finished), usage_of(finished)
        if not self._answers:
            usage |= {"completion_tokens": 0, "total_tokens": finished.prompt_tokens}
            reasons = ["length"] * len(reasons)
        return reasons, usage

    def last(self, finished: inference.Finished) -> bytes:
        """The finish reasons, the usage where it was asked for, and the end of the stream."""
        reasons, usage = self._ends(finished)
        events = [self._event(self._choice(index, "", reason, None)) for index, reason in enumerate(reasons)]
        if self._usage or finished.receipts:
            events.append(self._event(usage=usage, **receipt_of(finished)))
        return b"".join(events) + b"data: [DONE]\n\n"

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        reasons, usage = self._ends(finished)
        choices, prompt = [], list[inference.TokenLogprob]()
        for index, (answer, reason) in enumerate(zip(answers, reasons, strict=True)):
            found, told = _divided(answer.logprobs)
            prompt = prompt if index % self._choices else found
            before = self._echoed[index] or self._spelt(index, prompt)
            text, told = (answer.text, told) if self._answers else ("", [])
            choices.append(self._choice(index, before + text, reason, prompt + told))
        whole = {**self._common, "choices": choices, "usage": usage, **receipt_of(finished)}
        return json.dumps(whole).encode()


def _divided(
    told: Sequence[inference.TokenLogprob],
) -> tuple[list[inference.TokenLogprob], list[inference.TokenLogprob]]:
    """The tokens of a prompt, and those of its answer."""
    prompt = [one for one in told if one.prompt]
    return prompt, list(told[len(prompt) :])
