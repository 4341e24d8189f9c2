"""A gateway that plays a part: real gRPC, a signed roster, and a head whose key the test holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio

from sealring.client import AsyncClient
from sealring.edge.inference.service import SERVICE
from sealring.mesh.prompt.sealed import ReplayGuard, ReplySealer, RequestInfo
from sealring.mesh.rpc.server import INFERENCE, Server
from sealring.testing.cluster import PaperCluster
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

PIECES = ("The ", "capital ", "is ", "Paris", ".")
"""The texts of the answer that a gateway gives if it has no other script, a token each. One more ends it."""

PROMPT_TOKENS = 7
"""The tokens of every prompt, as the head says."""

Script: TypeAlias = Callable[
    ["ScriptedGateway", inference.GenerateRequest], AsyncIterator[inference.GenerateResponse]
]
"""Gives the messages of one answer. An error of `sealring.mesh.errors` that it raises is the call's."""


class ScriptedGateway(inference_grpc.InferenceServicer):
    """The Inference service of a cluster on paper: `Generate` answers by `script`, sealed or in clear.

    `async with ScriptedGateway() as gateway` listens on loopback, over real gRPC with a gateway's limits.
    """

    def __init__(self, cluster: PaperCluster | None = None) -> None:
        self.cluster = cluster or PaperCluster()
        self.address = ""
        """`host:port`, once it listens."""
        self.script: Script = honest
        self.requests: list[inference.GenerateRequest] = []
        self.users: list[str] = []
        """What callers said in the metadata `sealring-user`."""
        self.fetched = 0
        """How often the roster was asked for."""
        self.response: inference.GetRosterResponse | None = None
        """Told instead of the cluster's roster."""
        self.serving: list[inference.RingLoad] = []
        """The load of rings, as told beside the roster."""
        self.models: list[inference.Model] = []
        self.exposition = b""
        """What `GetMetrics` tells."""
        self.usage = inference.GetUsageResponse()
        self.loads: list[inference.LoadModelRequest] = []
        self.on_load: Callable[[], None] = lambda: None
        """Is called when a model is to be loaded; an error of `sealring.mesh.errors` is the call's."""
        self._listening = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.address = await self._listening.enter_async_context(serve_inference(self))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.aclose()

    def client(self, **settings: Any) -> AsyncClient:
        """A client that has the cluster's root key; `settings` are those of `sealring.client.AsyncClient`."""
        return AsyncClient(self.address, **{"root_sha256": self.cluster.pin, "timeout": 30.0, **settings})

    async def GetRoster(self, request: Any, context: Any) -> inference.GetRosterResponse:  # noqa: N802
        self.fetched += 1
        return self.response or inference.GetRosterResponse(
            roster=self.cluster.envelope,
            root_metadata=self.cluster.root_chain,
            serving=self.serving,
            models=self.models,
        )

    async def ListModels(self, request: Any, context: Any) -> inference.ListModelsResponse:  # noqa: N802
        return inference.ListModelsResponse(models=self.models)

    async def GetMetrics(self, request: Any, context: Any) -> inference.GetMetricsResponse:  # noqa: N802
        return inference.GetMetricsResponse(exposition=self.exposition)

    async def GetUsage(self, request: Any, context: Any) -> inference.GetUsageResponse:  # noqa: N802
        return self.usage

    async def LoadModel(self, request: Any, context: Any) -> inference.LoadModelResponse:  # noqa: N802
        self.loads.append(request)
        self.on_load()
        return inference.LoadModelResponse()

    async def Generate(  # noqa: N802
        self, request: inference.GenerateRequest, context: Any
    ) -> AsyncIterator[inference.GenerateResponse]:
        self.requests.append(request)
        metadata = dict(context.invocation_metadata() or ())
        self.users += [metadata["sealring-user"]] if "sealring-user" in metadata else []
        async for response in self.script(self, request):
            yield response

    def open(self, request: inference.GenerateRequest) -> tuple[inference.SealedPrompt, ReplySealer | None]:
        """What the head does: the prompt, and what seals the deltas of its answer; None for one in clear.

        Raises EnvelopeError for a prompt that was not sealed for the ring that it names, KeyError for a ring
        that the cluster has not.
        """
        if request.envelope.WhichOneof("content") == "clear":
            return inference.SealedPrompt(
                prompt=request.envelope.clear,
                max_tokens=request.max_tokens,
                min_trust=request.min_trust,
                choices=request.choices,
                receipt_nonce=request.receipt.nonce,
            ), None
        to = request.envelope.sealed_for
        info = RequestInfo(request.model, to.request_id, to.expires, to.roster_hash)
        opened = self.cluster.keys[to.ring].open_request(request.envelope.sealed, info, ReplayGuard())
        return inference.SealedPrompt.FromString(opened.body), opened.reply

    def reply(self, request: inference.GenerateRequest) -> list[inference.GenerateResponse]:
        """The whole honest answer, or what is missing: started, deltas, finished."""
        asked, sealer = self.open(request)
        return answer(self.started(request).started.ring, sealer, len(asked.prompt.resume.tokens))

    def started(self, request: inference.GenerateRequest) -> inference.GenerateResponse:
        """The first message of an answer. It names the ring: for a prompt in clear, the cluster's first."""
        ring = request.envelope.sealed_for.ring or next(iter(self.cluster.keys))
        return inference.GenerateResponse(started=inference.Started(ring=ring))


def answer(ring: str, sealer: ReplySealer | None, told: int = 0) -> list[inference.GenerateResponse]:
    """An answer of `PIECES` without the first `told` tokens.

    Beside a sealed one the gateway says 99 of everything, which a client does not believe.
    """
    prompt, count = (PROMPT_TOKENS, len(PIECES) + 1) if sealer is None else (99, 99)
    events = [inference.GenerateResponse(started=inference.Started(ring=ring, prompt_tokens=prompt))]
    for number, text in list(enumerate((*PIECES, ""), start=1))[told:]:
        delta = inference.SealedDelta(text=text, tokens=number)
        if number > len(PIECES):
            delta.finish = inference.FINISH_REASON_STOP
        if delta.finish or number == told + 1:
            delta.prompt_tokens = PROMPT_TOKENS
        events.append(_told(delta, sealer))
    reason = inference.FINISH_REASON_STOP if sealer is None else inference.FINISH_REASON_LENGTH
    finished = inference.Finished(reason=reason, prompt_tokens=prompt, completion_tokens=count)
    return [*events, inference.GenerateResponse(finished=finished)]


def _told(delta: inference.SealedDelta, sealer: ReplySealer | None) -> inference.GenerateResponse:
    """The message for a delta of the head; the one with a finish reason is its choice's last."""
    if sealer is None:
        told = inference.Delta(
            text=delta.text,
            tokens=delta.tokens,
            logprobs=delta.logprobs,
            choice=delta.choice,
            parsed=delta.parsed if delta.HasField("parsed") else None,
        )
    else:
        sealed = sealer.seal(delta.SerializeToString(), last=bool(delta.finish))
        told = inference.Delta(sealed=sealed, tokens=delta.tokens)
    return inference.GenerateResponse(delta=told)


async def honest(
    gateway: ScriptedGateway, request: inference.GenerateRequest
) -> AsyncIterator[inference.GenerateResponse]:
    """Answers every prompt with `PIECES`."""
    for response in gateway.reply(request):
        yield response


def saying(write: Callable[[inference.SealedPrompt], AsyncIterator[inference.SealedDelta]]) -> Script:
    """A head that answers each prompt with these deltas; one with a finish reason is the last, and ends it.

    A prompt in clear is shown as a SealedPrompt too, and its answer is in clear.
    """

    async def script(
        gateway: ScriptedGateway, request: inference.GenerateRequest
    ) -> AsyncIterator[inference.GenerateResponse]:
        asked, sealer = gateway.open(request)
        yield gateway.started(request)
        delta = inference.SealedDelta()
        async for delta in write(asked):
            yield _told(delta, sealer)
        finished = inference.Finished(
            reason=delta.finish, prompt_tokens=delta.prompt_tokens, completion_tokens=delta.tokens
        )
        yield inference.GenerateResponse(finished=finished)

    return script


@asynccontextmanager
async def serve_inference(
    service: inference_grpc.InferenceServicer,
    *,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> AsyncIterator[str]:
    """A gRPC server of this Inference service on loopback, with a gateway's limits. Gives `host:port`.

    Raises ConfigError (CANNOT_LISTEN).
    """
    add = inference_grpc.add_InferenceServicer_to_server
    server = Server([(add, service, SERVICE)], port=INFERENCE, interceptors=interceptors)
    port = server.listen("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
