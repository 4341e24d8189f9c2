"""Two models on demand on a node that holds one of them: each answers when it is asked for, by turns."""

import asyncio
import sys

import grpc.aio
import hasty
import httpx
from kernels import share_kernels
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, MODEL, Ring, chat

from sealring.cli.local.cluster import LocalCluster
from sealring.v1 import admin_pb2, inference_pb2, inference_pb2_grpc

pytestmark = CLUSTER
QUESTION = "What is the capital of France?"
ONE_FITS = "600MB"
"""A node's second engine alone is counted with half a GiB."""


async def states(cluster):
    async with httpx.AsyncClient(base_url=cluster.http_url) as http:
        return {one["id"]: one["state"] for one in (await http.get("/v1/models")).json()["data"]}


async def test_models_that_do_not_fit_together_answer_by_turns_in_clear_and_sealed(tmp_path, reference):
    expected = reference.reply([{"role": "user", "content": QUESTION}], 12).text
    settings = HASTY | {"node": {"memory_limit": ONE_FITS}}
    async with LocalCluster(tmp_path / "state", MODEL, nodes=1, settings=settings) as cluster:
        cluster.children.command = (sys.executable, hasty.__file__)
        share_kernels(cluster.state_dir)
        await cluster.start()
        for name in ("one", "two"):
            spec = admin_pb2.DeploymentSpec(
                name=name, model=str(MODEL), on_demand=True, max_rows=4, aliases=[f"{name}:latest-alias"]
            )
            await cluster.admin.call("CreateDeployment", spec=spec, seconds=LIMIT_SECONDS)
        while set(await states(cluster)) != {"one", "two"}:
            await asyncio.sleep(0.1)
        assert set((await states(cluster)).values()) == {"not loaded"}
        found = {one.plan.spec.name: one for one in (await cluster.admin.call("ListDeployments")).deployments}
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            rings = [Ring(cluster, found[name], stub) for name in ("one", "two")]
            for ring in (*rings, rings[0]):
                assert (await ring.ask(chat(QUESTION), 12)).text == expected
            replies = await asyncio.gather(*(ring.ask(chat(QUESTION), 12) for ring in rings))
            assert [one.text for one in replies] == [expected, expected]
            async with rings[0].sealing() as client:
                for name in ("one:latest-alias", "two", "one"):
                    done = await client.chat(
                        [{"role": "user", "content": QUESTION}], model=name, max_tokens=12
                    )
                    assert done.text == expected
            loaded = await states(cluster)
            assert sorted(loaded.values()) == ["loaded", "not loaded"], "never both"
            assert loaded["one"] == "loaded"
            await stub.LoadModel(inference_pb2.LoadModelRequest(model="one", keep_alive=0))
            while (await states(cluster))["one"] != "not loaded":
                await asyncio.sleep(0.1)
