"""An attacker process against a serving cluster: certificates of another one, of its own, and stolen ones."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from attackertest import attack_with, attacker, lines, nodes, replaced, serves_on, targets
from leaftest import material
from refusals import refused
from ringtest import CLUSTER, LIMIT_SECONDS, MODEL, Ring

from sealring.cli.local.cluster import LocalCluster
from sealring.mesh.crypto import DEFAULT_SUITES, SoftwareSigner
from sealring.mesh.errors import Unavailable
from sealring.mesh.member import (
    IDENTITY_KEY,
    JoinToken,
    enrol,
    load_machine_state,
    renew_by_identity,
    save_tls,
)
from sealring.mesh.pki import ClusterCA, LeafKey, Role
from sealring.v1 import membership_pb2

pytestmark = CLUSTER


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    """Another cluster: its coordinator is there, and the certificates of a node and a gateway."""
    folder = tmp_path_factory.mktemp("elsewhere") / "state"
    async with LocalCluster(folder, MODEL, nodes=1) as cluster:
        cluster.write_configs()
        await cluster.start_coordinator()
        await cluster.enrol_all()
        yield cluster


def forged(folder: Path, genuine: Path) -> Path:
    """State with the names of a genuine one, under a certificate authority of the attacker's own."""
    state = load_machine_state(genuine)
    ca = ClusterCA.create(folder / "ca", state.peer.cluster, now=time.time())
    shutil.copy(genuine / "member.json", folder / "member.json")
    save_tls(folder, material(ca, state.peer, addresses=("127.0.0.1",)))
    return folder


async def test_every_link_of_a_serving_ring_shook_hands(victim: Ring) -> None:
    """The suite is the one that the carriers' keys came with: the handshake is on the real path."""
    links = (await victim.status()).links
    assert {(link.from_rank, link.to_rank) for link in links} == {(0, 1), (1, 0)}
    assert {link.suite for link in links} == {DEFAULT_SUITES[0].value}


@pytest.mark.parametrize("who", ["node-0", "gateway", "coordinator/operator"])
async def test_credentials_of_another_cluster_open_nothing(
    victim: Ring, elsewhere: LocalCluster, who: str
) -> None:
    epoch = (await victim.status()).epoch
    tried = await attack_with(victim, elsewhere.state_dir / who)
    assert len(tried) == 9 * 5
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []
    on_mutual_tls = {one["code"] for one in tried if one["target"] != victim.cluster.address("join")}
    assert on_mutual_tls == {"UNAVAILABLE"}, "the TLS handshake itself has to fail"
    await serves_on(victim, epoch)


@pytest.mark.parametrize("who", ["node-0", "gateway", "coordinator/operator"])
async def test_the_right_names_under_a_wrong_authority_open_nothing(
    victim: Ring, tmp_path: Path, who: str
) -> None:
    genuine = victim.cluster.state_dir / who
    tried = await attack_with(victim, forged(tmp_path, genuine))
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []


async def enrolled(token: str, folder: Path) -> None:
    """Tries to join as an intruder, until the coordinator has answered: others may flood it just now."""
    while True:
        try:
            await enrol(
                token=token,
                role=Role.GATEWAY,
                signer=SoftwareSigner.generate(),
                state_dir=folder,
                name="intruder",
            )
        except Unavailable:
            await asyncio.sleep(0.5)
        else:
            return


async def test_a_token_of_another_cluster_is_refused(
    victim: Ring, elsewhere: LocalCluster, tmp_path: Path
) -> None:
    """As it is it does not match the root; with the victim's root in it, the coordinator does not know it."""
    theirs = JoinToken.parse(await elsewhere.join_token("ROLE_GATEWAY"))
    ours = JoinToken.parse(await victim.cluster.join_token("ROLE_GATEWAY"))
    as_it_is = dataclasses.replace(theirs, addresses=ours.addresses)
    mixed = dataclasses.replace(as_it_is, root_sha256=ours.root_sha256)
    for number, (token, reason) in enumerate(((as_it_is, "ROOT_PIN"), (mixed, "JOIN_REFUSED"))):
        with refused(reason):
            await enrolled(token.format(), tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()


async def test_an_evicted_nodes_keys_open_nothing_and_its_streams_close(victim: Ring, tmp_path: Path) -> None:
    """Its certificate is valid for a day; its identity key signs what it likes."""
    spare = next(node for node in (await nodes(victim)).values() if not node.rings)
    stolen = tmp_path / "stolen"
    steal(victim.cluster.state_dir / spare.name, stolen)
    await victim.cluster.children.kill_one(spare.name)
    now = await victim.status()
    await evicted_while_open(victim, stolen, spare.id, ("Session", "Handshake"), "BanNode")
    tried = await attack_with(victim, stolen)
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []
    pin, signer = load_machine_state(stolen).root_sha256, SoftwareSigner.load(stolen / IDENTITY_KEY)
    answer = await renew_by_identity([victim.cluster.address("join")], pin, signer, LeafKey().csr())
    assert not answer.certificate_chain
    in_ring = [node for node in (await nodes(victim)).values() if node.rings]
    reached = {address for node in in_ring for address in node.addresses}
    handshakes = [one for one in tried if "Handshake" in one["method"] and one["target"] in reached]
    assert len(handshakes) >= len(in_ring) == 2
    assert {one["code"] for one in handshakes} == {"PERMISSION_DENIED"}
    await serves_on(victim, now.epoch)
    await replaced(victim, spare.name)


async def test_a_removed_gateways_keys_open_nothing_and_its_streams_close(
    victim: Ring, tmp_path: Path
) -> None:
    """It schedules the ring when it is thrown out."""
    stolen = tmp_path / "stolen"
    steal(victim.cluster.state_dir / "gateway", stolen)
    identifier = load_machine_state(stolen).peer.id
    scheduled = await victim.serving()
    await victim.cluster.children.kill_one("gateway")
    before = await formed(victim, scheduled.epoch + 1)
    ended = await evicted_while_open(victim, stolen, identifier, ("Follow", "Schedule"), "EvictNode")
    assert sum("Schedule" in one["ended"] for one in ended) >= 2
    tried = await attack_with(victim, stolen)
    assert [one for one in tried if one["answers"] or one["code"] == "OK"] == []
    await replaced(victim, "gateway")
    assert (await victim.serving()).epoch <= before.epoch + 2, (
        "one that the thief ended, one for the new gateway"
    )


def steal(state: Path, stolen: Path) -> None:
    """Copies a living process's state. A file being written has a name with a dot."""
    shutil.copytree(state, stolen, ignore=shutil.ignore_patterns(".*"))


async def formed(ring: Ring, epoch: int) -> Any:
    """The ring's status when it has formed this epoch or a later one, whether a gateway is there or not."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while (now := await ring.status()).epoch < epoch or now.phase != membership_pb2.RING_PHASE_SERVING:
            await asyncio.sleep(0.1)
    return now


async def evicted_while_open(
    ring: Ring, stolen: Path, identifier: str, methods: tuple[str, ...], how: str
) -> list[dict[str, Any]]:
    """Opens streams with stolen keys, throws their owner out, and returns when all of them have ended."""
    now = await ring.status()
    arguments = {
        "state": str(stolen),
        "authorities": str(ring.cluster.operator_bundle.parent / "ca.pem"),
        "targets": await targets(ring),
        "cluster": load_machine_state(stolen).peer.cluster,
        "ring": now.ring,
        "epoch": now.epoch,
        "methods": methods,
    }
    async with attacker("hold", **arguments) as process:
        events = lines(process)
        opened: set[tuple[str, str]] = set()
        ended: list[dict[str, Any]] = []
        thrown_out, answered = 0.0, False
        async for event in events:
            if "opened" in event or "answer" in event:
                opened.add((event.get("opened") or event["answer"], event["target"]))
            elif "ended" in event:
                ended.append(event)
            begun = opened | {(one["ended"], one["target"]) for one in ended}
            answered |= event.get("answer", "").endswith(methods[0])
            if not thrown_out and answered and len(begun) == len(methods) * len(arguments["targets"]):
                thrown_out = time.time()
                await ring.cluster.admin.call(how, id=identifier)
    assert thrown_out
    after = [one for one in ended if one["at"] > thrown_out]
    assert any(methods[0] in one["ended"] for one in after), "nothing was open when it was thrown out"
    # FAILED_PRECONDITION: its epoch is over. UNIMPLEMENTED: that port has no such method, and said so late.
    refused = {"PERMISSION_DENIED", "UNAVAILABLE", "OK", "FAILED_PRECONDITION", "UNIMPLEMENTED"}
    assert {one["code"] for one in after} <= refused
    return after
