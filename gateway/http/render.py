"""Answers in OpenAI's form. A delta is rendered without building a dictionary for it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sealring.gateway.http.logprobs import CompletionLogprobs, chat_logprobs
from sealring.v1 import inference_pb2 as inference

Tokens: TypeAlias = Sequence[inference.TokenLogprob]
Choice: TypeAlias = tuple[str, Tokens]
"""The text of one answer, and its tokens where they were asked for."""

DONE = b"data: [DONE]\n\n"
_REASONS = {inference.FINISH_REASON_STOP: "stop", inference.FINISH_REASON_LENGTH: "length"}


class Renderer:
    """The answers to one request, `choices` of them, of one endpoint. `chat` says which of the two."""

    def __init__(
        self,
        started: inference.Started,
        choices: int,
        *,
        chat: bool,
        include_usage: bool,
        likeliest: int | None = None,
    ) -> None:
        self._chat = chat
        self._usage = include_usage
        self._logprobs: list[Callable[[Tokens], dict[str, Any]]] = []
        if likeliest is not None:
            self._logprobs = [
                chat_logprobs if chat else CompletionLogprobs(likeliest) for _ in range(choices)
            ]
        prefix = "chatcmpl" if chat else "cmpl"
        self._common = {
            "id": f"{prefix}-{started.request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": started.model,
            "system_fingerprint": _fingerprint(started),
        }
        self._around = [self._template(index) for index in range(choices)]

    def _template(self, index: int) -> tuple[str, str]:
        """What stands before and after the text of a delta."""
        choice = {"delta": {"content": "\x00"}} if self._chat else {"text": "\x00"}
        before, after = self._event(self._chunk(index, choice, None)).split(json.dumps("\x00"))
        return before, after

    def _chunk(
        self, index: int, content: dict[str, Any], reason: str | None, tokens: Tokens = ()
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = dict(self._common)
        if self._chat:
            chunk["object"] = "chat.completion.chunk"
        logprobs = self._logprobs[index](tokens) if self._logprobs and tokens else None
        chunk["choices"] = [{"index": index, **content, "logprobs": logprobs, "finish_reason": reason}]
        if self._usage:
            chunk["usage"] = None
        return chunk

    @staticmethod
    def _event(chunk: dict[str, Any]) -> str:
        return f"data: {json.dumps(chunk)}\n\n"

    def first(self) -> bytes:
        """The event that opens a chat's answer; nothing for a completion."""
        if not self._chat:
            return b""
        content = {"delta": {"role": "assistant", "content": ""}}
        return "".join(
            self._event(self._chunk(index, content, None)) for index in range(len(self._around))
        ).encode()

    def delta(self, delta: inference.Delta) -> bytes:
        if delta.logprobs:
            content = {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
            return self._event(self._chunk(delta.choice, content, None, delta.logprobs)).encode()
        before, after = self._around[delta.choice]
        return f"{before}{json.dumps(delta.text)}{after}".encode()

    def last(self, finished: inference.Finished) -> bytes:
        """The finish reasons, the usage where it was asked for, and the end of the stream."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        events = [
            self._event(self._chunk(index, content, reason))
            for index, reason in enumerate(_reasons(finished))
        ]
        if self._usage:
            chunk = self._chunk(0, content, None)
            events.append(self._event({**chunk, "choices": [], "usage": _usage(finished)}))
        return "".join(events).encode() + DONE

    def whole(self, answers: Sequence[Choice], finished: inference.Finished) -> bytes:
        """All answers in one piece."""
        choices = []
        for index, ((text, tokens), reason) in enumerate(zip(answers, _reasons(finished), strict=True)):
            content: dict[str, Any] = {"text": text}
            if self._chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            logprobs = self._logprobs[index](tokens) if self._logprobs else None
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": reason})
        return json.dumps({**self._common, "choices": choices, "usage": _usage(finished)}).encode()


def model_object(model: inference.Model) -> dict[str, Any]:
    """A model in OpenAI's form, with what is particular to this cluster beside it."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sealring",
        "model_type": model.model_type,
        "context_length": model.context,
        "min_trust": model.min_trust,
        "rings": model.rings,
        "rows": model.rows,
    }


def _reasons(finished: inference.Finished) -> list[str]:
    """Of each answer; an end without a list of them is that of one."""
    ends = [end.reason for end in finished.choices] or [finished.reason]
    return [_REASONS.get(reason, "stop") for reason in ends]


def _usage(finished: inference.Finished) -> dict[str, object]:
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
    }


def _fingerprint(started: inference.Started) -> str:
    """Changes when another ring or model answers."""
    return "fp_" + hashlib.sha256(f"{started.model}\x00{started.ring}".encode()).hexdigest()[:12]
