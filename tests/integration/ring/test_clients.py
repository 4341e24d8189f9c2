"""Real clients against a real ring of three: the openai package, plain HTTP, plain gRPC."""

import grpc
import httpx
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ringtest import CLUSTER, LIMIT_SECONDS, chat

from sealring.openai import AsyncOpenAI
from sealring.v1 import inference_pb2

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"


async def test_the_openai_client_streams_with_usage(ring, client, reference):
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expected = reference.reply([{"role": "user", "content": QUESTION}], 200)
    assert text == expected.text
    assert len([chunk for chunk in chunks if chunk.choices]) > 3
    assert chunks[-1].usage.prompt_tokens == expected.prompt_tokens
    assert chunks[-1].usage.completion_tokens == expected.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]


async def test_the_openai_client_gets_a_whole_reply(client, reference):
    reply = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=3
    )
    expected = reference.reply([{"role": "user", "content": QUESTION}], 3)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3


async def test_the_openai_client_completes_texts_and_tokens(client, reference):
    asked = {"model": "demo", "max_tokens": 4, "temperature": 0}
    reply = await client.completions.create(prompt=["The capital of", "One and"], **asked)
    assert all(choice.text for choice in reply.choices)
    assert reply.usage.completion_tokens <= 8
    ids = [reference.tokenizer.encode(text) for text in ("The capital of", "One and")]
    same = await client.completions.create(prompt=ids, **asked)
    assert [choice.text for choice in same.choices] == [choice.text for choice in reply.choices]
    assert same.usage.prompt_tokens == reply.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="none of the model"):
        await client.completions.create(prompt=[1 << 30], **asked)


async def test_openais_own_classes_seal(ring, reference, tmp_path):
    given = {"root_sha256": ring.pin, "state_file": tmp_path / "roster"}
    messages = [{"role": "user", "content": QUESTION}]
    async with AsyncOpenAI(gateway=ring.cluster.grpc_address, **given) as client:
        reply = await client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert reply.choices[0].message.content == reference.reply(messages, 200).text


async def test_the_openai_client_lists_models(client):
    models = await client.models.list()
    assert [model.id for model in models.data] == ["demo"]
    assert (await client.models.retrieve("demo")).id == "demo"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_a_plain_grpc_client_streams(ring, reference):
    reply = await ring.ask(chat(QUESTION), 100)
    assert reply == reference.reply([{"role": "user", "content": QUESTION}], 100)


async def test_cancelling_a_call_frees_its_row(ring):
    for _ in range(3):
        call = ring.stub.Generate(
            inference_pb2.GenerateRequest(
                model="demo", envelope=inference_pb2.Envelope(clear=chat("List the months of the year."))
            ),
            timeout=LIMIT_SECONDS,
        )
        async for response in call:
            if response.HasField("delta"):
                break
        call.cancel()
    await ring.idle()
    assert (await ring.ask(chat(QUESTION), 20)).text


async def test_a_client_that_goes_away_frees_its_row(ring):
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": "List the months."}]}
    async with (
        httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                break
    await ring.idle()


async def test_health_says_so(ring):
    assert (await fetch(ring, "/health")).status_code == 200
    assert (await fetch(ring, "/health/live")).status_code == 200


async def test_reflection_describes_the_service(ring):
    async with grpc.aio.insecure_channel(ring.cluster.grpc_address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answers = [answer async for answer in stub.ServerReflectionInfo(requests, timeout=100)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"sealring.v1.Inference", "grpc.health.v1.Health"} <= names


async def fetch(ring, path):
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=100) as client:
        return await client.get(path)
