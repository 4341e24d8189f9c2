import asyncio
from typing import Any

import pytest

from sealring.mesh.errors import PermissionDenied
from sealring.mesh.member import load_machine_state, save_tls

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

texts: dict[str, str] = {}


@pytest.mark.parametrize("size", [1, 2])
async def test_a_ring_answers(make_bed: Any, children_of: Any, eventually: Any, size: int) -> None:
    """Rings of three are those of tests/integration."""
    ring = await make_bed(size)
    await ring.deploy()
    await ring.form()
    assert len(children_of("sealring.node.carrier.main")) == (size if size > 1 else 0)
    gateway = await ring.attach()
    text = await gateway.generate("What is the capital of France?", 24)
    assert text
    assert texts.setdefault("answer", text) == text
    await gateway.close()
    for node in ring.nodes:
        fault = await ring.coordinator.hears(node.id, "fault", epoch=ring.epoch)
        assert fault.problem.reason in {"GATEWAY_GONE", "PEER_LOST", "CHILD_ENDED"}
    await eventually(lambda: not children_of("sealring.node.carrier.main"))
    engines = {process.pid for process in children_of("sealring.node.engine.main")}
    await ring.form()
    assert {process.pid for process in children_of("sealring.node.engine.main")} == engines
    await ring.end(unload=True)
    await eventually(lambda: not children_of("sealring.node.engine.main"))


async def test_a_node_serves_rings_that_leave_each_other_alone(
    make_bed: Any, children_of: Any, eventually: Any
) -> None:
    ring = await make_bed(1, memory_limit=1 << 30)
    node, coordinator = ring.nodes[0].id, ring.coordinator
    await ring.deploy()
    await ring.send_roster(deployments=("demo", "small"))
    await ring.form()
    (engine,) = children_of("sealring.node.engine.main")
    gateway, epoch = await ring.attach(), ring.epoch
    await ring.form("small-0")
    while len((beat := await coordinator.hears(node, "heartbeat")).rings) < 2:
        pass
    assert {one.ring: one.epoch for one in beat.rings} == {"demo-0": epoch, "small-0": ring.epoch}
    assert beat.memory_total >= beat.memory_used > 1.5 * max(one.engine_memory for one in beat.rings)
    assert (beat.memory_usable, beat.memory_overhead >= 512 << 20) == (1 << 30, True)
    assert (beat.longest_chunk, beat.computes_on) == (256, "CPU")
    (other,) = {one.pid: one for one in children_of("sealring.node.engine.main") if one != engine}.values()
    other.kill()
    fault = await coordinator.hears(node, "fault")
    assert (fault.ring, fault.epoch, fault.problem.reason) == ("small-0", ring.epoch, "CHILD_ENDED")
    assert await gateway.generate("What is the capital of France?", 8)
    await ring.form("small-0")
    await ring.send_roster(deployments=("demo",))
    await eventually(lambda: children_of("sealring.node.engine.main") == [engine])
    assert await gateway.generate("What is the capital of France?", 8, row=2)
    await gateway.close()


async def test_a_certificate_is_renewed_at_half_life(make_bed: Any, eventually: Any, cluster: Any) -> None:
    ring = await make_bed(1)
    node = ring.nodes[0]
    await node.end()
    aged = cluster.material(node.party.peer, age=2000)
    save_tls(node.folder, aged)
    before = (node.folder / "tls.pem").read_bytes()
    node.start(ring.coordinator, b"")
    await eventually(lambda: (node.folder / "tls.pem").read_bytes() != before)
    load_machine_state(node.folder)
    await ring.coordinator.hears(node.id, "hello")


async def test_a_node_out_of_the_roster_drops_everything(make_bed: Any, children_of: Any) -> None:
    ring = await make_bed(2)
    await ring.deploy()
    await ring.form()
    stays, goes = ring.nodes
    await ring.send_roster(ring=[stays.party], members=[stays.party], revoked=[goes.party])
    with pytest.raises(PermissionDenied) as raised:
        async with asyncio.timeout(200):
            await goes.task
    assert raised.value.reason == "REMOVED"
    assert len(children_of("sealring.node.engine.main")) <= 1
    assert not (goes.folder / "roster.dsse").exists()
    ring.coordinator.refusal = PermissionDenied("not enrolled any more", reason="NOT_ENROLLED")
    goes.start(ring.coordinator, b"")
    with pytest.raises(PermissionDenied):
        async with asyncio.timeout(200):
            await goes.task
