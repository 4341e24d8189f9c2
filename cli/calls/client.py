"""A plain client of the Inference service, as the terminal uses it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from sealring.cli.terminal.output import enum_word
from sealring.mesh.errors import ConfigError, SealringError, Unavailable
from sealring.mesh.system.addresses import require_loopback
from sealring.mesh.system.files import read_bounded, read_secret

if TYPE_CHECKING:
    import grpc

    from sealring.cli.settings import CliSettings
    from sealring.client.options import SamplingOptions


CALL_SECONDS = 10.0


class Access(TypedDict):
    """How a gateway is reached that has TLS or asks for a key."""

    credentials: grpc.ChannelCredentials | None
    api_key: str | None


@dataclass(frozen=True)
class Question:
    """A conversation to continue, as (role, content) pairs; 0 `max_tokens`: what the context holds."""

    messages: Sequence[tuple[str, str]]
    model: str = ""
    max_tokens: int = 0
    min_trust: int = 0
    sampling: SamplingOptions | None = None


@dataclass(frozen=True)
class Answer:
    """An answer and how it came: seconds to the first token, tokens per second after it."""

    text: str
    model: str
    ring: str
    min_trust: int
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    tok_s: float
    finish: str
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of each token, where the question asked for them; with the likeliest in its place."""


@dataclass(frozen=True)
class Client:
    """The Inference service of the gateway at `address` (host:port)."""

    stub: Any
    address: str
    api_key: str | None = None

    async def ask(
        self,
        question: Question,
        on_text: Callable[[str], None],
        *,
        seconds: float,
        on_reasoning: Callable[[str], None] | None = None,
    ) -> Answer:
        """Streams one answer; `on_text` gets every piece of it. `on_reasoning` gets what the model thinks
        before, and the empty line after that (None: `on_text` does).

        Raises the error that the gateway answered with.
        """
        import grpc

        from sealring.mesh.rpc.status import from_rpc_error

        try:
            return await _stream(self.stub, question, on_text, seconds, _metadata(self.api_key), on_reasoning)
        except grpc.RpcError as error:
            raise named(from_rpc_error(error), "the gateway", self.address) from None

    async def metrics(self, *, seconds: float = CALL_SECONDS) -> str:
        """What the gateway counts, in Prometheus text format. Raises the error that it answered with."""
        import grpc

        from sealring.mesh.rpc.status import from_rpc_error
        from sealring.v1 import inference_pb2

        try:
            found = await self.stub.GetMetrics(
                inference_pb2.GetMetricsRequest(), timeout=seconds, metadata=_metadata(self.api_key)
            )
        except grpc.RpcError as error:
            raise named(from_rpc_error(error), "the gateway", self.address) from None
        return str(found.exposition, "utf-8")


@asynccontextmanager
async def inference(
    address: str, *, credentials: grpc.ChannelCredentials | None = None, api_key: str | None = None
) -> AsyncIterator[Client]:
    """A client of a gateway. Raises ConfigError (LOOPBACK_ONLY): a key goes over TLS or loopback only."""
    import grpc.aio

    from sealring.mesh.rpc.server import CHANNEL_OPTIONS
    from sealring.v1 import inference_pb2_grpc

    if credentials is not None:
        opened = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    else:
        if api_key is not None:
            require_loopback(address)
        opened = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    async with opened as channel:
        yield Client(inference_pb2_grpc.InferenceStub(channel), address, api_key)


def gateway_access(settings: CliSettings) -> Access:
    """What the settings name for a gateway that asks for a key or has TLS.

    Raises ConfigError (NO_SUCH_FILE, BAD_API_KEY_FILE, SECRET_FILE_UNSAFE).
    """
    import grpc

    access: Access = {"credentials": None, "api_key": read_api_key(settings.api_key_file)}
    if settings.gateway_ca is not None:
        with _needed_file():
            access["credentials"] = grpc.ssl_channel_credentials(read_bounded(settings.gateway_ca))
    return access


def read_api_key(file: Path | None) -> str | None:
    """The API key in a file of its owner's alone, if one is named.

    Raises ConfigError (NO_SUCH_FILE, BAD_API_KEY_FILE, SECRET_FILE_UNSAFE).
    """
    if file is None:
        return None
    with _needed_file():
        key = read_secret(file).decode("ascii", "replace").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{file} does not hold an API key",
            hint="put into it what `sealring key create` printed",
            reason="BAD_API_KEY_FILE",
        )
    return key


@contextmanager
def _needed_file() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {error.filename}", reason="NO_SUCH_FILE") from None


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...] | None:
    return (("authorization", f"Bearer {api_key}"),) if api_key is not None else None


def named(error: SealringError, who: str, address: str) -> SealringError:
    """The error; where no connection was made, one that says to whom."""
    if not isinstance(error, Unavailable) or error.reason != Unavailable.code:
        return error
    return Unavailable(
        f"{who} at {address} cannot be reached",
        hint="check that it runs (`sealring up` on the first machine) and the address",
        reason="UNREACHABLE",
    )


async def _stream(
    stub: Any,
    question: Question,
    on_text: Callable[[str], None],
    seconds: float,
    metadata: Any,
    on_reasoning: Callable[[str], None] | None = None,
) -> Answer:
    from sealring.v1 import inference_pb2

    on_reasoning = on_reasoning or on_text
    asked = time.monotonic()
    first = last = 0.0
    at_first = 0
    started = finished = None
    thought = ""
    pieces: list[str] = []
    logprobs: list[dict[str, Any]] = []
    async for event in stub.Generate(_request(question), timeout=seconds, metadata=metadata):
        now = time.monotonic()
        kind = event.WhichOneof("event")
        if kind == "started":
            started = event.started
        elif kind == "delta":
            if not first:
                first, at_first = now, event.delta.tokens
            last = now
            if event.delta.parsed.reasoning:
                on_reasoning(event.delta.parsed.reasoning)
                thought = "\n\n"
            if event.delta.text and thought:
                on_reasoning(thought)
                thought = ""
            pieces.append(event.delta.text)
            logprobs += [{**_named(one), "top": list(map(_named, one.top))} for one in event.delta.logprobs]
            on_text(event.delta.text)
        elif kind == "finished":
            finished = event.finished
    if started is None or finished is None:
        raise SealringError("the gateway ended the stream without an answer", reason="BROKEN_STREAM")
    told, since = finished.completion_tokens - at_first, first
    if told < at_first:  # most of it came at once, so what came later says nothing
        told, since = finished.completion_tokens, asked
    reason = enum_word(inference_pb2.FinishReason.DESCRIPTOR, finished.reason)
    return Answer(
        text="".join(pieces),
        model=started.model,
        ring=started.ring,
        min_trust=started.min_trust,
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.completion_tokens,
        ttft_s=round((first or time.monotonic()) - asked, 4),
        tok_s=round(told / (last - since), 2) if last > since else 0.0,
        finish=reason,
        logprobs=logprobs,
    )


def _named(token: Any) -> dict[str, Any]:
    return {"token": token.spelling.decode("utf-8", "replace"), "id": token.id, "logprob": token.logprob}


def _request(question: Question) -> Any:
    from sealring.client.question import chat_prompt, set_sampling
    from sealring.v1 import inference_pb2

    prompt = chat_prompt([{"role": role, "content": content} for role, content in question.messages])
    set_sampling(prompt, question.sampling or {})
    return inference_pb2.GenerateRequest(
        model=question.model,
        envelope=inference_pb2.Envelope(clear=prompt),
        max_tokens=question.max_tokens,
        min_trust=question.min_trust,
    )
