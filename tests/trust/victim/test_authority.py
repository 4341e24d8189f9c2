"""The certificate authority's key is stolen: certificates for any name, and no identity key."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from attackertest import attack_with, attacker, lines, nodes, serves_on
from leaftest import material
from ringtest import CLUSTER, LIMIT_SECONDS, Ring, chat

from sealring.mesh.member import load_machine_state, save_tls
from sealring.mesh.pki import ClusterCA

pytestmark = CLUSTER


def authority(ring: Ring) -> Path:
    """The folder of the authority's key, as a thief would have it."""
    return ring.cluster.state_dir / "coordinator"


def minted(ring: Ring, folder: Path, who: str) -> Path:
    """State with somebody's name under a certificate that the stolen key has made, without identity key."""
    genuine = ring.cluster.state_dir / who
    state = load_machine_state(genuine)
    ca = ClusterCA.load(authority(ring))
    shutil.copy(genuine / "member.json", folder / "member.json")
    save_tls(folder, material(ca, state.peer, addresses=("127.0.0.1",)))
    return folder


@pytest.mark.parametrize("who", ["node-0", "gateway"])
@pytest.mark.parametrize("prove", [True, False], ids=["another key", "no proof"])
async def test_a_minted_certificate_opens_nothing(
    victim: Ring, tmp_path: Path, who: str, prove: bool
) -> None:
    """Every method of every port. The genuine one's streams stay as they are, and so does the epoch."""
    before = await victim.serving()
    online = {node.id: node.state for node in (await nodes(victim)).values()}
    # A link waits for an epoch that nobody has heard of yet: its handshake is not answered at all.
    tried = await attack_with(victim, minted(victim, tmp_path, who), prove=prove, handshake_seconds=3.0)
    handshakes = [one for one in tried if one["method"].endswith("Handshake")]
    assert [one for one in tried if (one["answers"] or one["code"] == "OK") and one not in handshakes] == []
    refused = {
        one["method"].rpartition("/")[2] for one in tried if one["reason"] in ("NO_PROOF", "BAD_PROOF")
    }
    assert refused == ({"Session"} if who == "node-0" else {"Follow", "Schedule"})
    expected = "BAD_PROOF" if prove else "NO_PROOF"
    assert {one["reason"] for one in tried if one["method"].rpartition("/")[2] in refused} >= {expected}
    assert {node.id: node.state for node in (await nodes(victim)).values()} == online
    await serves_on(victim, before.epoch)


async def test_nobody_believes_who_poses_as_the_coordinator(victim: Ring) -> None:
    """Its refusal would have ended daemons and gateway for good. It hears offers and nothing else."""
    cluster = victim.cluster
    processes = {name: pid for name, pid in cluster.processes.items() if name != "coordinator"}
    before = await victim.serving()
    await cluster.children.kill_one("coordinator")
    arguments = {
        "authority": str(authority(victim)),
        "cluster": load_machine_state(cluster.operator_bundle).peer.cluster,
        "address": cluster.address("coordinator"),
    }
    for how in ("refuse", "no proof", "wrong proof"):
        heard: list[tuple[str, str]] = []
        async with attacker("pose", **arguments, how=how) as process, asyncio.timeout(LIMIT_SECONDS):
            async for line in lines(process):
                if "heard" in line:
                    heard.append((line["purpose"], line["heard"]))
                if heard.count(("SESSION", "offer")) >= 2 and heard.count(("WATCH", "offer")) >= 1:
                    break
            assert (await victim.ask(chat("What is the capital of France?"), 20)).completion_tokens > 0
        assert set(heard) == {("SESSION", "offer"), ("WATCH", "offer")}
        assert {name: pid for name, pid in cluster.processes.items() if name != "coordinator"} == processes
    await cluster.start_one("coordinator")
    await cluster.wait_for_coordinator()
    assert (await victim.serving()) == before
