"""A small streaming client of OpenAI-compatible servers that notes when each piece came.

On a bare socket, so that the client costs little of the machine that it shares with what it measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sealring.mesh.errors import Unavailable

_LIMIT = 1 << 20
ANSWER_SECONDS = 300.0
"""The time after which an answer that has not ended counts as failed."""

STREAM_SECONDS = 1800.0
"""This limit for streamed answers, which go on slowly beside a long prompt."""

LOOK_SECONDS = 0.02
_ERROR = 300
"""Characters of an error's text that are kept."""


@dataclass
class Reply:
    """One answer. `arrivals` are seconds of `time.perf_counter` at which pieces of text came."""

    begun: float
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    ended: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.arrivals)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.begun

    @property
    def latency(self) -> float:
        return self.ended - self.begun

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in itertools.pairwise(self.arrivals)]


async def ask(
    base_url: str,
    body: dict[str, Any],
    *,
    path: str = "/v1/chat/completions",
    key: str = "",
    headers: Sequence[str] = (),
    into: Reply | None = None,
    seconds: float = ANSWER_SECONDS,
) -> Reply:
    """Streams one answer; what goes wrong is its `error`. `into` can be looked at while it comes."""
    reply = into or Reply(time.perf_counter())
    try:
        async with asyncio.timeout(seconds):
            async for event in _events(base_url, path, body | {"stream": True}, key, headers):
                _take(reply, event)
    except TimeoutError:
        reply.error = "timeout"
    except (OSError, EOFError, ValueError, asyncio.IncompleteReadError) as error:
        reply.error = reply.error or f"{type(error).__name__}: {error}"[:_ERROR]
    reply.ended = time.perf_counter()
    if not reply.arrivals and not reply.error:
        reply.error = "nothing came"
    reply.completion_tokens = reply.completion_tokens or len(reply.arrivals)
    return reply


@contextlib.asynccontextmanager
async def streams(base_url: str, bodies: Sequence[dict[str, Any]]) -> AsyncIterator[list[Reply]]:
    """Completions under way, of each of which two pieces have come. They are given up when the block is left.

    Raises Unavailable (BENCH_FAILED) if one ends before all have begun.
    """
    replies = [Reply(time.perf_counter()) for _ in bodies]
    asked = [
        asyncio.ensure_future(ask(base_url, body, path="/v1/completions", into=reply, seconds=STREAM_SECONDS))
        for body, reply in zip(bodies, replies, strict=True)
    ]
    try:
        while any(len(one.arrivals) < 2 for one in replies):
            still_coming(replies)
            await asyncio.sleep(LOOK_SECONDS)
        yield replies
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def still_coming(replies: Sequence[Reply]) -> None:
    """Raises Unavailable (BENCH_FAILED) if one has ended."""
    if any(one.ended for one in replies):
        found = next((one.error for one in replies if one.error), "it had all its tokens")
        raise Unavailable(
            f"a stream ended while it was watched: {found}",
            reason="BENCH_FAILED",
            hint="let streams have more tokens, or measure for a shorter time",
        )


async def get_json(base_url: str, path: str) -> Any:
    """The body of a GET. Raises OSError, ValueError."""
    async with _exchange(base_url, "GET", path, None, "") as (status, body):
        text = b"".join([part async for part in body])
    if status != 200:
        raise ValueError(f"status {status}")
    return json.loads(text)


def _take(reply: Reply, event: dict[str, Any]) -> None:
    if "error" in event:
        raise ValueError(json.dumps(event["error"])[:200])
    usage = event.get("usage")
    if usage:
        reply.prompt_tokens = usage.get("prompt_tokens", 0)
        reply.completion_tokens = usage.get("completion_tokens", 0)
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning") or choice.get("text") or ""
        if text:
            reply.arrivals.append(time.perf_counter())
            reply.text += text


async def _events(
    base_url: str, path: str, body: dict[str, Any], key: str, headers: Sequence[str]
) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    async with _exchange(base_url, "POST", path, body, key, headers) as (status, parts):
        pending = b""
        async for part in parts:
            pending += part
            if status != 200:
                pending = pending[:_ERROR]
                continue
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)
        if status != 200:
            raise ValueError(f"status {status}: {pending.decode(errors='replace')}")


@contextlib.asynccontextmanager
async def _exchange(
    base_url: str,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    key: str,
    more: Sequence[str] = (),
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    url = urlsplit(base_url)
    secure = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure, limit=_LIMIT)
    try:
        payload = json.dumps(body).encode() if body is not None else b""
        head = [
            f"{method} {url.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {url.hostname}:{port}",
            "content-type: application/json",
            f"content-length: {len(payload)}",
            "connection: close",
            *([f"authorization: Bearer {key}"] if key else []),
            *more,
        ]
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + payload)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        yield int(lines[0].split()[1]), _body(reader, headers)
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding") != "chunked":
        while part := await reader.read(1 << 16):
            yield part
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
