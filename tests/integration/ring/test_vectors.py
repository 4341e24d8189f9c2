"""Embeddings and scores by real clients, from rings of one, two and three, beside a model that chats."""

from contextlib import asynccontextmanager

import grpc
import httpx
import mlx.core as mx
import numpy as np
import ollama
import openai
import pytest
from ringtest import CLUSTER, LIMIT_SECONDS, PROXY_KEY, chat
from tokenizers import Tokenizer
from vectormodels import END, NO, YES, write

from sealring.v1 import inference_pb2

pytestmark = CLUSTER
TEXTS = ["The capital of France", "is one of several cities with a river, and with bridges over it", "One"]
QUERY, DOCUMENTS = "Where is the river?", ["The river is in the city", "Bread and salt", "Rivers flow"]


@asynccontextmanager
async def deployed(ring, folder, **spec):
    await ring.cluster.deploy(name="vectors", model=str(folder), **spec)
    try:
        yield
    finally:
        await ring.cluster.admin.call("DeleteDeployment", name="vectors")


def embedding(whole, ids, dimensions=None):
    """Cuts the state of mlx-lm's whole model and makes it unit-length in float32."""
    with mx.stream(mx.cpu):
        state = np.array(whole.model(mx.array([ids]))[0, -1].astype(mx.float32))[:dimensions]
    return state / np.linalg.norm(state)


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_openais_and_ollamas_clients_get_the_whole_models_embeddings(ring, tmp_path, stages):
    whole = write(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    assert all(each[-1] == END for each in ids)
    expected = [embedding(whole, each) for each in ids]
    async with (
        deployed(ring, tmp_path, stages=stages),
        ring.openai() as client,
        ollama.AsyncClient(ring.cluster.http_url) as own,
    ):
        found = await client.embeddings.create(model="vectors", input=TEXTS)  # in base64
        plain = await client.embeddings.create(model="vectors", input=ids, encoding_format="float")
        short = await client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=10)
        embedded = await own.embed(model="vectors", input=TEXTS)
        older = await own.embeddings(model="vectors", prompt=TEXTS[2])
        with pytest.raises(openai.BadRequestError, match="this model makes embeddings and nothing else"):
            await client.completions.create(model="vectors", prompt="Hi")
        with pytest.raises(openai.BadRequestError, match="embeddings have 64 numbers"):
            await client.embeddings.create(model="vectors", input="One", dimensions=65)
        with pytest.raises(openai.BadRequestError, match="the context holds"):
            await client.embeddings.create(model="vectors", input="river " * 600)
        shown = await own.show("vectors")
        many = await client.embeddings.create(model="vectors", input=[TEXTS[2]] * 100)
    assert [one.embedding for one in found.data] == [one.embedding for one in plain.data]
    for one, vector in zip(found.data, expected, strict=True):
        assert np.abs(np.array(one.embedding, np.float32) - vector).max() <= 1e-6  # of chunks and padding
    assert embedded.embeddings == [one.embedding for one in found.data]
    assert older.embedding == found.data[2].embedding
    assert np.abs(np.array(short.data[0].embedding) - embedding(whole, ids[0], 10)).max() <= 1e-6
    tokens = sum(map(len, ids))
    assert found.usage.prompt_tokens == found.usage.total_tokens == embedded.prompt_eval_count == tokens
    assert shown.capabilities == ["embedding"]
    assert [one.index for one in many.data] == list(range(100))
    assert all(one.embedding == found.data[2].embedding for one in many.data)


async def test_inputs_are_sealed_and_so_are_their_vectors(ring, sealed, tmp_path):
    whole = write(tmp_path)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXTS[1]).ids
    async with (
        deployed(ring, tmp_path, stages=2),
        openai.AsyncOpenAI(base_url=f"{sealed}/v1", api_key=PROXY_KEY) as client,
        ring.sealing() as own,
    ):
        found = await client.embeddings.create(model="vectors", input=[TEXTS[1]] * 3)
        asked = inference_pb2.Prompt(pooled=inference_pb2.Pooled(text=TEXTS[1]))
        reply = own.ask(asked, model="vectors", max_tokens=1)
        deltas = [delta async for delta in reply]
        signed = reply.completion.receipts  # which the client has checked
    for one in found.data:
        assert np.abs(np.array(one.embedding, np.float32) - embedding(whole, ids)).max() <= 1e-6
    assert found.usage.prompt_tokens == 3 * len(ids)
    (receipt,) = signed
    assert not receipt.head.missing + receipt.tail.missing
    assert deltas[0].vector == tuple(found.data[0].embedding)


async def test_documents_are_ranked_by_the_probability_of_yes(ring, tmp_path):
    whole = write(tmp_path, scores=True)
    asked = {"model": "vectors", "query": QUERY, "documents": DOCUMENTS}
    async with deployed(ring, tmp_path, stages=3), ring.openai() as client:
        async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
            found = (await http.post("/v1/rerank", json=asked)).json()
            best = (await http.post("/v2/rerank", json=asked | {"top_n": 1, "return_documents": True})).json()
        with pytest.raises(openai.BadRequestError, match="makes scores of texts for a query"):
            await client.embeddings.create(model="vectors", input="One")
        pair = inference_pb2.Pooled(text=DOCUMENTS[0], query=QUERY)
        envelope = inference_pb2.Envelope(clear=inference_pb2.Prompt(pooled=pair))
        request = inference_pb2.GenerateRequest(model="vectors", envelope=envelope)
        events = [event async for event in ring.stub.Generate(request, timeout=LIMIT_SECONDS)]
    (delta,) = [event.delta for event in events if event.HasField("delta")]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    scores = []
    for text in DOCUMENTS:
        prompt = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
            "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
            f"<Query>: {QUERY}\n<Document>: {text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        with mx.stream(mx.cpu):
            no, yes = np.array(whole(mx.array([ids]))[0, -1, [NO, YES]].astype(mx.float32))
        scores.append(1 / (1 + np.exp(np.float64(no) - np.float64(yes))))
    told = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [told[at] for at in range(3)] == pytest.approx(scores, abs=1e-6)
    assert list(delta.parsed.vector) == [told[0]]
    order = sorted(range(3), key=lambda at: -scores[at])
    assert [one["index"] for one in found["results"]] == order
    assert [one["document"]["text"] for one in best["results"]] == [DOCUMENTS[order[0]]]
    assert found["usage"]["total_tokens"] > 0


async def test_a_model_that_chats_makes_no_vectors(ring, client):
    with pytest.raises(openai.BadRequestError, match="answers, and neither embeddings nor scores"):
        await client.embeddings.create(model=ring.model, input="One")
    prompt = inference_pb2.Prompt(pooled=inference_pb2.Pooled(text="One"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ring.ask(prompt)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (await ring.ask(chat("Hello!"), 1)).completion_tokens == 1
