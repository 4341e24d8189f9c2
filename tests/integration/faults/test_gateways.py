"""Two gateways of one ring, one of them killed: the answers are those of a ring that nothing happened to."""

import asyncio
from functools import partial

import grpc
import pytest_asyncio
from answering import Answer, Progress, ask_all, ask_sealed
from guests import NAME, guest, wait_ready
from harness import EACH, FEW
from ringtest import CLUSTER, LIMIT_SECONDS

pytestmark = CLUSTER
SEALED = ("drawn", "penalties", "stops", "logprobs")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(ring):
    await ring.serving()
    async with guest(ring) as over_it:
        yield over_it


async def test_answers_go_on_without_the_gateway_that_schedules(place, second):
    broken, expected = place.ring, place.expected
    engines = [broken.part(node, "engine.main").pid for node in broken.cluster.node_names]
    addresses = [second.cluster.grpc_address, broken.cluster.grpc_address]
    async with broken.sealing(gateway=addresses[0]) as client:
        as_guest = await ask_all(second, client, **FEW)
        assert as_guest == {name: expected[name] for name in as_guest}, "as a guest"

        async def kill():
            await broken.cluster.children.kill_one("gateway")

        taken_over = await ask_all(second, client, Progress(60, kill), **EACH)
        assert taken_over == {name: expected[name] for name in taken_over}, "as who takes over"
    await broken.cluster.start_one("gateway")
    await broken.serving()

    async def kill_second():
        await broken.cluster.children.kill_one(NAME)

    answers = {name: Answer() for name in SEALED}
    async with broken.sealing(gateway=addresses) as client, asyncio.timeout(2 * LIMIT_SECONDS):
        progress = Progress(40, kill_second)
        await asyncio.gather(
            *(ask_sealed(client, name, answer, progress) for name, answer in answers.items())
        )
    for name, answer in answers.items():
        assert answer == expected[f"{name}, sealed"], "over the other gateway"
    await second.cluster.start()
    assert [broken.part(node, "engine.main").pid for node in broken.cluster.node_names] == engines


async def test_gateways_that_are_restarted_one_after_the_other_fail_no_request(place, second):
    broken, expected = place.ring, place.expected
    await broken.serving()
    addresses = [second.cluster.grpc_address, broken.cluster.grpc_address]

    async def restart():
        for name, start, address in (
            (NAME, second.cluster.start, addresses[0]),
            ("gateway", partial(broken.cluster.start_one, "gateway"), addresses[1]),
        ):
            await broken.cluster.children.stop_one(name)
            await start()
            async with grpc.aio.insecure_channel(address) as channel:
                await wait_ready(channel)

    answers = {name: Answer() for name in SEALED}
    async with broken.sealing(gateway=addresses) as client, asyncio.timeout(2 * LIMIT_SECONDS):
        progress = Progress(30, restart)
        await asyncio.gather(
            *(ask_sealed(client, name, answer, progress) for name, answer in answers.items())
        )
    for name, answer in answers.items():
        assert answer == expected[f"{name}, sealed"]
