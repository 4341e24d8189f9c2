"""Kept prefixes on real rings: the tokens stay the same, the work is less, and keys do not share."""

import asyncio
import contextlib

import httpx
import openai
import pytest
from ringtest import Reply, chat, serving

from cli.operator import read_bundle
from gateway.access.keyfile import KeyFile
from gateway.access.keys import Scope
from sealring.client import AsyncClient
from sealring.v1 import inference_pb2 as inference

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]

SYSTEM = "You answer questions about the world in one short sentence and never more than that. " * 6
QUESTIONS = ["What is the capital of France?", "What is the opposite of hot?", "Who are you?"]


def dialogue(*contents):
    roles = ("system", "user", "assistant", "user")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


async def ask(ring, messages, max_tokens=40, key=None):
    """The reply, and how many tokens of the prompt were not computed."""
    request = inference.GenerateRequest(model="demo", max_tokens=max_tokens)
    for message in messages:
        request.envelope.clear.chat.messages.add(**message)
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    text = ""
    async for response in ring.stub.Generate(request, timeout=60, metadata=metadata):
        text += response.delta.text
    end = response.finished
    reason = inference.FinishReason.Name(end.reason)
    return Reply(text, end.prompt_tokens, end.completion_tokens, reason), end.cached_tokens


async def counted(ring, name):
    async with httpx.AsyncClient(base_url=ring.cluster.http_url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sealring_{name}_total"))


@pytest.mark.parametrize(("size", "kv_bits"), [(1, 0), (2, 0), (3, 0), (2, 8)])
async def test_prompts_that_begin_alike_are_computed_once(tmp_path, reference, size, kv_bits):
    async with serving(tmp_path / "state", size, prefill_chunk=64, kv_bits=kv_bits) as ring:
        total = 0
        for number, question in enumerate(QUESTIONS):
            messages = dialogue(SYSTEM, question)
            reply, cached = await ask(ring, messages)
            assert reply == reference.reply(messages, 40, kv_bits=kv_bits)
            assert (cached >= 64) == (number > 0)
            total += cached

        follow = dialogue(SYSTEM, QUESTIONS[-1], reply.text, "And what is the capital of Kenya?")
        again, cached = await ask(ring, follow)
        assert again == reference.reply(follow, 40, kv_bits=kv_bits)
        assert cached >= (reply.prompt_tokens - 64)
        total += cached

        together = await asyncio.gather(*(ask(ring, dialogue(SYSTEM, question)) for question in QUESTIONS))
        for question, (reply, cached) in zip(QUESTIONS, together, strict=True):
            assert reply == reference.reply(dialogue(SYSTEM, question), 40, kv_bits=kv_bits)
            assert cached >= 64
            total += cached
        assert await counted(ring, "prefix_cache_hits") == total
        assert await counted(ring, "prefix_cache_queries") > total

        client = openai.AsyncOpenAI(base_url=f"{ring.cluster.http_url}/v1", api_key="unused", max_retries=0)
        answer = await client.chat.completions.create(model="demo", messages=follow, max_tokens=4)
        assert answer.usage.prompt_tokens_details.cached_tokens >= 64


async def make_keys(ring):
    """Two keys, once the gateway asks for them."""
    keys = KeyFile(ring.cluster.state_dir / "gateway")
    made = [keys.create([Scope.INFERENCE])[0] for _ in range(2)]
    for _ in range(100):
        try:
            await ask(ring, dialogue("x"), 1)
        except Exception:
            return made
        await asyncio.sleep(0.1)
    raise AssertionError("the gateway asks for no key")


@pytest.mark.parametrize("share", [False, True])
async def test_api_keys_share_only_where_the_deployment_says_so(tmp_path, share):
    async with serving(tmp_path / "state", 1, share_prefixes=share) as ring:
        mine, theirs = await make_keys(ring)
        messages = dialogue(SYSTEM, QUESTIONS[0])
        first, cached = await ask(ring, messages, key=mine)
        assert cached == 0
        other, cached = await ask(ring, messages, key=theirs)
        assert (cached >= 64) == share
        again, cached = await ask(ring, messages, key=mine)
        assert cached >= 64
        assert first == other == again

        url = f"{ring.cluster.http_url}/v1"
        for key, hits in ((mine, True), (theirs, share)):
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                fresh = await client.completions.create(
                    model="demo", prompt=SYSTEM + "fresh", max_tokens=1, user="the same word"
                )
                again = await client.completions.create(
                    model="demo", prompt=SYSTEM + "fresh again", max_tokens=1
                )
                assert again.usage.prompt_tokens_details.cached_tokens >= 64
                if key is theirs:
                    assert bool(fresh.usage.prompt_tokens_details.cached_tokens) == hits


async def test_sealed_prompts_share_with_those_of_the_same_client_only(tmp_path):
    async with serving(tmp_path / "state", 2) as ring:
        pin = read_bundle(ring.cluster.operator_bundle).root_sha256.hex()
        messages = dialogue(SYSTEM, QUESTIONS[0])
        clear, _ = await ask(ring, messages)

        @contextlib.asynccontextmanager
        async def connect():
            async with AsyncClient(ring.cluster.grpc_address, root_sha256=pin, timeout=60.0) as client:
                yield client

        async with connect() as one, connect() as two:
            for client, cached in ((one, False), (one, True), (two, False), (two, True), (one, True)):
                answer = await client.chat(messages, max_tokens=40).result()
                assert answer.text == clear.text
                assert (answer.usage.cached_tokens >= 64) == cached
        _, cached = await ask(ring, messages)
        assert cached >= 64


async def test_what_is_kept_ends_with_the_epoch(tmp_path):
    async with serving(tmp_path / "state", 2) as ring:
        messages = dialogue(SYSTEM, QUESTIONS[0])
        first, _ = await ask(ring, messages)
        assert (await ask(ring, messages))[1] >= 64
        name = next(name for name in ring.cluster.processes if name.startswith("node"))
        await ring.cluster.kill_node(name)
        await ring.cluster.start_node(name)
        for _ in range(300):
            try:
                again, cached = await ask(ring, messages)
                break
            except Exception:
                await asyncio.sleep(0.2)
        assert (again, cached) == (first, 0)


async def test_a_chat_of_one_word_has_nothing_to_share(tmp_path):
    async with serving(tmp_path / "state", 1) as ring:
        first = await ring.ask(chat("Hello!"), 5)
        assert await ring.ask(chat("Hello!"), 5) == first
        assert await counted(ring, "prefix_cache_hits") == 0
