"""Two nodes that each compute a part of every layer: the whole model's tokens, and nothing that is sealed."""

import asyncio

import pytest
from ringtest import CLUSTER, chat
from sharing import ask

from sealring.mesh.errors import FailedPrecondition

from .test_exact import QUESTIONS, ROWS, checked, dialogue, rows_come_and_go

pytestmark = CLUSTER
TENSOR = {"strategy": "tensor", "clear_links": True, "stages": 2, "prefill_chunk": 64}
SHORT = [(contents, min(tokens, 4), delay) for contents, tokens, delay in (ROWS[1], ROWS[3], ROWS[-1])]
"""A rank that waits for the other in MLX's ring backend keeps a processor busy, so few tokens do."""


async def test_rows_that_come_and_go_get_the_tokens_of_the_whole_model(arrangements, reference):
    ring = await arrangements.have(**TENSOR)

    await rows_come_and_go(ring, reference, 0, SHORT)
    for number, question in enumerate(QUESTIONS[:2]):
        answer = await checked(ring, reference, dialogue(question), 0, max_tokens=3)
        assert (answer.cached >= 64) == (number > 0)


async def test_who_wants_sealed_links_or_any_trust_is_refused(arrangements):
    ring = await arrangements.have(**TENSOR)
    assert ring.deployment.plan.spec.clear_links
    async with ring.sealing() as client:
        with pytest.raises(FailedPrecondition) as sealed:
            await client.chat([{"role": "user", "content": "Hello!"}]).result()
    with pytest.raises(FailedPrecondition) as trusting:
        await ask(ring, [{"role": "user", "content": "Hello!"}], min_trust=1)
    assert {sealed.value.reason, trusting.value.reason} == {"LINKS_IN_CLEAR"}


async def test_a_rank_that_dies_ends_the_epoch_and_the_answer_goes_on(arrangements, reference):
    ring = await arrangements.have(**TENSOR)
    before = (await ring.status()).epoch
    question = "List the months of the year."
    asked = asyncio.ensure_future(ring.ask(chat(question), 8))
    while not asked.done() and not await ring.counted("num_requests_running"):
        await asyncio.sleep(0.01)
    stage = next(one for one in ring.deployment.plan.rings[0].stages if one.rank == 1)
    ring.part(stage.member_name, "engine").kill()
    reply = await asked
    assert reply == reference.reply([{"role": "user", "content": question}], 8)
    while (await ring.serving()).epoch <= before:  # the coordinator may not have heard of it yet
        await asyncio.sleep(0.1)


@pytest.mark.sweep
async def test_a_backend_that_does_not_come_up_leaves_a_pipeline(arrangements):
    """There is no RDMA here."""
    ring = await arrangements.have(**TENSOR, backend="jaccl", or_pipeline=True)
    assert (await ring.ask(chat("Hello!"), 4)).text
    answer = await ring.cluster.admin.call("ListDeployments")
    (found,) = answer.deployments
    assert found.plan.rings[0].pipeline
    assert "jaccl" in found.plan.reasons[-1]
    assert found.rings[0].links
