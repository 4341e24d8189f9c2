"""Conversations and the rings that have their prefixes: two rings of real processes."""

import asyncio
import contextlib

import grpc
import httpx
import openai
import pytest
from ringtest import MODEL, Ring

from cli.cluster import LocalCluster
from cli.operator import read_bundle
from gateway.access.keyfile import KeyFile
from gateway.access.keys import Scope
from mesh.status import from_rpc_error
from sealring.client import AsyncClient
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import inference_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.xdist_group("integration")]

SYSTEM = "You answer questions about the world in one short sentence and never more than that. " * 6


@contextlib.asynccontextmanager
async def two_rings(folder, **spec):
    async with LocalCluster(folder, MODEL, nodes=2, name="demo") as cluster:
        await cluster.start()
        await cluster.deploy(stages=1, replicas=2, **spec)
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            ring = Ring(cluster, None, inference_pb2_grpc.InferenceStub(channel))
            await wait_for_rings(ring, 2)
            yield ring


async def wait_for_rings(ring, count):
    async with asyncio.timeout(60):
        while True:
            models = await ring.stub.ListModels(inference.ListModelsRequest(), timeout=10)
            if [model.rings for model in models.models] == [count]:
                return
            await asyncio.sleep(0.1)


def dialogue(number, *contents):
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    texts = (SYSTEM, f"Question {number}: what is the capital of France?", *contents)
    return [{"role": role, "content": content} for role, content in zip(roles, texts, strict=False)]


async def ask(ring, messages, *, max_tokens=8, key=None, **fields):
    """Which ring answered what, and how many tokens of the prompt were not computed."""
    request = inference.GenerateRequest(model="demo", max_tokens=max_tokens, **fields)
    for message in messages:
        request.envelope.clear.chat.messages.add(**message)
    metadata = (("authorization", f"Bearer {key}"),) if key else None
    text = ""
    try:
        async for response in ring.stub.Generate(request, timeout=60, metadata=metadata):
            text += response.delta.text
            if response.HasField("started"):
                name = response.started.ring
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    return name, text, response.finished.cached_tokens


async def counted(ring, name, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, headers=headers) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sealring_{name}{{"))


async def test_every_turn_of_a_conversation_finds_its_prefix(tmp_path):
    async with two_rings(tmp_path / "state") as ring:
        homes = set()
        for number in range(16):
            messages = dialogue(number)
            home, text, _ = await ask(ring, messages)
            for more in ("Why?", "And then?"):
                messages = [
                    *messages,
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": more},
                ]
                where, text, cached = await ask(ring, messages)
                assert where == home
                assert cached >= 64
            homes.add(home)
        assert len(homes) == 2
        assert await counted(ring, "requests_routed_by_key_total") == 48
        assert await counted(ring, "routed_by_key_hits_total") >= 32
        assert await counted(ring, "routed_by_key_moved_total") == 0
        assert await counted(ring, "prefix_cache_tokens") > 0
        assert await counted(ring, "prefix_cache_bytes") > 0

        url = f"{ring.cluster.http_url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            answers = [
                await client.chat.completions.with_raw_response.create(
                    model="demo", messages=dialogue(100 + number), max_tokens=2, prompt_cache_key="one"
                )
                for number in range(8)
            ]
        assert len({answer.headers["x-sealring-ring"] for answer in answers}) == 1

        crowd = await asyncio.gather(
            *(
                ask(
                    ring,
                    dialogue(number),
                    max_tokens=48,
                    prompt_cache_key="one",
                    request_id=f"crowd-{number}",
                )
                for number in range(40)
            )
        )
        shares = [sum(where == home for where, _, _ in crowd) for home in homes]
        assert min(shares) >= 4, "one key for everything does not fill one ring while the other is idle"


async def test_sealed_conversations_stay_with_their_rings(tmp_path):
    async with two_rings(tmp_path / "state") as ring:
        pin = read_bundle(ring.cluster.operator_bundle).root_sha256.hex()
        homes = set()
        async with AsyncClient(ring.cluster.grpc_address, root_sha256=pin, timeout=60.0) as client:
            for number in range(8):
                messages = dialogue(number)
                first = await client.chat(messages, max_tokens=8)
                messages += [
                    {"role": "assistant", "content": first.text},
                    {"role": "user", "content": "Why?"},
                ]
                again = await client.chat(messages, max_tokens=8)
                assert again.ring.id == first.ring.id
                assert again.usage.cached_tokens >= 64
                homes.add(first.ring.id)
        assert len(homes) == 2
        assert await counted(ring, "requests_routed_by_key_total") == 0


async def test_one_key_under_two_api_keys_shares_nothing(tmp_path):
    """Neither a prefix nor the place: which ring a key prefers differs from tenant to tenant."""
    async with two_rings(tmp_path / "state") as ring:
        file = KeyFile(ring.cluster.state_dir / "gateway")
        mine, theirs, reading = (
            file.create([scope])[0] for scope in (Scope.INFERENCE, Scope.INFERENCE, Scope.READ)
        )
        pairs = set()
        for number in range(20):
            own = [
                await ask(ring, dialogue(number), max_tokens=1, key=key, prompt_cache_key=f"key {number}")
                for key in (mine, theirs)
            ]
            pairs.add(own[0][0] == own[1][0])
        assert pairs == {True, False}

        secret = [
            {"role": "user", "content": "Only one of us has ever asked this, nobody else may see. " * 8}
        ]
        home, _, _ = await ask(ring, secret, max_tokens=1, key=mine, prompt_cache_key="k")
        assert (await ask(ring, secret, max_tokens=1, key=mine, prompt_cache_key="k"))[2] >= 64
        seen = {}
        for number in range(30):
            where, _, cached = await ask(
                ring, secret, max_tokens=1, key=theirs, prompt_cache_key=f"guess {number}"
            )
            seen.setdefault(where, cached)
        assert home in seen, "guesses have reached the ring that keeps it"
        assert set(seen.values()) == {0}
        assert await counted(ring, "requests_routed_by_key_total", reading) == 72


async def test_a_ring_that_leaves_in_the_middle(tmp_path):
    """Its conversations go on elsewhere, those of the other ring stay; nobody is refused."""
    async with two_rings(tmp_path / "state") as ring:
        homes = {number: (await ask(ring, dialogue(number)))[0] for number in range(16)}
        assert len(set(homes.values())) == 2
        lost = homes[0]
        states = await ring.stub.GetRoster(inference.GetRosterRequest(), timeout=10)
        assert {load.ring for load in states.serving} == set(homes.values())
        await ring.cluster.kill_node(await node_of(ring, lost))
        for number, home in homes.items():
            where, _, cached = await ask(ring, dialogue(number, "Paris.", "Why?"))
            assert where != lost
            assert home == lost or cached >= 64


async def node_of(ring, wanted):
    """The name of the node that is that ring."""
    pin = read_bundle(ring.cluster.operator_bundle).root_sha256.hex()
    async with AsyncClient(ring.cluster.grpc_address, root_sha256=pin) as client:
        members = {one.id: [member.id for member in one.members] for one in await client.rings()}
    (member,) = members[wanted]
    folders = (ring.cluster.state_dir / name for name in ring.cluster.node_names)
    return next(folder.name for folder in folders if member in (folder / "member.json").read_text())


async def test_a_key_that_is_no_text_is_refused_and_the_gateway_goes_on(tmp_path):
    request = inference.GenerateRequest(model="demo", max_tokens=1)
    request.envelope.clear.text = "hello"
    field = b"\x4a"  # prompt_cache_key
    forged = [field + b"\x03\xff\xfe\x00", field + b"\x80\x50" + b"\x80" * 10_240]
    async with two_rings(tmp_path / "state") as ring:
        address = ring.cluster.grpc_address
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_stream(
                "/sealring.v1.Inference/Generate", response_deserializer=inference.GenerateResponse.FromString
            )
            for more in forged:
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in call(request.SerializeToString() + more, timeout=20):
                        pass
            good = request.SerializeToString() + field + b"\x03key"
            assert [event async for event in call(good, timeout=20)][-1].HasField("finished")
