import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from keptbed import on_two
from patience import until

from sealring.node.daemon import rotation
from sealring.v1 import membership_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
QUESTION = "What is the capital of France?"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets intervals of the rotation, in seconds."""

    def choose(**seconds: float) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(rotation, name, value)

    return choose


def renewals(logs: list[Any]) -> int:
    return sum(entry["event"] == "link_keys_renewed" for entry in logs)


@on_two
async def test_keys_change_while_tokens_flow(kept_bed: Any, quick: Any) -> None:
    quick(RENEW_SECONDS=0.05)
    with structlog.testing.capture_logs() as logs:
        ring = kept_bed
        await ring.form()
        gateway = await ring.attach()
        texts = []
        row = 0
        while renewals(logs) < 16 or row < 3:  # each end of each link four times
            row += 1
            texts.append(await gateway.generate(QUESTION, 30, row=row))
        await gateway.close()
        assert texts[0]
        assert len(set(texts)) == 1
    assert not [entry for entry in logs if entry["event"] == "link_keys_not_renewed"]
    at_steps = [entry["at_step"] for entry in logs if entry["event"] == "link_keys_renewed"]
    assert max(at_steps) > 10


@on_two
async def test_an_idle_ring_changes_keys_at_its_next_step(
    kept_bed: Any, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(RENEW_SECONDS=0.2, _REST_SECONDS=0.1, LATER_SECONDS=0.1)
    waiting: list[rotation.StepGate] = []
    knocked = rotation.StepGate.knocked

    async def wait(gate: rotation.StepGate) -> None:
        waiting.append(gate)
        try:
            await knocked(gate)
        finally:
            waiting.remove(gate)

    monkeypatch.setattr(rotation.StepGate, "knocked", wait)
    with structlog.testing.capture_logs() as logs:
        ring = kept_bed
        await ring.form()
        gateway = await ring.attach()
        row = changed = 0
        while changed < 2:
            row += 1
            await until(lambda: len(waiting) == 4)  # both ends of both links are due, and wait
            before = renewals(logs)
            assert await gateway.generate(QUESTION, 8, row=row)
            # On a slow machine the last keys may have come after the last step: then they are still unused,
            # and stay.
            changed += renewals(logs) >= before + 4
        await gateway.close()
    assert {entry["at_step"] for entry in logs if entry["event"] == "link_keys_renewed"} >= {1}


@on_two
async def test_a_failed_change_of_keys_is_tried_again(kept_bed: Any, quick: Any) -> None:
    quick(RENEW_SECONDS=0.05, RETRY_SECONDS=0.05)
    with structlog.testing.capture_logs() as logs:
        ring = kept_bed
        await ring.form()
        parties = [node.party for node in ring.nodes]
        envelope, newer = ring.cluster.roster(
            parties,
            gateways=[ring.gateway_party],
            layers=ring.profile.layers,
            model="model",
            digest=bytes.fromhex(ring.profile.digest),
        )
        update = membership_pb2.RosterUpdate(envelope=envelope)
        ring.coordinator.send(ring.nodes[0].id, roster=update)
        gateway = await ring.attach()
        first = asyncio.create_task(gateway.generate(QUESTION, 8, row=1))
        await until(lambda: any(entry["event"] == "link_keys_not_renewed" for entry in logs))
        ring.coordinator.send(ring.nodes[1].id, roster=update)
        done = renewals(logs)
        assert await first
        row = 1
        while renewals(logs) < done + 4:
            row += 1
            await asyncio.sleep(0.1)
            assert await gateway.generate(QUESTION, 8, row=row)
        await gateway.close()
        assert newer.version == ring.roster.version + 1
