"""A gateway that plays a part: real gRPC, a signed roster, and a head whose key the test holds."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rostertest import PaperCluster

from sealring.client import AsyncClient
from sealring.mesh.errors import SealringError
from sealring.mesh.prompt.sealed import OpenedRequest, ReplayGuard, ReplySealer, RequestInfo
from sealring.mesh.rpc.server import Server
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

PIECES = ("The ", "capital ", "is ", "Paris", ".")
Script = Callable[["ScriptedGateway", inference.GenerateRequest], AsyncIterator[inference.GenerateResponse]]


class ScriptedGateway(inference_grpc.InferenceServicer):
    """Answers `GetRoster` with the cluster's roster and `Generate` as its script says."""

    def __init__(self, cluster: PaperCluster) -> None:
        self.cluster = cluster
        self.requests: list[inference.GenerateRequest] = []
        self.users: list[str] = []
        self.fetched = 0
        self.script: Script = honest
        self.serving: list[inference.RingLoad] = []
        self.response: inference.GetRosterResponse | None = None
        self.models: list[inference.Model] = []
        self.loads: list[inference.LoadModelRequest] = []
        self.on_load: Callable[[], None] = lambda: None
        self.refusals: list[SealringError] = []
        """What the next loads fail with, the last first."""

    async def GetRoster(self, request: Any, context: Any) -> inference.GetRosterResponse:
        self.fetched += 1
        return self.response or inference.GetRosterResponse(
            roster=self.cluster.envelope,
            root_metadata=self.cluster.root_chain,
            serving=self.serving,
            models=self.models,
        )

    async def LoadModel(self, request: Any, context: Any) -> inference.LoadModelResponse:
        self.loads.append(request)
        if self.refusals:
            raise self.refusals.pop()
        self.on_load()
        return inference.LoadModelResponse()

    async def Generate(
        self, request: inference.GenerateRequest, context: Any
    ) -> AsyncIterator[inference.GenerateResponse]:
        self.requests.append(request)
        metadata = dict(context.invocation_metadata() or ())
        self.users += [metadata["sealring-user"]] if "sealring-user" in metadata else []
        async for response in self.script(self, request):
            yield response

    def open(self, request: inference.GenerateRequest) -> tuple[inference.SealedPrompt, ReplySealer]:
        """What the head does."""
        to = request.envelope.sealed_for
        info = RequestInfo(request.model, to.request_id, to.expires, to.roster_hash)
        key = self.cluster.keys[to.ring]
        opened: OpenedRequest = key.open_request(request.envelope.sealed, info, ReplayGuard())
        return inference.SealedPrompt.FromString(opened.body), opened.reply

    def reply(self, request: inference.GenerateRequest) -> list[inference.GenerateResponse]:
        """The whole honest answer, or what is missing: started, sealed deltas, finished."""
        asked, sealer = self.open(request)
        return answer(request.envelope.sealed_for.ring, sealer, len(asked.prompt.resume.tokens))


def answer(ring: str, sealer: ReplySealer, told: int = 0) -> list[inference.GenerateResponse]:
    events = [inference.GenerateResponse(started=inference.Started(ring=ring, prompt_tokens=99))]
    for number, text in list(enumerate((*PIECES, ""), start=1))[told:]:
        last = number > len(PIECES)
        delta = inference.SealedDelta(text=text, tokens=number)
        if last or number == told + 1:
            delta.prompt_tokens = 7
        if last:
            delta.finish = inference.FINISH_REASON_STOP
        sealed = sealer.seal(delta.SerializeToString(), last=last)
        events.append(inference.GenerateResponse(delta=inference.Delta(sealed=sealed, tokens=number)))
    finished = inference.Finished(
        reason=inference.FINISH_REASON_LENGTH, prompt_tokens=99, completion_tokens=99
    )
    return [*events, inference.GenerateResponse(finished=finished)]


async def honest(
    gateway: ScriptedGateway, request: inference.GenerateRequest
) -> AsyncIterator[inference.GenerateResponse]:
    for response in gateway.reply(request):
        yield response


def saying(write: Callable[[inference.SealedPrompt], AsyncIterator[inference.SealedDelta]]) -> Script:
    """A head that answers each prompt with these deltas; the last one ends the answer."""

    async def script(
        gateway: ScriptedGateway, request: inference.GenerateRequest
    ) -> AsyncIterator[inference.GenerateResponse]:
        asked, sealer = gateway.open(request)
        ring = request.envelope.sealed_for.ring
        yield inference.GenerateResponse(started=inference.Started(ring=ring))
        async for delta in write(asked):
            last = delta.finish != inference.FINISH_REASON_UNSPECIFIED
            sealed = sealer.seal(delta.SerializeToString(), last=last)
            yield inference.GenerateResponse(delta=inference.Delta(sealed=sealed, tokens=delta.tokens))
        yield inference.GenerateResponse(finished=inference.Finished(reason=inference.FINISH_REASON_STOP))

    return script


@dataclasses.dataclass
class Stage:
    """A scripted gateway that listens, and its cluster."""

    gateway: ScriptedGateway
    address: str

    @property
    def cluster(self) -> PaperCluster:
        return self.gateway.cluster

    def client(self, **settings: Any) -> AsyncClient:
        return AsyncClient(self.address, **{"root_sha256": self.cluster.pin, "timeout": 30.0, **settings})


@asynccontextmanager
async def on_stage() -> AsyncIterator[Stage]:
    """A scripted gateway that listens."""
    gateway = ScriptedGateway(PaperCluster())
    add = inference_grpc.add_InferenceServicer_to_server
    server = Server([(add, gateway, "sealring.v1.Inference")])
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield Stage(gateway, f"127.0.0.1:{port}")
    await server.stop(0)
