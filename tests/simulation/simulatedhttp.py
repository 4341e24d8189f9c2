"""Clients of the APIs of HTTP: how they ask, and how they read answers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sealring.mesh.errors import SealringError

Object = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """How one API asks, and what its events tell."""

    path: str
    most: str
    """Its field for the limit of tokens."""
    asks: Callable[[str], Object]
    """The body for a text."""
    says: Callable[[Object], Iterator[tuple[int, str]]]
    """The choices and texts of an event."""
    ends: Callable[[Object], Iterator[tuple[int, str]]]
    """Choices that an event ends, and why."""
    usage: Callable[[Object], tuple[int, int, int] | None]
    """Tokens of the prompt, of the answer, and those that were cached."""
    chat: bool = True
    choices: bool = False


def _chat(text: str) -> Object:
    """A text may have further messages, as `simulatedmodel.prompt_text` writes them."""
    first, *more = re.split(r"\n<(user|assistant)> ", text)
    messages = [{"role": "user", "content": first}]
    messages += [{"role": role, "content": said} for role, said in zip(more[::2], more[1::2], strict=True)]
    return {"messages": messages, "stream": True}


def _choices(event: Object, says: Callable[[Object], Any]) -> Iterator[tuple[int, Any]]:
    for one in event.get("choices", ()):
        if (said := says(one)) is not None:
            yield one["index"], said


def _openai_usage(event: Object) -> tuple[int, int, int] | None:
    usage = event.get("usage")
    if usage is None:
        return None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], cached


def _anthropic_usage(event: Object) -> tuple[int, int, int] | None:
    if event.get("type") != "message_delta":
        return None
    usage = event["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, usage["output_tokens"], cached


def _responses_usage(event: Object) -> tuple[int, int, int] | None:
    usage = event.get("response", {}).get("usage")
    if usage is None:
        return None
    return usage["input_tokens"], usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]


def _of(kind: str, *fields: str) -> Callable[[Object], Iterator[tuple[int, Any]]]:
    """What events of a kind have in a field of a field."""

    def find(event: Object) -> Iterator[tuple[int, Any]]:
        if event.get("type", "") == kind:
            for field in fields:
                event = event[field]
            yield 0, event

    return find


def _ollama(event: Object) -> tuple[int, int, int] | None:
    return (event["prompt_eval_count"], event["eval_count"], 0) if event["done"] else None


_BY_HTTP: Mapping[str, Api] = {
    "chat": Api(
        "/v1/chat/completions",
        "max_tokens",
        lambda text: _chat(text) | {"stream_options": {"include_usage": True}},
        lambda event: _choices(event, lambda one: one["delta"].get("content")),
        lambda event: _choices(event, lambda one: one["finish_reason"]),
        _openai_usage,
        choices=True,
    ),
    "completions": Api(
        "/v1/completions",
        "max_tokens",
        lambda text: {"prompt": text},
        lambda event: _choices(event, lambda one: one["text"]),
        lambda event: _choices(event, lambda one: one["finish_reason"]),
        _openai_usage,
        chat=False,
        choices=True,
    ),
    "messages": Api(
        "/v1/messages",
        "max_tokens",
        _chat,
        _of("content_block_delta", "delta", "text"),
        _of("message_delta", "delta", "stop_reason"),
        _anthropic_usage,
    ),
    "responses": Api(
        "/v1/responses",
        "max_output_tokens",
        lambda text: {"input": text, "stream": True},
        _of("response.output_text.delta", "delta"),
        lambda event: iter([(0, "length")] if event.get("type") == "response.incomplete" else []),
        _responses_usage,
    ),
    "ollama": Api(
        "/api/chat",
        "num_predict",
        _chat,
        lambda event: iter([(0, event["message"]["content"])]),
        lambda event: iter([(0, event["done_reason"])] if event["done"] else []),
        _ollama,
    ),
}


APIS = {**_BY_HTTP, "socket": _BY_HTTP["responses"]}
"""All APIs; `socket` is that of responses over a WebSocket."""


async def events_of(messages: AsyncIterator[Object]) -> AsyncIterator[Object]:
    """The objects of an answer: whole, in lines, or as server-sent events. Raises the error that it tells."""
    status, rest = 0, b""
    async for message in messages:
        if message["type"] == "http.response.start":
            status = message["status"]
            continue
        *lines, rest = (rest + message["body"]).split(b"\n")
        if not message.get("more_body"):
            lines.append(rest)
        for line in lines:
            body = line.strip().removeprefix(b"data: ")  # Ollama's lines may begin with spaces
            if not body.startswith(b"{"):  # the kind of an event, a comment, or the end
                continue
            event = json.loads(body)
            error = event.get("error") or event.get("response", {}).get("error")
            if error:
                raise _error(error, event.get("status", status))
            yield event


def _error(told: Object | str, status: int) -> SealringError:
    """Only OpenAI's errors have a code. A stream that has begun has status 200."""
    code = told.get("code") if isinstance(told, dict) else None
    reason = (code or f"HTTP_{status}").upper().replace("CONTEXT_LENGTH_EXCEEDED", "TOO_LARGE_FOR_RING")
    return SealringError(f"{status}: {told}", reason=reason)
