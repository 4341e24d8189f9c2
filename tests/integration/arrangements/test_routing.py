"""Conversations and the rings that have their prefixes: two rings of real processes."""

import asyncio

import grpc
import pytest
import scarce
from ringtest import CLUSTER, LIMIT_SECONDS, built
from sharing import ask, dialogue

from sealring.mesh.errors import SealringError
from sealring.v1 import inference_pb2 as inference

pytestmark = CLUSTER


def turn(number, *more):
    """The conversation with this number, so far."""
    return dialogue(f"Question {number}: what is the capital of France?", *more)


async def test_every_turn_of_a_conversation_finds_its_prefix(rings):
    routed = ("requests_routed_by_key_total", "routed_by_key_hits_total", "routed_by_key_moved_total")
    before = [await rings.counted(name) for name in routed]
    homes = set()
    for number in range(16):
        more_turns = ("Why?", "And then?") if number < 6 else ()
        first = answer = await ask(rings, turn(number), max_tokens=4 if more_turns else 1)
        said = []
        for more in more_turns:
            said += [answer.text, more]
            answer = await ask(rings, turn(number, *said), max_tokens=4)
            assert answer.ring == first.ring
            assert answer.cached >= 64
        homes.add(first.ring)
    assert len(homes) == 2
    after = [await rings.counted(name) for name in routed]
    by_key, hits, moved = (new - old for new, old in zip(after, before, strict=True))
    assert (by_key, moved) == (28, 0)
    assert hits >= 12
    assert await rings.counted("prefix_cache_tokens") > 0
    assert await rings.counted("prefix_cache_bytes") > 0

    async with rings.openai() as client:
        answers = [
            await client.chat.completions.with_raw_response.create(
                model=rings.model, messages=turn(100 + number), max_tokens=2, prompt_cache_key="one"
            )
            for number in range(8)
        ]
    assert len({answer.headers["x-sealring-ring"] for answer in answers}) == 1

    crowd = await asyncio.gather(
        *(
            ask(rings, turn(number), max_tokens=32, prompt_cache_key="one", request_id=f"crowd-{number}")
            for number in range(24)
        )
    )
    shares = [sum(answer.ring == home for answer in crowd) for home in homes]
    assert min(shares) >= 4, "one key for everything does not fill one ring while the other is idle"


async def test_sealed_conversations_stay_with_their_rings(rings):
    before = await rings.counted("requests_routed_by_key_total")
    homes = set()
    async with rings.sealing() as client:
        for number in range(40):
            if number >= 8 and len(homes) == 2:  # between idle rings chance decides
                break
            first = await client.chat(turn(number), model=rings.model, max_tokens=8)
            again = await client.chat(turn(number, first.text, "Why?"), model=rings.model, max_tokens=8)
            assert again.ring.id == first.ring.id
            assert again.usage.cached_tokens >= 64
            homes.add(first.ring.id)
    assert len(homes) == 2
    assert await rings.counted("requests_routed_by_key_total") == before


async def test_one_key_under_two_api_keys_shares_nothing(rings, other_key):
    """Neither a prefix nor the place: which ring a key prefers differs from tenant to tenant."""
    before = await rings.counted("requests_routed_by_key_total")
    pairs, asked = set(), 0
    while len(pairs) < 2 and asked < 40:
        mine, theirs = [
            await ask(rings, turn(asked), max_tokens=1, key=key, prompt_cache_key=f"key {asked}")
            for key in (rings.key, other_key)
        ]
        pairs.add(mine.ring == theirs.ring)
        asked += 2
    assert pairs == {True, False}

    secret = [{"role": "user", "content": "Only one of us has ever asked this, nobody else may see. " * 8}]
    home = (await ask(rings, secret, max_tokens=1, prompt_cache_key="k")).ring
    assert (await ask(rings, secret, max_tokens=1, prompt_cache_key="k")).cached >= 64
    seen, guesses = {}, 0
    while home not in seen and guesses < 30:
        guess = f"guess {guesses}"
        answer = await ask(rings, secret, max_tokens=1, key=other_key, prompt_cache_key=guess)
        seen.setdefault(answer.ring, answer.cached)
        guesses += 1
    assert home in seen, "guesses have reached the ring that keeps it"
    assert set(seen.values()) == {0}
    assert await rings.counted("requests_routed_by_key_total") - before == asked + 2 + guesses


async def test_a_key_that_is_no_text_is_refused_and_the_gateway_goes_on(rings):
    request = inference.GenerateRequest(model=rings.model, max_tokens=1)
    request.envelope.clear.text = "hello"
    field = b"\x4a"  # prompt_cache_key
    forged = [field + b"\x03\xff\xfe\x00", field + b"\x80\x50" + b"\x80" * 10_240]
    async with grpc.aio.insecure_channel(rings.cluster.grpc_address) as channel:
        method = channel.unary_stream(
            "/sealring.v1.Inference/Generate", response_deserializer=inference.GenerateResponse.FromString
        )

        async def call(more):
            content = request.SerializeToString() + more
            return [one async for one in method(content, timeout=LIMIT_SECONDS, metadata=rings.metadata())]

        for more in forged:
            with pytest.raises(grpc.aio.AioRpcError):
                await call(more)
        assert (await call(field + b"\x03key"))[-1].HasField("finished")


async def test_a_ring_that_leaves_and_comes_back_without_memory(rings):
    """Its conversations go on elsewhere, sealed ones too, and those of the other ring stay; nobody is
    refused. A prompt for which it then has no memory is, and costs the other ring nothing."""
    homes = {number: (await ask(rings, turn(number), max_tokens=1)).ring for number in range(16)}
    assert len(set(homes.values())) == 2
    states = await rings.stub.GetRoster(
        inference.GetRosterRequest(), timeout=LIMIT_SECONDS, metadata=rings.metadata()
    )
    assert {load.ring for load in states.serving} >= set(homes.values())
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    async with rings.sealing() as client:

        async def answers_to(count):
            replies = [client.chat(asked, model=rings.model, max_tokens=20) for _ in range(count)]
            return await asyncio.gather(*(reply.result() for reply in replies))

        answers = await answers_to(16)
        assert len({one.text for one in answers}) == 1
        assert len({one.ring.id for one in answers}) == 2
        lost = answers[0].ring
        node = rings.node_of(lost.members[0].id)
        await rings.cluster.children.kill_one(node)
        try:
            later = await answers_to(8)
            for number, home in homes.items():
                answer = await ask(rings, turn(number, "Paris.", "Why?"), max_tokens=1)
                assert answer.ring != lost.id
                assert home == lost.id or answer.cached >= 64
            with built(rings, scarce):
                await rings.cluster.start_one(node)
            await rings.offered(2)
            await refused_for_memory(rings, lost.id)
        finally:
            await rings.cluster.children.kill_one(node)
            await rings.cluster.start_one(node)
            await rings.offered(2)
    assert {one.text for one in later} == {answers[0].text}
    assert lost.id not in {one.ring.id for one in later}


async def refused_for_memory(rings, name):
    """Long prompts, one of which comes to the ring with this name, which has no memory for it."""
    before = await epochs(rings)
    with pytest.raises(SealringError) as refused:
        for number in range(64):
            await ask(rings, turn(200 + number, "Why? " * (scarce.TOKENS // 6)), max_tokens=1)
    assert refused.value.reason == "OUT_OF_MEMORY"
    await rings.offered(2)
    after = await epochs(rings)
    assert [ring for ring in after if after[ring] != before[ring]] == [name]


async def epochs(rings):
    """The number of each ring's epoch."""
    answer = await rings.cluster.admin.call("ListDeployments")
    (found,) = (one.rings for one in answer.deployments if one.plan.spec.name == rings.model)
    return {one.ring: one.epoch for one in found}
