"""Two models on demand on a node that holds one of them: each answers when it is asked for, by turns.

So they do whatever is killed while one is loaded, or makes room for the other.
"""

import asyncio
import contextlib
import dataclasses
import signal
import sys

import grpc.aio
import hasty
import httpx
import psutil
import pytest
import pytest_asyncio
from answering import ask_all
from following import follow
from kernels import share_kernels
from patience import until
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, MODEL, Ring, chat, on_demand

from sealring.cli.calls.operator import read_bundle
from sealring.cli.local.cluster import LocalCluster
from sealring.coordinator.standby.follow import promote
from sealring.mesh.system.addresses import free_port
from sealring.v1 import inference_pb2, inference_pb2_grpc
from sealring.v1.membership_pb2 import (
    LOAD_PHASE_LOADED,
    LOAD_PHASE_LOADING,
    LOAD_PHASE_NOT_LOADED,
    LOAD_PHASE_YIELDING,
)

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"
ONE_FITS = "600MB"
"""A node's second engine alone is counted with half a GiB."""

KINDS = {"clear": ("greedy", "drawn"), "sealed": ("penalties", "logprobs")}


@dataclasses.dataclass
class House:
    """The cluster, its two models, a client that seals, and the answers of a ring that nothing happens to."""

    cluster: LocalCluster
    rings: list
    client: object
    standby: str
    expected: dict

    async def load(self, name):
        """The coordinator's word on a model."""
        found = (await self.cluster.admin.call("ListDeployments", wait_for_ready=True)).deployments
        return next(one for one in found if one.plan.spec.name == name)

    async def phase(self, name, *wanted):
        """Returns once a model is in one of these phases."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while (await self.load(name)).load.phase not in wanted:
                await asyncio.sleep(0.01)

    async def ask(self, ring):
        """Answers of several kinds at once; clients that lose their gateway ask again."""
        return await ask_all(ring, self.client, again=True, **KINDS)

    async def unload(self):
        """Unloads both models, which the tests begin with."""
        for ring in self.rings:
            request = inference_pb2.LoadModelRequest(model=ring.model, keep_alive=0)
            await ring.stub.LoadModel(request, wait_for_ready=True)
        for ring in self.rings:
            await self.phase(ring.model, LOAD_PHASE_NOT_LOADED)

    async def restart(self, name):
        await self.cluster.children.kill_one(name)
        await asyncio.sleep(0.5)
        await self.cluster.start_one(name)


async def states(cluster):
    """The gateway's word on each model; nothing while it starts."""
    async with httpx.AsyncClient(base_url=cluster.http_url) as http:
        with contextlib.suppress(httpx.TransportError):
            return {one["id"]: one["state"] for one in (await http.get("/v1/models")).json()["data"]}
    return {}


async def by_ollama(ring):
    """The answer to the question by Ollama's API."""
    options = {"temperature": 0, "num_predict": 12}
    body = {"model": ring.model, "prompt": QUESTION, "options": options, "stream": False}
    async with httpx.AsyncClient(base_url=ring.cluster.http_url, timeout=LIMIT_SECONDS) as http:
        return (await http.post("/api/generate", json=body)).json()


async def all_unloaded(cluster):
    """Returns once the gateway has heard that no model is loaded."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while set((await states(cluster)).values()) != {"not loaded"}:
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(tmp_path_factory):
    standby = f"127.0.0.1:{free_port()}"
    settings = HASTY | {"node": {"memory_limit": ONE_FITS}}
    settings["coordinator"] = HASTY["coordinator"] | {"standby": standby}
    folder = tmp_path_factory.mktemp("on-demand") / "state"
    async with LocalCluster(folder, MODEL, nodes=1, settings=settings) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        share_kernels(cluster.state_dir)
        await cluster.start()
        found = {
            name: await on_demand(cluster, name, max_rows=4, aliases=[f"{name}:latest-alias"])
            for name in ("one", "two")
        }
        async with asyncio.timeout(LIMIT_SECONDS):
            while set(await states(cluster)) != {"one", "two"}:
                await asyncio.sleep(0.1)
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            rings = [Ring(cluster, found[name], stub) for name in ("one", "two")]
            async with rings[0].sealing(timeout=3 * LIMIT_SECONDS) as client:
                made = House(cluster, rings, client, standby, {})
                made.expected = await made.ask(rings[0])
                assert not any(answer.error for answer in made.expected.values())
                yield made


async def test_models_that_do_not_fit_together_answer_by_turns_in_clear_and_sealed(house, reference):
    cluster, rings = house.cluster, house.rings
    expected = reference.reply([{"role": "user", "content": QUESTION}], 12).text
    await house.unload()
    await all_unloaded(cluster)
    for ring in rings:
        answer = await by_ollama(ring)
        assert answer["response"] == expected
        assert answer["load_duration"] > 0
    replies = await asyncio.gather(*(ring.ask(chat(QUESTION), 12) for ring in rings))
    assert [one.text for one in replies] == [expected, expected]
    for name in ("two", "one:latest-alias", "one"):
        done = await house.client.chat([{"role": "user", "content": QUESTION}], model=name, max_tokens=12)
        assert done.text == expected
    loaded = await states(cluster)
    assert sorted(loaded.values()) == ["loaded", "not loaded"], "never both"
    assert loaded["one"] == "loaded"


SWEPT = pytest.mark.sweep  # `tests/simulation` kills everything in every run


@pytest.mark.parametrize(
    "part", ["engine", *(pytest.param(one, marks=SWEPT) for one in ("gateway", "node-0", "coordinator"))]
)
async def test_nothing_is_lost_when_a_part_is_killed_while_a_model_is_loaded(house, part):
    ring = house.rings[0]
    await house.unload()
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(house.ask(ring))
        await house.phase("one", LOAD_PHASE_LOADING)
        if part == "engine":
            async with asyncio.timeout(LIMIT_SECONDS):
                while not (engines := ring.parts("node-0", "engine.main")):
                    await asyncio.sleep(0.01)
            engines[0].kill()
        else:
            await house.restart(part)
    assert asked.result() == house.expected


@pytest.mark.sweep
@pytest.mark.parametrize("part", ["coordinator", "node-0", "gateway"])
async def test_nothing_is_lost_when_a_part_is_killed_while_a_model_makes_room(house, part):
    one, two = house.rings
    stopped = asyncio.Event()

    async def keep_busy(ring):
        while not stopped.is_set():
            assert await house.ask(ring) == house.expected

    await house.unload()
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(keep_busy(one))
        await house.phase("one", LOAD_PHASE_LOADED)
        group.create_task(keep_busy(two))
        await house.phase("one", LOAD_PHASE_YIELDING)
        stopped.set()
        await house.restart(part)


async def test_a_standby_that_takes_over_goes_on_with_the_model_that_is_loaded(house):
    """Afterwards it is the cluster's coordinator."""
    assert await house.ask(house.rings[0]) == house.expected
    standby = await follow(house.cluster, house.standby)
    process = house.cluster.children.expect_end("coordinator")
    deposed = psutil.Process(process.pid)
    deposed.send_signal(signal.SIGSTOP)
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(house.ask(ring)) for ring in house.rings]
        promote(standby)
        bundle = standby.state_dir / "operator"
        await until(lambda: read_bundle(bundle).coordinator == house.standby, pause=0.1)
        await house.cluster.administer(bundle)
    assert [each.result() for each in asked] == [house.expected] * 2
    deposed.send_signal(signal.SIGCONT)
    assert await process.wait() != 0
