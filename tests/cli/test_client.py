from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cli.client import Question, inference
from mesh.errors import NotFound, SealringError
from mesh.rpc import Server
from sealring.v1 import inference_pb2, inference_pb2_grpc


class Servicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.seen.append(request)
        if request.model == "none":
            raise NotFound("no model none", hint="see models")
        started = inference_pb2.Started(model="demo", ring="r", prompt_tokens=5, min_trust=10)
        yield inference_pb2.GenerateResponse(started=started)
        if request.model == "cut":
            return
        for tokens, text in enumerate(["Pa", "ris", "."], start=1):
            yield inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text=text, tokens=tokens))
        finished = inference_pb2.Finished(
            reason=inference_pb2.FINISH_REASON_STOP, prompt_tokens=5, completion_tokens=4
        )
        yield inference_pb2.GenerateResponse(finished=finished)


@pytest.fixture
async def gateway() -> AsyncIterator[tuple[str, Servicer]]:
    servicer = Servicer()
    add = inference_pb2_grpc.add_InferenceServicer_to_server
    server = Server([(add, servicer, "sealring.v1.Inference")])
    port = server.listen("127.0.0.1:0", None)
    await server.start()
    yield f"127.0.0.1:{port}", servicer
    await server.stop(0)


async def test_an_answer_comes_in_pieces(gateway: tuple[str, Servicer]) -> None:
    address, servicer = gateway
    pieces: list[str] = []
    question = Question([("system", "be brief"), ("user", "hi")], "demo", 9, 0.5, 7, 10)
    async with inference(address) as client:
        answer = await client.ask(question, pieces.append, seconds=10)
    assert pieces == ["Pa", "ris", "."]
    assert (answer.text, answer.finish, answer.model, answer.min_trust) == ("Paris.", "stop", "demo", 10)
    assert (answer.prompt_tokens, answer.completion_tokens) == (5, 4)
    assert answer.ttft_s > 0
    request = servicer.seen[0]
    assert [one.role for one in request.envelope.clear.chat.messages] == ["system", "user"]
    assert (request.max_tokens, request.min_trust) == (9, 10)
    assert request.envelope.clear.sampling.seed == 7


async def test_a_seed_is_sent_only_when_given(gateway: tuple[str, Servicer]) -> None:
    address, servicer = gateway
    async with inference(address) as client:
        await client.ask(Question([("user", "hi")]), lambda text: None, seconds=10)
    assert not servicer.seen[0].envelope.clear.sampling.HasField("seed")


async def test_refusals_keep_their_reason(gateway: tuple[str, Servicer]) -> None:
    async with inference(gateway[0]) as client:
        with pytest.raises(NotFound, match="no model none"):
            await client.ask(Question([("user", "hi")], "none"), lambda text: None, seconds=10)
        with pytest.raises(SealringError) as caught:
            await client.ask(Question([("user", "hi")], "cut"), lambda text: None, seconds=10)
    assert caught.value.reason == "BROKEN_STREAM"


async def test_chat_asks_and_leaves(gateway: tuple[str, Servicer], sealring: Any) -> None:
    import asyncio

    done = await asyncio.to_thread(sealring, "chat", "hi", "--gateway", gateway[0], "--json")
    assert done.status == 0, done.err
    assert done.data["answer"] == "Paris."
    done = await asyncio.to_thread(sealring, "chat", "-", "--gateway", gateway[0], stdin="hi there\n")
    assert done.out == "Paris.\n"
    done = await asyncio.to_thread(sealring, "chat", "--gateway", gateway[0], stdin="one\ntwo\n\n")
    assert done.out == "Paris.\nParis.\n"
    assert len(gateway[1].seen[-1].envelope.clear.chat.messages) == 3
