"""A local cluster that is started again in its folder, after so long that nothing it had signed is valid."""

from __future__ import annotations

import time

from ringtest import CLUSTER, MODEL
from slow_engine import SLOW_SECONDS

from sealring.gateway.rings.control import LOST_SECONDS, PONG_SECONDS
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import Manifest

from .conftest import QUESTION, Sick, ends, enrolments_of

pytestmark = CLUSTER


async def test_a_cluster_that_was_off_for_three_certificate_lifetimes_serves(sick: Sick) -> None:
    """It is the same cluster, with the same answers, members and plan. Its gateway has keys by now. A user
    without one learnt all the same that it serves."""
    state = sick.ring.cluster.state_dir
    assert await sick.ring.ask(QUESTION, 20) == sick.before.answer
    assert sick.ring.deployment.plan == sick.before.plan
    assert enrolments_of(state) == sick.before.enrolments
    assert min(ends(state)) > time.time()


async def test_slow_engines_were_waited_for(sick: Sick) -> None:
    """Also while a step took longer than silence and lost records are waited for."""
    assert max(PONG_SECONDS, LOST_SECONDS) < SLOW_SECONDS
    assert sick.before.answer.completion_tokens > 5
    assert sick.before.epoch == 1
    assert sick.before.slow, "none was slow"


async def test_a_node_starts_again_with_the_part_of_the_model_that_it_got(sick: Sick) -> None:
    note = note_of(sick.ring.cluster.state_dir / "node-1" / "models" / "shared")
    assert note is not None
    assert note.manifest.digest == Manifest.of(MODEL).digest
