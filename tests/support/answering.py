"""Many kinds of answers at once, to be compared with those of a ring that nothing happened to."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import openai
from ringtest import LIMIT_SECONDS, Ring, chat

from sealring.client import AsyncClient
from sealring.mesh.errors import SealringError
from sealring.mesh.rpc import from_rpc_error
from sealring.v1 import inference_pb2 as inference

TOKENS = 24
ASKED_SECONDS = 3 * LIMIT_SECONDS
"""How long a client waits for an answer: longer than machines sleep here."""

END = 2
"""The demo model's end of sequence, which these answers are not to choose."""

_LONG = {"logit_bias": {END: -100.0}}
_DRAWN = {**_LONG, "temperature": 1.0, "seed": 11}
_QUESTION = "What is the capital of France?"


def _prompt(stop: tuple[str, ...] = (), question: str = _QUESTION, **sampling: Any) -> inference.Prompt:
    prompt = chat(question, **sampling)
    prompt.stop.extend(stop)
    return prompt


# All of these stop strings begin with a common letter and are never complete: text is held back all the time.
_HOLDS = ("e#", " t#", "an#", "is the#")
PROMPTS = {
    "greedy": _prompt(**_LONG),
    "drawn": _prompt(**_DRAWN),
    "long prompt": _prompt(question=" ".join([_QUESTION] * 25), **_DRAWN),
    "penalties": _prompt(
        **_DRAWN,
        repetition_penalty=1.2,
        repetition_context_size=30,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    ),
    "stops": _prompt(_HOLDS, **_DRAWN),
    "logprobs": _prompt(_HOLDS, **_DRAWN, logprobs=2),
}
CHOICES = {"drawn": 3}
_GONE = {
    *("UNAVAILABLE", "STOPPING", "APIConnectionError", "RemoteProtocolError", "ReadError"),
    *("ROSTER_EXPIRED", "roster_expired"),
}
"""Errors of a client in clear whose gateway is gone or has a wrong clock. Those about a ring have others."""


@dataclass
class Answer:
    """What a client received of one request; of log-probabilities the tokens and the likeliest others."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[tuple[int, ...]] = field(default_factory=list)
    end: tuple[int, ...] = ()
    error: str = ""
    """The reason of what ended it before its time."""
    again: int = field(default=0, compare=False)
    """How often it was asked for again, where its client does that."""
    full: int = field(default=0, compare=False)
    """How often the queue was full and its client came again at the time that the gateway named."""


class Progress:
    """When each request received its pieces; calls for what is to happen in their midst."""

    def __init__(self, after: int = 0, happen: Callable[[], Awaitable[None]] | None = None) -> None:
        self._left = after
        self._happen = happen
        self.times: dict[str, list[float]] = defaultdict(list)

    async def piece(self, name: str) -> None:
        self.times[name].append(time.monotonic())
        self._left -= 1
        if self._left == 0 and self._happen is not None:
            await self._happen()


async def ask_all(
    ring: Ring,
    client: AsyncClient,
    progress: Progress | None = None,
    *,
    again: bool = False,
    clear: Iterable[str] = PROMPTS,
    sealed: Iterable[str] = PROMPTS,
) -> dict[str, Answer]:
    """Prompts in clear over gRPC and sealed, one over HTTP, at once. One that fails has an error.

    With `again` clients that lose their gateway ask it again, as `sealring.client` does by itself.
    """
    progress = progress or Progress()
    plain, closed, http = {name: Answer() for name in clear}, {name: Answer() for name in sealed}, Answer()
    async with asyncio.timeout(ASKED_SECONDS):
        await asyncio.gather(
            *(ask_clear(ring, name, answer, progress, again=again) for name, answer in plain.items()),
            *(ask_sealed(client, name, answer, progress, ring.model) for name, answer in closed.items()),
            ask_http(ring, http, progress, again=again),
        )
    return plain | {f"{name}, sealed": answer for name, answer in closed.items()} | {"http": http}


async def ask_clear(
    ring: Ring, name: str, answer: Answer, progress: Progress, *, again: bool = False, patient: bool = False
) -> None:
    """One prompt in clear over gRPC; puts all that it receives into `answer`. A `patient` client comes again
    to a full queue at the time that the gateway names."""
    await _ended(lambda key: _clear(ring, name, answer, progress, key), answer, again=again, patient=patient)


async def ask_sealed(
    client: AsyncClient,
    name: str,
    answer: Answer,
    progress: Progress,
    model: str = "",
    *,
    patient: bool = False,
) -> None:
    """One prompt sealed, as `ask_clear`."""
    await _ended(lambda key: _sealed(client, name, answer, progress, model), answer, patient=patient)


async def ask_http(ring: Ring, answer: Answer, progress: Progress, *, again: bool = False) -> None:
    """One prompt over HTTP, as `ask_clear`."""
    await _ended(lambda key: _http(ring, answer, progress, key), answer, again=again)


async def _ended(
    asking: Callable[[str], Awaitable[None]], answer: Answer, *, again: bool = False, patient: bool = False
) -> None:
    key, until = secrets.token_hex(8) if again else "", time.monotonic() + ASKED_SECONDS
    while True:
        before, answer.error, after = answer.texts, "", 0.0
        answer.texts, answer.logprobs = {}, []
        try:
            await asking(key)
        except (grpc.aio.AioRpcError, SealringError) as failed:
            error = failed if isinstance(failed, SealringError) else from_rpc_error(failed)
            answer.error, after = error.reason, float(error.metadata.get("retry_after", 0))
        except (openai.APIError, httpx.HTTPError) as error:
            answer.error = str(getattr(error, "code", None) or type(error).__name__)
        if any(_parts(text, answer.texts.get(choice, "")) for choice, text in before.items()):
            answer.error = "TOLD_OTHERWISE"
        if patient and answer.error == "QUEUE_FULL" and after and time.monotonic() < until:
            answer.full += 1
            await asyncio.sleep(after)
            continue
        if not (again and answer.error in _GONE and time.monotonic() < until):
            return
        answer.again += 1
        await asyncio.sleep(0.2)


def _keyed(key: str) -> dict[str, str]:
    """A client that hangs up for good gives no key: an answer that has one goes on for a while."""
    return {"idempotency-key": key} if key else {}


def _parts(one: str, other: str) -> bool:
    """Whether neither text begins with the other."""
    return not (one.startswith(other) or other.startswith(one))


async def _clear(ring: Ring, name: str, answer: Answer, progress: Progress, key: str) -> None:
    request = inference.GenerateRequest(
        model=ring.model,
        envelope=inference.Envelope(clear=PROMPTS[name]),
        max_tokens=TOKENS,
        choices=CHOICES.get(name, 1),
    )
    tokens = dict[int, int]()
    started = 0
    metadata = (*(ring.metadata() or ()), *_keyed(key).items())
    call = ring.stub.Generate(request, timeout=ASKED_SECONDS, metadata=metadata, wait_for_ready=True)
    async for event in call:
        if event.HasField("delta"):
            delta = event.delta
            answer.texts[delta.choice] = answer.texts.get(delta.choice, "") + delta.text
            answer.logprobs += [(one.id, *(each.id for each in one.top)) for one in delta.logprobs]
            assert delta.tokens > tokens.get(delta.choice, 0)
            tokens[delta.choice] = delta.tokens
            await progress.piece(name)
        elif event.HasField("started"):
            started += 1
        else:
            finished = event.finished
            answer.end = (finished.reason, finished.prompt_tokens, finished.completion_tokens)
    assert started == 1


async def _sealed(client: AsyncClient, name: str, answer: Answer, progress: Progress, model: str) -> None:
    reply = client.ask(PROMPTS[name], model=model, max_tokens=TOKENS, n=CHOICES.get(name, 1))
    async for delta in reply:
        answer.texts[delta.choice] = answer.texts.get(delta.choice, "") + delta.text
        answer.logprobs += [(one.id, *(each.id for each in one.top)) for one in delta.logprobs]
        await progress.piece(f"{name}, sealed")
    whole = reply.completion
    # A choice whose tokens all spell nothing has no delta.
    assert [one.text for one in whole.choices] == [
        answer.texts.get(each, "") for each in range(CHOICES.get(name, 1))
    ]
    reason = inference.FinishReason.Value(f"FINISH_REASON_{whole.finish_reason.upper()}")
    answer.end = (reason, whole.usage.prompt_tokens, whole.usage.completion_tokens)


async def _http(ring: Ring, answer: Answer, progress: Progress, key: str) -> None:
    """The drawn one, as OpenAI's own client streams it."""
    sampling = PROMPTS["drawn"].sampling
    async with ring.openai() as client:
        stream: Any = await client.chat.completions.create(
            model=ring.model,
            messages=[{"role": "user", "content": _QUESTION}],
            temperature=sampling.temperature,
            seed=sampling.seed,
            logit_bias={str(END): -100},
            max_tokens=TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=_keyed(key),
        )
        async for chunk in stream:
            for choice in chunk.choices:
                answer.texts[0] = answer.texts.get(0, "") + (choice.delta.content or "")
                await progress.piece("http")
            if chunk.usage:
                answer.end = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
