"""A scripted gateway, seen by clients over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio
import pytest

from sealring.mesh.errors import EnvelopeError, InvalidInput, RosterError
from sealring.mesh.trust.levels import TrustLevel
from sealring.testing import PaperCluster, ScriptedGateway, saying
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc as inference_grpc

CLEAR = inference.GenerateRequest(
    model="demo", envelope=inference.Envelope(clear=inference.Prompt(text="hi")), max_tokens=3
)


async def heard(
    gateway: ScriptedGateway, request: inference.GenerateRequest
) -> list[inference.GenerateResponse]:
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        return [one async for one in inference_grpc.InferenceStub(channel).Generate(request)]


async def echo(asked: inference.SealedPrompt) -> AsyncIterator[inference.SealedDelta]:
    yield inference.SealedDelta(text=asked.prompt.text, tokens=1)
    stop = inference.FINISH_REASON_STOP
    yield inference.SealedDelta(text="!", tokens=2, prompt_tokens=4, finish=stop)


async def test_a_prompt_in_clear_is_answered_in_clear() -> None:
    async with ScriptedGateway() as gateway:
        started, *deltas, finished = await heard(gateway, CLEAR)
    assert started.started.ring == "demo-0"
    assert "".join(one.delta.text for one in deltas) == "The capital is Paris."
    assert [one.delta.tokens for one in deltas] == [1, 2, 3, 4, 5, 6]
    counts = (finished.finished.prompt_tokens, finished.finished.completion_tokens)
    assert (finished.finished.reason, counts) == (inference.FINISH_REASON_STOP, (7, 6))


async def test_a_head_says_what_it_is_told_to_sealed_and_in_clear() -> None:
    async with ScriptedGateway() as gateway, gateway.client() as client:
        gateway.script = saying(echo)
        sealed = await client.complete("hi")
        clear = await heard(gateway, CLEAR)
    assert (sealed.text, sealed.usage.prompt_tokens, sealed.usage.completion_tokens) == ("hi!", 4, 2)
    assert [one.delta.text for one in clear[1:-1]] == ["hi", "!"]
    assert (clear[-1].finished.prompt_tokens, clear[-1].finished.completion_tokens) == (4, 2)


async def test_a_prompt_for_another_cluster_is_not_opened() -> None:
    async with ScriptedGateway() as other, other.client() as client:
        await client.complete("hi")
    gateway = ScriptedGateway()
    with pytest.raises(EnvelopeError):
        gateway.open(other.requests[0])


async def test_a_client_with_another_root_key_refuses_it() -> None:
    async with ScriptedGateway() as gateway, gateway.client(root_sha256=PaperCluster().pin) as client:
        with pytest.raises(RosterError) as refused:
            await client.complete("hi")
    assert refused.value.reason == "ROOT_PIN"
    assert not gateway.requests


async def test_the_rest_of_the_service_says_what_a_test_sets() -> None:
    def refuse() -> None:
        raise InvalidInput("no", reason="NOT_ON_DEMAND")

    async with ScriptedGateway(PaperCluster({"big-1": TrustLevel.HARDWARE})) as gateway:
        gateway.models.append(inference.Model(name="big"))
        gateway.exposition = b"rows 3"
        async with gateway.client() as client:
            assert [one.name for one in await client.models()] == ["big"]
        gateway.on_load = refuse
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            stub = inference_grpc.InferenceStub(channel)
            assert (await stub.GetMetrics(inference.GetMetricsRequest())).exposition == b"rows 3"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.LoadModel(inference.LoadModelRequest(model="big"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [one.model for one in gateway.loads] == ["big"]
