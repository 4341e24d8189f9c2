"""An attacker process against a serving cluster: certificates of another one, of its own, and stolen ones."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from attackertest import attack_with, attacker, lines, nodes, serves_on, status, targets
from ringtest import MODEL, Ring

from cli.cluster import LocalCluster
from mesh.certificates import ClusterCA, LeafKey, Role
from mesh.enrolment import enrol
from mesh.errors import SealringError
from mesh.identity import SoftwareSigner
from mesh.memberstate import load_member_state, save_tls
from mesh.suites import DEFAULT_SUITES
from mesh.tls import TlsMaterial
from sealring.v1 import admin_pb2, inference_pb2_grpc, membership_pb2

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("integration"),
    pytest.mark.asyncio(loop_scope="module"),
]
REVOKED_SECONDS = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def victim(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ring]:
    """A ring of two that serves, and one node more."""
    async with LocalCluster(tmp_path_factory.mktemp("victim") / "state", MODEL, nodes=3) as cluster:
        await cluster.start()
        deployment = await cluster.deploy(stages=2)
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            yield Ring(cluster, deployment, inference_pb2_grpc.InferenceStub(channel))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Another cluster of one node; its processes are there, its certificates are what counts."""
    folder = tmp_path_factory.mktemp("elsewhere") / "state"
    async with LocalCluster(folder, MODEL, nodes=1) as cluster:
        await cluster.start()
        yield cluster


def forged(folder: Path, genuine: Path) -> Path:
    """State with the names of a genuine one, under a certificate authority of the attacker's own."""
    state = load_member_state(genuine)
    ca = ClusterCA.create(folder / "ca", state.peer.cluster, now=time.time())
    leaf = LeafKey()
    certificate = ca.issue(leaf.csr(), state.peer, lifetime=3600, now=time.time(), addresses=("127.0.0.1",))
    material = TlsMaterial(leaf.private_pem(), certificate, (ca.certificate,))
    shutil.copy(genuine / "member.json", folder / "member.json")
    save_tls(folder, material)
    return folder


async def test_every_link_of_a_serving_ring_shook_hands(victim: Ring) -> None:
    """The suites are those that the carriers' keys came with: the handshake is on the real path."""
    links = (await status(victim)).links
    assert {(link.from_rank, link.to_rank) for link in links} == {(0, 1), (1, 0)}
    assert {link.suite for link in links} <= {suite.value for suite in DEFAULT_SUITES[:2]}


@pytest.mark.parametrize("who", ["node-0", "gateway", "coordinator/operator"])
async def test_credentials_of_another_cluster_open_nothing(
    victim: Ring, elsewhere: LocalCluster, who: str
) -> None:
    epoch = (await status(victim)).epoch
    tried = await attack_with(victim, elsewhere.state_dir / who)
    assert len(tried) == 9 * 5
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []
    on_mutual_tls = {one["code"] for one in tried if one["target"] != victim.cluster._address("join")}
    assert on_mutual_tls == {"UNAVAILABLE"}, "the TLS handshake itself has to fail"
    await serves_on(victim, epoch)


@pytest.mark.parametrize("who", ["node-0", "gateway", "coordinator/operator"])
async def test_the_right_names_under_a_wrong_authority_open_nothing(
    victim: Ring, tmp_path: Path, who: str
) -> None:
    genuine = victim.cluster.state_dir / who
    tried = await attack_with(victim, forged(tmp_path, genuine))
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []


async def test_a_token_of_another_cluster_is_refused(
    victim: Ring, elsewhere: LocalCluster, tmp_path: Path
) -> None:
    """As it is it does not match the root; with the victim's root in it, the coordinator does not know it."""
    theirs = await elsewhere._token("ROLE_GATEWAY")
    ours = await victim.cluster._token("ROLE_GATEWAY")
    mixed = ".".join([*ours.split(".")[:2], *theirs.split(".")[2:]])
    for number, (token, reason) in enumerate(((theirs, None), (mixed, "JOIN_REFUSED"))):
        with pytest.raises(SealringError) as error:
            await enrol(
                coordinator=victim.cluster._address("join"),
                token=token,
                role=Role.GATEWAY,
                signer=SoftwareSigner.generate(),
                state_dir=tmp_path / str(number),
                name="intruder",
            )
        assert reason is None or error.value.reason == reason
        assert not (tmp_path / str(number)).exists()


async def test_an_evicted_nodes_keys_open_nothing_and_its_streams_close(victim: Ring, tmp_path: Path) -> None:
    """Its certificate is valid for a day; its identity key signs what it likes."""
    spare = next(node for node in (await nodes(victim)).values() if not node.ring)
    stolen = tmp_path / "stolen"
    shutil.copytree(victim.cluster.state_dir / spare.name, stolen)
    await victim.cluster.kill_node(spare.name)
    now = await status(victim)
    await evicted_while_open(victim, stolen, spare.id, ("Session", "Handshake"), "BanNode")
    tried = await attack_with(victim, stolen)
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []
    in_ring = [node for node in (await nodes(victim)).values() if node.ring]
    reached = {address for node in in_ring for address in node.addresses}
    handshakes = [one for one in tried if "Handshake" in one["method"] and one["target"] in reached]
    assert len(handshakes) >= len(in_ring) == 2
    assert {one["code"] for one in handshakes} == {"PERMISSION_DENIED"}
    assert max(one["seconds"] for one in handshakes) < REVOKED_SECONDS
    await serves_on(victim, now.epoch)


async def test_a_removed_gateways_keys_open_nothing_and_its_streams_close(
    victim: Ring, tmp_path: Path
) -> None:
    """It schedules the ring when it is thrown out."""
    stolen = tmp_path / "stolen"
    shutil.copytree(victim.cluster.state_dir / "gateway", stolen)
    identifier = load_member_state(stolen).peer.id
    await victim.cluster.kill_node("gateway")
    await settled(victim)
    before = await status(victim)
    ended = await evicted_while_open(victim, stolen, identifier, ("Follow", "Schedule"), "EvictNode")
    assert sum("Schedule" in one["ended"] for one in ended) >= 2
    tried = await attack_with(victim, stolen)
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []
    assert (await settled(victim)).epoch <= before.epoch + 1


async def settled(ring: Ring) -> Any:
    """The ring's status when it serves and has done so for a moment."""
    seen = None
    async with asyncio.timeout(60):
        while True:
            now = await status(ring)
            key = (now.epoch, now.phase)
            if now.phase == membership_pb2.RING_PHASE_SERVING and key == seen:
                return now
            seen = key
            await asyncio.sleep(1)


async def evicted_while_open(
    ring: Ring, stolen: Path, identifier: str, methods: tuple[str, ...], how: str
) -> list[dict[str, Any]]:
    """Opens streams with stolen keys, throws their owner out, and requires that all of them end in time."""
    now = await status(ring)
    arguments = {
        "state": str(stolen),
        "authorities": str(ring.cluster.operator_bundle / "ca.pem"),
        "targets": await targets(ring),
        "cluster": load_member_state(stolen).peer.cluster,
        "ring": now.ring,
        "epoch": now.epoch,
        "methods": methods,
    }
    async with attacker("hold", **arguments) as process:
        events = lines(process)
        opened: set[tuple[str, str]] = set()
        ended: list[dict[str, Any]] = []
        thrown_out = 0.0
        async for event in events:
            if "opened" in event or "answer" in event:
                opened.add((event.get("opened") or event["answer"], event["target"]))
            elif "ended" in event:
                ended.append(event)
            if not thrown_out and event.get("answer", "").endswith(methods[0]):
                await asyncio.sleep(1)
                thrown_out = time.time()
                request = getattr(admin_pb2, f"{how}Request")(id=identifier)
                await ring.cluster.admin.call(how, request)
    assert thrown_out
    after = [one for one in ended if one["at"] > thrown_out]
    assert any(methods[0] in one["ended"] for one in after), "nothing was open when it was thrown out"
    assert {one["code"] for one in after} <= {"PERMISSION_DENIED", "UNAVAILABLE", "OK"}
    assert max(one["at"] for one in after) - thrown_out < REVOKED_SECONDS
    return after
