import asyncio
import os
import signal
from typing import Any

import grpc
import pytest
from keptbed import on_one, on_two

from sealring.mesh.pki import Role
from sealring.node.daemon import carrier_process as daemon_carrier
from sealring.node.daemon import engine_process as daemon_engine
from sealring.v1 import membership_pb2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
QUESTION = "What is the capital of France?"


CHILDREN = ("sealring.node.carrier.main", "sealring.node.engine.main")


async def faults(ring: Any) -> set[str]:
    found = set()
    for node in ring.nodes:
        fault = await ring.coordinator.hears(node.id, "fault", epoch=ring.epoch)
        found.add(fault.problem.reason)
    return found


@on_two
async def test_a_frozen_child_is_found(
    kept_bed: Any, children_of: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its state: its silence would be waited for much longer here."""
    for name, value in (
        ("engine_process._BUSY", (100.0, 1000.0)),
        ("engine_process._QUIET", (100.0, 1000.0)),
        ("carrier_process._PING_INTERVAL", 100.0),
        ("carrier_process._PING_DEADLINE", 1000.0),
    ):
        monkeypatch.setattr(f"sealring.node.daemon.{name}", value)
    ring = kept_bed
    for victim, found in zip(CHILDREN, ("CARRIER_FROZEN", "ENGINE_FROZEN"), strict=True):
        await ring.form()
        os.kill(children_of(victim)[0].pid, signal.SIGSTOP)
        assert found in await faults(ring)
        await eventually(lambda: not children_of("sealring.node.carrier.main"))


@on_two
async def test_what_is_frozen_while_a_ring_forms_is_found(
    kept_bed: Any, children_of: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = kept_bed

    def freeze(process: Any, method: str) -> None:
        genuine = getattr(process, method)

        async def held(self: Any, *arguments: Any) -> None:
            os.kill(self.pid, signal.SIGSTOP)
            await genuine(self, *arguments)

        monkeypatch.setattr(process, method, held)

    freeze(daemon_carrier.CarrierProcess, "form")
    ring.prepare()
    for node in ring.nodes:
        await ring.coordinator.hears(node.id, "prepared", epoch=ring.epoch)
    for node in ring.nodes:
        commit = membership_pb2.CommitEpoch(ring="demo-0", epoch=ring.epoch)
        ring.coordinator.send(node.id, commit=commit)
    assert "CARRIER_FROZEN" in await faults(ring)
    await eventually(lambda: not children_of("sealring.node.carrier.main"))
    freeze(daemon_engine.EngineProcess, "open_epoch")
    ring.prepare()
    assert "ENGINE_FROZEN" in await faults(ring)


@on_two
async def test_a_node_that_stops_says_so(kept_bed: Any, time_for_goodbyes: None) -> None:
    ring = kept_bed
    await ring.form()
    gateway = await ring.attach()
    await ring.nodes[1].end()
    node = ring.nodes[1].id
    fault = await ring.coordinator.hears(node, "fault")
    assert fault.problem.reason == "NODE_STOPPING"
    assert (await ring.coordinator.hears(node, "goodbye")).reason == "stopping"
    assert (await gateway.next(gateway.calls[1])).WhichOneof("message") == "goodbye"
    assert (await ring.coordinator.hears(ring.nodes[0].id, "fault")).problem.reason
    await gateway.close()
    ring.nodes[1].start(ring.coordinator, b"")
    await ring.coordinator.hears(node, "hello")


@on_two
async def test_the_coordinator_may_be_away(kept_bed: Any) -> None:
    ring = kept_bed
    await ring.form()
    await ring.coordinator.stop()
    gateway = await ring.attach()
    assert await gateway.generate(QUESTION, 8)
    await ring.coordinator.start()
    for node in ring.nodes:
        hello = await ring.coordinator.hears(node.id, "hello")
        assert hello.roster_version == ring.roster.version
        (serving,) = hello.serving
        assert (serving.prepared.epoch, serving.prepared.max_rows) == (ring.epoch, 4)
    await ring.coordinator.hears(ring.nodes[0].id, "heartbeat")
    assert await gateway.step(changes=[]) is None
    await gateway.close()


@on_two
async def test_an_expired_roster_closes_open_links(
    kept_bed: Any, children_of: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = kept_bed
    await ring.form()
    with monkeypatch.context() as late:
        late.setattr("sealring.mesh.roster.model.SKEW_SECONDS", -600)
        assert "ROSTER_EXPIRED" in await faults(ring)
        await eventually(lambda: not children_of("sealring.node.carrier.main"))


@on_one
async def test_a_ring_that_is_gone_from_the_roster_is_unloaded(
    kept_bed: Any, children_of: Any, eventually: Any
) -> None:
    ring = kept_bed
    for ended in (False, True):
        await ring.send_roster()
        await ring.form()
        if ended:
            await ring.end()
        await ring.send_roster(ring=[], members=[node.party for node in ring.nodes])
        await eventually(lambda: not children_of("sealring.node.engine.main"))


async def refused(ring: Any, make_gateway: Any, party: Any, **attach: Any) -> grpc.StatusCode:
    gateway = make_gateway(party)
    try:
        await gateway.attach(ring.nodes[:1], attach.get("epoch", ring.epoch))
    except grpc.RpcError as error:
        return error.code()
    except EOFError as end:
        return end.args[0]
    finally:
        await gateway.close()
    raise AssertionError("it was let in")


async def let_in(ring: Any, make_gateway: Any) -> Any:
    """A gateway, or None while the one before it has not been noticed to be gone."""
    gateway = make_gateway(ring.gateway_party)
    try:
        await gateway.attach(ring.nodes, ring.epoch)
    except (grpc.RpcError, EOFError):
        await gateway.close()
        return None
    return gateway


@on_one
async def test_who_may_schedule(make_gateway: Any, kept_bed: Any) -> None:
    ring = kept_bed
    await ring.form()
    good = ring.gateway_party
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert await refused(ring, make_gateway, ring.cluster.party(Role.GATEWAY)) is denied
    assert await refused(ring, make_gateway, ring.nodes[0].party) is denied
    assert await refused(ring, make_gateway, ring.cluster.party(Role.OPERATOR)) is denied
    missing = grpc.StatusCode.FAILED_PRECONDITION
    assert await refused(ring, make_gateway, good, epoch=ring.epoch + 1) is missing
    first = await ring.attach()
    guest = make_gateway(good)
    assert [one.guest for one in await guest.attach(ring.nodes, ring.epoch)] == [True]
    await first.close()
    assert (await guest.next(guest.calls[0])).goodbye.reason == "NOBODY_SCHEDULES"
    await guest.close()
    async with asyncio.timeout(200):
        while (second := await let_in(ring, make_gateway)) is None:
            pass
    assert await second.generate(QUESTION, 4)
    await ring.send_roster(gateways=[])
    assert await faults(ring) == {"GATEWAY_REMOVED"}
    assert (await second.next(second.calls[0])).fault.problem.reason == "GATEWAY_REMOVED"
    await second.close()


@on_one
async def test_a_step_that_does_not_follow_ends_the_epoch(kept_bed: Any) -> None:
    ring = kept_bed
    await ring.form()
    gateway = await ring.attach()
    gateway.number = 7
    await gateway.step()
    assert await faults(ring) == {"BAD_STEP"}
    assert (await gateway.next(gateway.calls[0])).fault.problem.reason == "BAD_STEP"
    await gateway.close()


@on_one
async def test_two_rosters_of_one_version_are_refused_and_reported(kept_bed):
    bed = kept_bed
    first, held = bed.nodes[0], bed.roster
    bed.cluster.version -= 1
    await bed.send_roster(context=64)
    report = await bed.coordinator.hears(first.id, "roster_seen", version=held.version)
    assert report.hash == held.hash != bed.roster.hash
    bed.cluster.previous = held.hash
