"""Questions from the terminal: sealed by the client library; in clear only where the user says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sealring.cli.calls.gateway import GatewayAccess, GatewayCalls, inference, named
from sealring.cli.calls.member import MemberChannels
from sealring.cli.terminal.output import enum_word, progress, say
from sealring.mesh.clock import Clock, monotonic_clock
from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError

if TYPE_CHECKING:
    from sealring.client import AsyncClient, Delta
    from sealring.client.question import Content
    from sealring.mesh.prompt.options import SamplingOptions
    from sealring.v1.inference_pb2 import Prefilling


ASK_CLEAR = "or ask in clear, which the gateway can read: --clear"
_CHOOSE = "choose with --model NAME, in a conversation with /model NAME"

_SILENT_SECONDS, _LOOK_SECONDS = 1.0, 2.0
"""For which nothing is said before the first token; between two looks at what it waits for."""


@dataclass(frozen=True)
class Target:
    """Gateways of one cluster, and `pin`, the hash of its root key; without a pin, prompts go in clear.

    `state_file` remembers the newest roster; None: the process does. With `member`, a folder with a member's
    certificate as a client, they are the gateways that take the questions of members.
    """

    addresses: Sequence[str]
    access: GatewayAccess
    pin: bytes | None
    state_file: Path | None = None
    member: Path | None = None


@dataclass(frozen=True)
class Question:
    """A conversation to continue, as (role, content) pairs; 0 `max_tokens`: what the context holds."""

    messages: Sequence[tuple[str, Content]]
    model: str = ""
    max_tokens: int = 0
    min_trust: int = 0
    sampling: SamplingOptions | None = None
    hear: Callable[[Prefilling], None] = lambda told: None
    """Called while a long prompt is computed."""


@dataclass(frozen=True)
class Source:
    """The ring that answered, its trust, and the usage: what is known at an answer's end.

    Of a sealed answer ring and trust come from the verified roster, of one in clear from the gateway.
    """

    model: str
    ring: str
    min_trust: int
    prompt_tokens: int
    completion_tokens: int
    finish: str
    sealring_receipt: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """The receipts of a sealed answer, which the client has checked (`sealring receipt verify`)."""


@dataclass(frozen=True)
class TimedAnswer(Source):
    """An answer, with the seconds to its first token and the tokens per second after it."""

    text: str
    sealed: bool
    ttft_s: float
    tok_s: float
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Each token with its log-probability and the likeliest in its place, if the question asks for them."""


Stream = Callable[[Question], "AsyncGenerator[Delta | Source, None]"]
"""A call for one answer: its pieces, then its source."""

Models = Callable[[], Awaitable[Sequence[Any]]]


class Asker:
    """Asks questions over a stream and measures how the answers come."""

    def __init__(
        self, stream: Stream, *, sealed: bool, models: Models | None = None, clock: Clock = monotonic_clock
    ) -> None:
        self.sealed = sealed
        self._stream = stream
        self._models = models
        self._clock = clock

    async def ask(
        self,
        question: Question,
        on_text: Callable[[str], None],
        *,
        on_reasoning: Callable[[str], None] | None = None,
    ) -> TimedAnswer:
        """Streams one answer. `on_text` gets each piece of it; `on_reasoning` (None: `on_text`) gets the
        reasoning before it, and an empty line. On a terminal the seconds until the first piece are counted.

        Raises what `AsyncClient.chat` lists, and SealringError (BROKEN_STREAM) for an answer without an end.
        """
        on_reasoning = on_reasoning or on_text
        asked = self._clock()
        first = last = 0.0
        at_first = 0
        thought = ""
        pieces: list[str] = []
        logprobs: list[dict[str, Any]] = []
        source: Source | None = None
        async with _waited_for(self._stream, question, self._models) as stream:
            async for piece in stream:
                if isinstance(piece, Source):
                    source = piece
                    continue
                last = self._clock()
                if not first:
                    first, at_first = last, piece.tokens
                if piece.reasoning:
                    on_reasoning(piece.reasoning)
                    thought = "\n\n"
                if piece.text and thought:
                    on_reasoning(thought)
                    thought = ""
                pieces.append(piece.text)
                logprobs += [
                    {**_shown(one), "top": list(map(_shown, one.top))}
                    for one in piece.logprobs
                    if not one.prompt
                ]
                on_text(piece.text)
        if source is None:
            raise SealringError(
                "the gateway ended the stream without an answer",
                hint="ask again; `sealring status` shows whether the ring serves",
                reason="BROKEN_STREAM",
            )
        tokens, since = source.completion_tokens - at_first, first
        if tokens < at_first:  # most came at once, so the rate of the others says nothing
            tokens, since = source.completion_tokens, asked
        return TimedAnswer(
            **asdict(source),
            text="".join(pieces),
            sealed=self.sealed,
            ttft_s=round((first or self._clock()) - asked, 4),
            tok_s=round(tokens / (last - since), 2) if last > since else 0.0,
            logprobs=logprobs,
        )


@asynccontextmanager
async def _waited_for(
    stream: Stream, question: Question, models: Models | None
) -> AsyncIterator[AsyncIterator[Delta | Source]]:
    """The pieces of a stream. A person is shown how far a long prompt is, and told of a ring that is away."""

    async def pieces() -> AsyncIterator[Delta | Source]:
        async for piece in answer:
            looking.cancel()
            shown.close()
            yield piece

    async def look() -> None:
        await asyncio.sleep(_SILENT_SECONDS)
        while models is not None:
            with suppress(SealringError):  # the question itself ends by it
                if words := waits_for(await models(), question.model):
                    shown.update(f"{words}; Ctrl-C ends", loud=True)
            await asyncio.sleep(_LOOK_SECONDS)

    with progress("waiting for the first token", quiet=True) as shown:
        told = replace(question, hear=lambda one: shown.update(prefilled(one)))
        looking = asyncio.create_task(look())
        try:
            async with aclosing(stream(told)) as answer:
                yield pieces()
        finally:
            looking.cancel()


def waits_for(models: Sequence[Any], name: str) -> str:
    """Says why a request for a model waits, by the `models` of a gateway; empty while a ring serves it."""
    asked = [one for one in models if not name or name in (one.name, *one.aliases)]
    if len(asked) != 1 or asked[0].rings:
        return ""
    why = "it is being loaded" if asked[0].availability else "its machines do not answer"
    return f"waiting for a ring of {asked[0].name}: {asked[0].reason or why}"


def prefilled(one: Prefilling) -> str:
    """How far a prompt is: "reading the prompt: 40 %, 12,000 of 30,000 tokens, 40 s left"."""
    left = f", {one.seconds_left} s left" if one.seconds_left else ""
    share = 100 * one.done // max(1, one.prompt_tokens)
    return f"reading the prompt: {share} %, {one.done:,} of {one.prompt_tokens:,} tokens{left}"


@asynccontextmanager
async def asking(target: Target, *, seconds: float) -> AsyncIterator[Asker]:
    """Asks the gateways of `target`; an answer may take `seconds`.

    Raises ConfigError (LOOPBACK_ONLY), InvalidInput (BAD_ADDRESS), Unavailable (NO_GATEWAY).
    """
    if target.member is not None:
        channels = MemberChannels(target.member)
        async with aclosing(channels):
            addresses = await channels.find()
            if target.pin is None:
                say(f"the gateway at {addresses[0]} can read this")
            found = replace(target, addresses=addresses, access={**target.access, "channels": channels})
            async with asking(replace(found, member=None), seconds=seconds) as asker:
                yield asker
        return
    if target.pin is None:
        async with inference(target.addresses[0], **target.access) as gateway:
            yield Asker(
                lambda question: in_clear(gateway, question, seconds), sealed=False, models=gateway.models
            )
        return
    from sealring.client import AsyncClient

    async with AsyncClient(
        target.addresses,
        root_sha256=target.pin,
        state_file=target.state_file,
        timeout=seconds,
        **target.access,
    ) as client:
        yield Asker(lambda question: sealed(client, question), sealed=True, models=client.models)


async def sealed(client: AsyncClient, question: Question) -> AsyncGenerator[Delta | Source, None]:
    """An answer by the client library. Raises what `AsyncClient.chat` lists."""
    from sealring.mesh.receipt.form import receipts_json

    try:
        reply = client.chat(
            [{"role": role, "content": content} for role, content in question.messages],
            model=question.model,
            max_tokens=question.max_tokens,
            min_trust=question.min_trust,
            **(question.sampling or {}),
        )
        reply.on_prefill(question.hear)
        async with reply:
            async for delta in reply:
                yield delta
    except FailedPrecondition as error:
        if error.reason == "LINKS_IN_CLEAR" and not question.min_trust:
            error.hint = f"ask for a model that a pipeline serves, {ASK_CLEAR}"
        raise
    except SealringError as error:
        raise _named(error, " or ".join(client.gateways.addresses)) from None
    done = reply.completion
    yield Source(
        model=done.model,
        ring=done.ring.id,
        min_trust=done.ring.min_trust,
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        finish=done.finish_reason,
        sealring_receipt=receipts_json(done.receipts),
    )


async def in_clear(
    gateway: GatewayCalls, question: Question, seconds: float
) -> AsyncGenerator[Delta | Source, None]:
    """An answer to a prompt that the gateway can read. Raises the error that the gateway answers with."""
    import grpc

    from sealring.client.question import chat_prompt, set_sampling
    from sealring.client.types import Delta, TokenLogprob
    from sealring.mesh.rpc.status import from_rpc_error
    from sealring.v1 import inference_pb2

    prompt = chat_prompt([{"role": role, "content": content} for role, content in question.messages])
    set_sampling(prompt, question.sampling or {})
    request = inference_pb2.GenerateRequest(
        model=question.model,
        envelope=inference_pb2.Envelope(clear=prompt),
        max_tokens=question.max_tokens,
        min_trust=question.min_trust,
        tell_prefill=True,
    )
    started = None
    try:
        async for event in gateway.stub.Generate(request, timeout=seconds, metadata=gateway.metadata):
            kind = event.WhichOneof("event")
            if kind == "started":
                started = started or event.started
            elif kind == "prefilling":
                question.hear(event.prefilling)
            elif kind == "delta":
                delta = event.delta
                logprobs = tuple(map(TokenLogprob.from_message, delta.logprobs))
                yield Delta(delta.text, delta.tokens, logprobs, reasoning=delta.parsed.reasoning)
            elif started is not None:
                yield Source(
                    model=started.model,
                    ring=started.ring,
                    min_trust=started.min_trust,
                    prompt_tokens=event.finished.prompt_tokens,
                    completion_tokens=event.finished.completion_tokens,
                    finish=enum_word(inference_pb2.FinishReason.DESCRIPTOR, event.finished.reason),
                )
    except grpc.RpcError as error:
        raise _named(from_rpc_error(error), gateway.address) from None


def _named(error: SealringError, addresses: str) -> SealringError:
    """The error with the gateway's addresses, or with the way to say which model is meant."""
    if error.reason == "MODEL_NOT_FOUND" and error.metadata.get("param") == "model":
        error.hint = f"{error.hint}; {_CHOOSE}"
    return named(error, "the gateway", addresses)


_IMAGE_HINT = "give a PNG, JPEG, WebP or GIF file"


def read_image(file: str) -> bytes:
    """The bytes of a picture's file, which the head looks into. Raises InvalidInput (BAD_IMAGE,
    IMAGE_TOO_LARGE)."""
    from sealring.mesh.prompt.images import MAX_IMAGE_BYTES, check_size

    try:
        with Path(file).expanduser().open("rb") as opened:
            image = opened.read(MAX_IMAGE_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise InvalidInput(
            f"{file} cannot be read: {why or 'there is no such file'}",
            hint=_IMAGE_HINT,
            reason="BAD_IMAGE",
            param="image",
        ) from None
    check_size(len(image), "image")
    if not image:
        raise InvalidInput(f"{file} is empty", hint=_IMAGE_HINT, reason="BAD_IMAGE", param="image")
    return image


def _shown(token: Any) -> dict[str, Any]:
    return {"token": token.token, "id": token.id, "logprob": token.logprob}
