"""Rings of real processes whose tail has a drafter that reads hidden states, deployed by the command.

The model goes through a cycle of tokens that is longer than an answer, or picks another token by chance, so
only the drafter can be right about the next one.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import struct
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio
import telling
import telling_engine
from harness import CARRIER
from kernels import share_kernels
from ringtest import CLUSTER, HASTY, LIMIT_SECONDS, Ring, operate

from bench import drafted
from bench.drafters import drafter
from bench.models import Shape, random_model
from sealring.api.receipts import text_digests
from sealring.cli.local.cluster import LocalCluster
from sealring.client.trust import parse_root_sha256
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.verify import Known, verify_receipt
from sealring.v1 import inference_pb2_grpc

pytestmark = CLUSTER

SHAPE = Shape(layers=6, hidden=128, intermediate=256, heads=2, kv_heads=2, says=drafted.CYCLE)

RIGHT = {"greedy": 1 - 1e-9, "seeded": 0.9}
"""The probability that the cycle goes on."""

LONG, SHORT, BEFORE = 400, 16, 10
"""Tokens of answers, and those after which a member is killed."""

PROMPT, LAST = 200, 40
"""Tokens of a prompt, and those of its ends that are searched for."""

TELLING = telling_engine.__name__


@dataclass
class Deployed:
    ring: Ring
    size: int


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Three nodes, of which the first has the model and its drafters."""
    state = tmp_path_factory.mktemp("drafters") / "state"
    model = random_model(SHAPE, state / "node-0" / "models")
    settings = HASTY | {"node": {"allow_downloads": True}}
    async with LocalCluster(state, model.name, nodes=3, settings=settings) as cluster:
        cluster.children.command = (sys.executable, telling.__file__)
        share_kernels(state)
        await cluster.start()
        yield cluster


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=[
        ("DSpark", 3),
        ("EAGLE-3", 3),
        pytest.param(("EAGLE-3", 2), marks=pytest.mark.sweep),
        pytest.param(("DFlash", 2), marks=pytest.mark.sweep),
        pytest.param(("DFlash", 3), marks=pytest.mark.sweep),
    ],
    ids=str,
)
async def deployed(cluster: LocalCluster, request: pytest.FixtureRequest) -> AsyncIterator[Deployed]:
    kind, size = request.param
    model = cluster.state_dir / "node-0" / "models" / cluster.model
    name, made = f"{kind.lower()}-{size}", drafter(model, SHAPE, kind, drafted.SURE, layers=1)
    given = ["--name", name, "--draft", made.name, "--split", ",".join([str(SHAPE.layers // size)] * size)]
    for node in cluster.node_names[:size]:
        given += "--member", node
    await operate(cluster, "deploy", model.name, *given)
    answer = await cluster.admin.call("ListDeployments")
    (found,) = (one for one in answer.deployments if one.plan.spec.name == name)
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        ring = Ring(cluster, found, inference_pb2_grpc.InferenceStub(channel))
        await ring.offered(1)
        yield Deployed(ring, size)
    await operate(cluster, "deployment", "delete", name)


@dataclass
class Answer:
    text: str
    drafted: int
    accepted: int
    given: int
    """Tokens of earlier epochs, by the receipt."""


async def answer(
    to: Deployed,
    kind: str,
    tokens: int = LONG,
    number: int = 0,
    *,
    drafts: bool = True,
    read: Callable[[int], None] = lambda tokens: None,
) -> Answer:
    """The answer number `number`, whose receipt is checked; `read` is called with the tokens so far."""
    asked = drafted.request(to.ring.model, number, tokens, RIGHT[kind], drafts=drafts)
    nonce = secrets.token_bytes(16)
    asked.receipt.nonce = nonce
    text, finished = "", None
    async for event in to.ring.stub.Generate(asked, timeout=LIMIT_SECONDS):
        text += event.delta.text
        if event.HasField("delta"):
            read(event.delta.tokens)
        elif event.HasField("finished"):
            finished = event.finished
    assert finished is not None
    (receipt,) = finished.receipts
    digest = request_digest(asked.envelope.clear, tokens)
    known = Known(nonce, digest, text_digests(text).text, tokens=tokens, given=None)
    statement = verify_receipt(receipt, parse_root_sha256(to.ring.pin), known).statement
    assert len(statement.members) == to.size
    assert finished.completion_tokens == tokens
    return Answer(text, finished.drafted_tokens, finished.accepted_tokens, statement.given)


@pytest.mark.parametrize("kind", RIGHT)
async def test_answers_are_those_without_the_drafter_and_guesses_are_right(
    deployed: Deployed, kind: str
) -> None:
    """The gateway drafts once it knows how long steps take, and that guesses are right."""
    plain = await answer(deployed, kind, drafts=False)
    assert plain.drafted == 0
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            found = await answer(deployed, kind)
            assert found.text == plain.text
            if found.accepted:
                break
    assert found.accepted <= found.drafted


async def test_the_tail_is_sent_a_prompt_that_no_member_in_between_can_read(deployed: Deployed) -> None:
    """Not even as much of it as a penalty looks at, which goes to every tail."""
    chance = random.Random(3)
    asked = drafted.request(deployed.ring.model, 0, SHORT, RIGHT["seeded"], drafts=True)
    prompt = asked.envelope.clear
    prompt.tokens.ids[:] = [chance.randrange(100, drafted.CYCLE) for _ in range(PROMPT)]
    prompt.sampling.repetition_penalty, prompt.sampling.repetition_context_size = 1.01, LAST
    async for _ in deployed.ring.stub.Generate(asked, timeout=LIMIT_SECONDS):
        pass
    behind = deployed.ring.deployment.plan.rings[0].stages[1:]
    engines = [deployed.ring.part(deployed.ring.node_of(one.member), TELLING) for one in behind]
    wanted = [struct.pack(f"<{LAST}I", *prompt.tokens.ids[at:][:LAST]) for at in (0, PROMPT - LAST)]
    found = [[one in telling_engine.told(each.pid).read_bytes() for one in wanted] for each in engines]
    assert found == [[False, False]] * (deployed.size - 2) + [[deployed.size == 2] * 2]


async def test_rows_together_are_answered_and_the_one_that_stays_has_drafts(deployed: Deployed) -> None:
    """The row that is alone at the end had none before the other left, or fewer than are right in all."""
    wanted = await answer(deployed, "seeded", drafts=False)
    beside = await answer(deployed, "seeded", SHORT, 1, drafts=False)
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            so_far = 0

            def read(tokens: int) -> None:
                nonlocal so_far
                so_far = tokens

            second = asyncio.create_task(answer(deployed, "seeded", SHORT, 1))
            first = asyncio.create_task(answer(deployed, "seeded", read=read))
            assert (await second).text == beside.text
            together = so_far
            found = await first
            assert found.text == wanted.text
            if 0 < together < found.accepted:
                return


async def test_an_answer_goes_on_by_drafts_behind_a_killed_member(deployed: Deployed) -> None:
    wanted = await answer(deployed, "seeded", drafts=False)
    async with asyncio.timeout(2 * LIMIT_SECONDS):
        while True:
            await deployed.ring.serving()
            tail = deployed.ring.deployment.plan.rings[0].stages[-1].member
            killed = 0

            def read(tokens: int, node: str = deployed.ring.node_of(tail)) -> None:
                nonlocal killed
                if not killed and tokens >= BEFORE:
                    killed = tokens
                    deployed.ring.part(node, CARRIER).kill()

            found = await answer(deployed, "seeded", read=read)
            assert found.text == wanted.text
            if found.given and found.accepted > found.given:
                return
