"""Challenges end to end: members that pass, that are evicted at once, and after three failures."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import appletest
import pytest
import storekit
import structlog
from appletest import SERIAL, DeviceAuthority
from patience import until

from sealring.coordinator.members.challenges import Challenges
from sealring.coordinator.settings import CoordinatorSettings
from sealring.mesh.crypto import KeyType, Label, SoftwareSigner
from sealring.mesh.errors import (
    FailedPrecondition,
    InvalidInput,
    PermissionDenied,
    RosterError,
    SealringError,
)
from sealring.mesh.member import IDENTITY_KEY
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import admin_pb2, membership_pb2
from tests.coordinator.conftest import DOWN, SERVING, Cluster, FakeNode, deploy, ring_state

GOOD = dataclasses.replace(appletest.GOOD, serial=SERIAL)


OTHER = b"\x01" * 32


class EnclaveStandIn(SoftwareSigner):
    """Says that its key is in an enclave, which is all that a coordinator can see of one."""

    key_type = KeyType.SECURE_ENCLAVE


async def challenge(cluster: Cluster, node: FakeNode) -> None:
    """Challenge a node now, after what is under way."""
    await until(lambda: count(node) > 0 and not cluster.coordinator.challenges.open)
    cluster.coordinator.challenges.online(node.id)


def count(node: FakeNode) -> int:
    return sum(message.WhichOneof("message") == "challenge" for message in node.messages)


def enrolled(cluster: Cluster, node: FakeNode) -> bool:
    return cluster.coordinator.store.members.find(node.id) is not None


def audit(cluster: Cluster, action: str) -> list[dict[str, str]]:
    entries = cluster.coordinator.store.audit.entries(after=0, limit=1000)
    return [dict(entry.details) for entry in entries if entry.action == action]


async def enclave_node(
    cluster: Cluster, name: str, chain: Callable[[bytes], tuple[bytes, ...]] | None = None, **said: Any
) -> FakeNode:
    """A node whose key says that it is in an enclave, with a good posture."""
    folder = cluster.folder / name
    signer = EnclaveStandIn.load_or_create(folder / IDENTITY_KEY)
    brings: dict[str, Any] = {"posture": GOOD} | said
    if chain is not None:
        brings["device_chain"] = chain(signer.public_key)
    await cluster.join(name, signer=signer, **brings)
    node = FakeNode(folder, cluster.coordinator.main_address())
    node.signer = signer
    node.said = {"posture": brings["posture"]}
    cluster.nodes.append(node)
    await node.start()
    return node


def trust_of(cluster: Cluster, node: FakeNode) -> tuple[TrustLevel, int]:
    listed = cluster.coordinator.publisher.listed(node.id)
    assert listed is not None
    return listed.level, listed.trust


async def test_a_session_begins_with_a_challenge_and_more_follow(
    start_cluster: Callable[..., Awaitable[Cluster]],
) -> None:
    cluster = await start_cluster(challenge_interval=1)
    node = await cluster.node("alpha")
    await until(lambda: count(node) >= 3)
    nonces = {message.challenge.nonce for message in node.messages if message.HasField("challenge")}
    assert len(nonces) == count(node)
    assert {len(nonce) for nonce in nonces} == {32}
    assert enrolled(cluster, node)


async def test_when_it_was_challenged_stands_in_the_next_roster(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await until(lambda: count(node) > 0 and not cluster.coordinator.challenges.open)
    first = node.roster.member(node.id).challenged_at
    await until(lambda: time.time() >= first + 1)
    await challenge(cluster, node)
    await until(lambda: not cluster.coordinator.challenges.open)
    cluster.coordinator.publisher.publish()
    await until(lambda: node.roster.member(node.id).challenged_at > first)
    assert node.roster.member(node.id).attested_at <= first


async def test_an_updated_node_stays_a_member(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await deploy(cluster, stages=1)
    await ring_state(cluster, SERVING)
    before = node.roster.member(node.id)
    await node.stop()
    again = await started(cluster, "alpha", manifest_hash=OTHER)
    await until(lambda: again.roster.member(node.id).manifest_hash == OTHER)
    after = again.roster.member(node.id)
    assert (after.level, after.trust) == (TrustLevel.SOFTWARE, 10)
    assert after.attestation_hash != before.attestation_hash
    (entry,) = audit(cluster, "reattest_node")
    assert (entry["manifest"], entry["before"]) == (OTHER.hex(), bytes(32).hex())
    assert (await ring_state(cluster, SERVING, epoch=2)).epoch == 2
    assert (await shown(cluster, node)).manifest == OTHER.hex()


async def test_software_that_changes_while_it_runs_is_trusted_no_more(cluster: Cluster) -> None:
    """Also when it is put back: what runs may be what was there in between."""
    node = await cluster.node("alpha")
    await deploy(cluster, stages=1)
    await ring_state(cluster, SERVING)
    for manifest in (OTHER, bytes(32)):
        node.said = {"manifest_hash": manifest}
        await challenge(cluster, node)
        await until(lambda: not cluster.coordinator.challenges.open)
        await until(lambda: trust_of(cluster, node) == (TrustLevel.NONE, 0))
    await node.wait_for("end", lambda end: end.epoch == 1)
    assert len(audit(cluster, "distrust_node")) == 1
    assert (enrolled(cluster, node), failures(cluster, node)) == (True, 0)
    assert "changed while it ran" in (await shown(cluster, node)).trouble
    assert "changed while it ran" in (await ring_state(cluster, DOWN)).reason
    await node.stop()
    await started(cluster, "alpha", manifest_hash=OTHER)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.SOFTWARE, 10))
    await ring_state(cluster, SERVING, epoch=2)


async def test_only_allowed_software_serves(start_cluster: Callable[..., Awaitable[Cluster]]) -> None:
    cluster = await start_cluster(allowed_manifests=[bytes(32).hex()])
    with pytest.raises(PermissionDenied) as caught:
        await cluster.join("beta", manifest_hash=OTHER)
    assert caught.value.metadata["cause"] == "MANIFEST_NOT_ALLOWED"
    assert OTHER.hex() in caught.value.message
    node = await cluster.node("alpha")
    await deploy(cluster, stages=1)
    await ring_state(cluster, SERVING)
    await node.stop()
    again = await started(cluster, "alpha", answers=False)
    await again.wait_for("challenge")
    assert (await ring_state(cluster, DOWN)).reason == "alpha is offline", "it has not proved what it runs"
    assert not again.running
    again.said = {"manifest_hash": OTHER}
    again.answers = True
    cluster.coordinator.challenges.online(again.id)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.SOFTWARE, 0))
    assert OTHER.hex() in (await ring_state(cluster, DOWN)).reason
    assert OTHER.hex() in (await shown(cluster, node)).trouble
    assert enrolled(cluster, node)
    await again.stop()
    await started(cluster, "alpha")
    await ring_state(cluster, SERVING, epoch=2)
    assert trust_of(cluster, node) == (TrustLevel.SOFTWARE, 10)


async def shown(cluster: Cluster, node: FakeNode) -> admin_pb2.Node:
    """The node as operators see it."""
    answer = await cluster.call("ListNodes", admin_pb2.ListNodesRequest())
    return next(one for one in answer.nodes if one.id == node.id)


@pytest.mark.parametrize("protection", ["sip", "secure_boot"])
async def test_a_lost_protection_is_out_at_once(cluster: Cluster, protection: str) -> None:
    node = await enclave_node(cluster, "alpha")
    other = await cluster.node("beta")
    node.said = {"posture": dataclasses.replace(GOOD, **{protection: False})}
    await challenge(cluster, node)
    assert await node.ended_with() == "EVICTED"
    await until(lambda: node.id in {one.id for one in other.roster.revoked})
    assert audit(cluster, "evict_node") == [{"why": "PROTECTION_LOST"}]


async def test_what_a_distrusted_node_does_not_know_is_not_held_for_off(cluster: Cluster) -> None:
    """SIP that is off after a restart was on before, whatever was unknown in between."""
    node = await enclave_node(cluster, "alpha")
    await quiet(cluster, node)
    node.answers = True
    node.said = {"manifest_hash": OTHER, "posture": dataclasses.replace(GOOD, sip=None)}
    await challenge(cluster, node)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.NONE, 0))
    await node.stop()
    said = {"manifest_hash": OTHER, "posture": dataclasses.replace(GOOD, sip=False)}
    again = await started(cluster, "alpha", signer=node.signer, **said)
    assert await again.ended_with() == "EVICTED"
    assert audit(cluster, "evict_node") == [{"why": "PROTECTION_LOST"}]


async def does_not_know(cluster: Cluster, node: FakeNode, name: str, failed: int) -> None:
    """A challenge whose answer is that the node does not know `name`; it is the failure with that number."""
    await until(lambda: count(node) > 0 and not cluster.coordinator.challenges.open)
    node.said = {"posture": dataclasses.replace(GOOD, **{name: None})}
    await challenge(cluster, node)
    await until(lambda: failures(cluster, node) == failed and not cluster.coordinator.challenges.open)


@pytest.mark.parametrize("protection", ["sip", "secure_boot"])
async def test_an_unknown_protection_is_a_failed_challenge_and_out_at_the_third(
    cluster: Cluster, protection: str
) -> None:
    node = await enclave_node(cluster, "alpha")
    for failed in (1, 2):
        await does_not_know(cluster, node, protection, failed)
        assert trust_of(cluster, node) == (TrustLevel.SELF_SIGNED, 20)
    node.said = {"posture": GOOD}
    await challenge(cluster, node)
    await until(lambda: failures(cluster, node) == 0)
    for failed in (1, 2):
        await does_not_know(cluster, node, protection, failed)
    await challenge(cluster, node)
    assert await node.ended_with() == "EVICTED"
    assert audit(cluster, "evict_node") == [{"why": "PROTECTION_UNKNOWN"}]


@pytest.mark.parametrize("name", ["filevault", "chip"])
async def test_what_else_it_does_not_know_lowers_the_level_at_the_third_challenge(
    cluster: Cluster, name: str
) -> None:
    node = await enclave_node(cluster, "alpha")
    for failed in (1, 2):
        await does_not_know(cluster, node, name, failed)
        assert trust_of(cluster, node) == (TrustLevel.SELF_SIGNED, 20)
    await does_not_know(cluster, node, name, 0)
    assert trust_of(cluster, node) == (TrustLevel.SOFTWARE, 10)
    assert enrolled(cluster, node)


@pytest.mark.parametrize("protection", ["filevault", "authenticated_root"])
async def test_a_poorer_posture_lowers_level_and_score_at_once_and_comes_back(
    cluster: Cluster, protection: str
) -> None:
    node = await enclave_node(cluster, "alpha")
    assert trust_of(cluster, node) == (TrustLevel.SELF_SIGNED, 20)
    node.said = {"posture": dataclasses.replace(GOOD, **{protection: False})}
    await challenge(cluster, node)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.SOFTWARE, 10))
    node.said = {"posture": GOOD}
    await challenge(cluster, node)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.SELF_SIGNED, 20))


async def test_three_silent_failures_are_out(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await quiet(cluster, node)
    for failed in range(3):
        assert (enrolled(cluster, node), failures(cluster, node)) == (True, failed)
        await unanswered(cluster, node)
        overlook(cluster, node)
    error = await node.wait_closed()
    assert error is not None
    assert (error.reason, "SILENT" in error.hint) == ("EVICTED", True)
    assert not enrolled(cluster, node)


async def test_an_answer_in_between_forgives_two_failures(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    for _ in range(2):
        await quiet(cluster, node)
        for _ in range(2):
            await unanswered(cluster, node)
            overlook(cluster, node)
        assert failures(cluster, node) == 2
        node.answers = True
        await challenge(cluster, node)
        await until(lambda: failures(cluster, node) == 0)
    assert enrolled(cluster, node)


def overlook(cluster: Cluster, node: FakeNode) -> None:
    """Looks at the open challenge until it has failed."""
    before = failures(cluster, node)
    while failures(cluster, node) == before:
        cluster.coordinator.challenges.look()


def failures(cluster: Cluster, node: FakeNode) -> int:
    return cluster.coordinator.challenges.failures(node.id)


async def test_evidence_that_does_not_hold_is_a_failure(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await quiet(cluster, node)
    for changes, why in (
        ({"cluster": "other"}, "STATEMENT_MISMATCH"),
        ({"sealing_key": bytes(32)}, "STATEMENT_MISMATCH"),
        ({"identity_key": SoftwareSigner.generate().public_key}, "STATEMENT_MISMATCH"),
        ({"key_type": KeyType.SECURE_ENCLAVE}, "STATEMENT_MISMATCH"),
        ({"label": Label.ATTESTATION}, "STATEMENT_SIGNATURE"),
        ({"label": Label.JOIN}, "STATEMENT_SIGNATURE"),
    ):
        asked = await unanswered(cluster, node)
        with structlog.testing.capture_logs() as logs:
            await node.send(challenge_answer=node.answer(asked, **changes))
            await until(lambda: failures(cluster, node) == 1)
        assert why in {one["why"] for one in logs if one["event"] == "challenge_failed"}
        await node.send(challenge_answer=node.answer(await unanswered(cluster, node)))
        await until(lambda: failures(cluster, node) == 0)


@pytest.mark.parametrize("seconds", [-4000, 4000])
async def test_a_machine_whose_clock_is_wrong_stays_a_member(cluster: Cluster, seconds: int) -> None:
    """The nonce shows that it answers now. Three such answers in a row had it evicted for good."""
    node = await cluster.node("alpha")
    await quiet(cluster, node)
    for _ in range(4):
        asked = await unanswered(cluster, node)
        before = cluster.coordinator.store.members.find(node.id)
        await node.send(challenge_answer=node.answer(asked, timestamp=int(time.time()) + seconds))
        await until(lambda before=before: cluster.coordinator.store.members.find(node.id) != before)
        assert failures(cluster, node) == 0
    assert enrolled(cluster, node)


async def test_a_forged_answer_cannot_get_a_member_evicted_at_once(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await quiet(cluster, node)
    answer = node.answer(await unanswered(cluster, node), manifest_hash=b"\x01" * 32)
    answer.signature = SoftwareSigner.generate().sign(Label.CHALLENGE, answer.statement)
    await node.send(challenge_answer=answer)
    await until(lambda: failures(cluster, node) == 1)
    assert enrolled(cluster, node)


async def test_an_answer_to_another_challenge_is_no_answer(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await quiet(cluster, node)
    first = await unanswered(cluster, node)
    overlook(cluster, node)
    with structlog.testing.capture_logs() as logs:
        await node.send(challenge_answer=node.answer(first))
        second = await unanswered(cluster, node)
        for nonce in (first, bytes(32)):
            await node.send(challenge_answer=node.answer(nonce))
        await until(lambda: [one["event"] for one in logs].count("challenge_answered_late") == 3)
    assert (len(cluster.coordinator.challenges.open), failures(cluster, node)) == (1, 1)
    assert first != second
    assert enrolled(cluster, node)


async def quiet(cluster: Cluster, node: FakeNode) -> None:
    """Lets the first challenge be answered and no other."""
    await until(lambda: count(node) > 0 and not cluster.coordinator.challenges.open)
    node.answers = False


async def unanswered(cluster: Cluster, node: FakeNode) -> bytes:
    """The nonce of a new challenge."""
    before = count(node)
    await challenge(cluster, node)
    await until(lambda: count(node) > before)
    return bytes([one for one in node.messages if one.HasField("challenge")][-1].challenge.nonce)


@pytest.mark.parametrize("field", ["statement", "signature"])
async def test_an_oversized_answer_ends_the_session(cluster: Cluster, field: str) -> None:
    node = await cluster.node("alpha")
    await node.send(challenge_answer=membership_pb2.ChallengeAnswer(**{field: b"x" * 9000}))
    assert await node.ended_with() == "BAD_MESSAGE"


async def test_failing_in_mid_epoch_ends_it_and_recovery_needs_another(cluster: Cluster) -> None:
    nodes = [await cluster.node(name) for name in ("alpha", "beta")]
    await deploy(cluster, split=[5, 4])  # which one node alone does not take over
    assert (await ring_state(cluster, SERVING)).epoch == 1
    bad, good = nodes
    for posture in (GOOD, dataclasses.replace(GOOD, sip=False)):
        await until(lambda: not cluster.coordinator.challenges.open)
        bad.said = {"posture": posture}
        await challenge(cluster, bad)
    await good.wait_for("end", lambda end: end.epoch == 1)
    assert (await bad.wait_closed()) is not None
    await until(lambda: not good.roster.rings and bad.id in {one.id for one in good.roster.revoked})

    assert await cluster.refusal("alpha") == "NOT_ENROLLED"
    await cluster.join("alpha")
    back = await started(cluster, "alpha")
    status = await ring_state(cluster, SERVING, epoch=2)
    assert status.epoch == 2
    assert back.running == {"demo-0": 2}


async def test_a_model_whose_files_changed_is_distrusted_at_once(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await deploy(cluster, stages=1)
    await ring_state(cluster, SERVING)
    node.said = {"models": (bytes.fromhex("ab" * 32),)}
    await challenge(cluster, node)
    before = cluster.coordinator.store.members.get(node.id).evidence
    await until(lambda: cluster.coordinator.store.members.get(node.id).evidence != before)
    node.said = {"models": (bytes.fromhex("cd" * 32),)}
    await challenge(cluster, node)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.NONE, 0))
    assert audit(cluster, "distrust_node") == [{"why": "the model's files have changed"}]
    node.said = {}
    await challenge(cluster, node)
    await until(lambda: not cluster.coordinator.challenges.open)
    assert trust_of(cluster, node) == (TrustLevel.NONE, 0), "it was not started again"


async def test_stale_evidence_lowers_the_score_and_an_answer_restores_it(cluster: Cluster) -> None:
    node = await cluster.node("alpha")
    await deploy(cluster, stages=1)
    assert (await ring_state(cluster, SERVING)).epoch == 1
    member = cluster.coordinator.store.members.get(node.id)
    old = storekit.changed(member, challenged_at=int(time.time()) - 700)
    node.answers = False
    with cluster.coordinator.publisher.change():
        cluster.coordinator.store.members.save(old)
    await node.wait_for("end", lambda end: end.epoch == 1)
    assert trust_of(cluster, node) == (TrustLevel.SOFTWARE, 0)
    node.answers = True
    await challenge(cluster, node)
    await ring_state(cluster, SERVING, epoch=2)
    assert node.roster.ring("demo-0").min_trust == node.roster.min_trust == 10


async def test_a_chain_to_the_pinned_root_makes_hardware(
    start_cluster: Callable[..., Awaitable[Cluster]],
) -> None:
    apple = DeviceAuthority(time.time())
    cluster = await start_cluster(
        device_root=apple.root, trust_floor="self_signed", software_identity_allowed=False
    )
    node = await enclave_node(cluster, "alpha", apple.chain)
    assert trust_of(cluster, node) == (TrustLevel.HARDWARE, 30)
    plain = await enclave_node(cluster, "beta")
    assert trust_of(cluster, plain) == (TrustLevel.SELF_SIGNED, 20)
    await deploy(cluster, split=[5, 4])
    await until(lambda: bool(node.roster.rings))
    assert (node.roster.rings[0].min_trust, node.roster.min_trust) == (20, 20)
    node.said = {"posture": dataclasses.replace(GOOD, serial="C02OTHER")}
    await challenge(cluster, node)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.SELF_SIGNED, 20))
    node.said = {"posture": dataclasses.replace(GOOD, filevault=False)}
    await challenge(cluster, node)
    await until(lambda: trust_of(cluster, node) == (TrustLevel.SOFTWARE, 0))
    await until(lambda: not plain.roster.rings)


@pytest.mark.parametrize("how", ["other root", "other key", "another Mac", "two chains", "too long"])
async def test_a_chain_that_does_not_hold_refuses_the_join(
    start_cluster: Callable[..., Awaitable[Cluster]], how: str
) -> None:
    apple = DeviceAuthority(time.time())
    cluster = await start_cluster(device_root=apple.root, allowed_serials=["C02ALLOWED"])

    def chain(key: bytes) -> tuple[bytes, ...]:
        if how == "other root":
            return DeviceAuthority(time.time()).chain(key)
        if how == "other key":
            return apple.chain(SoftwareSigner.generate().public_key)
        if how == "another Mac":
            return apple.chain(key)
        return apple.chain(key) * 2 if how == "two chains" else (b"x" * 5000,)

    with pytest.raises(SealringError) as caught:
        await enclave_node(cluster, "alpha", chain)
    assert caught.value.reason == ("BAD_JOIN" if how == "too long" else "JOIN_REFUSED")


async def test_software_members_count_for_nothing_once_they_are_not_allowed(
    cluster: Cluster, start_cluster: Callable[..., Awaitable[Cluster]]
) -> None:
    await cluster.node("alpha")
    await deploy(cluster, stages=1)
    await ring_state(cluster, SERVING)
    await cluster.close()
    strict = await start_cluster(software_identity_allowed=False)
    node = await started(strict, "alpha")
    assert trust_of(strict, node) == (TrustLevel.SOFTWARE, 0)
    assert not node.roster.rings
    with pytest.raises((FailedPrecondition, RosterError)):
        spec = admin_pb2.DeploymentSpec(name="other", model="demo")
        await strict.call("CreateDeployment", admin_pb2.CreateDeploymentRequest(spec=spec))


async def started(
    cluster: Cluster, name: str, *, answers: bool = True, signer: Any = None, **said: Any
) -> FakeNode:
    """A session of an enrolled node that says something else from its first challenge on."""
    node = FakeNode(cluster.folder / name, cluster.coordinator.main_address())
    node.answers, node.said, node.signer = answers, said, signer or node.signer
    cluster.nodes.append(node)
    await node.start()
    return node


# Without a cluster


class Examiner:
    """Challenges to members `a` and `b` by a clock of the test; evicts nobody."""

    def __init__(self, **settings: Any) -> None:
        self.now, self.sent = 0.0, list[str]()
        self.evicted: list[tuple[str, str]] = []
        self.known: dict[str, Any] = {name: SimpleNamespace(id=name, name=f"node-{name}") for name in "ab"}
        unused: Any = None
        store: Any = SimpleNamespace(members=SimpleNamespace(find=self.known.get))
        sessions: Any = SimpleNamespace(send=lambda member, message: self.sent.append(member))
        expulsion: Any = SimpleNamespace(
            evict=lambda member, actor, why: self.evicted.append((member.id, why))
        )
        self.made = Challenges(
            *(store, sessions, unused, unused, expulsion),
            CoordinatorSettings(**settings),
            awake=lambda: self.now,
        )

    def look(self, times: int) -> None:
        for _ in range(times):
            self.made.look()


@pytest.mark.parametrize(("timeout", "looks"), [(3.0, 6), (30.0, 30), (6.5, 7)])
def test_a_silent_member_fails_after_enough_looks_and_is_asked_again_when_it_is_due(
    timeout: float, looks: int
) -> None:
    examiner = Examiner(challenge_timeout=timeout, challenge_interval=100)
    for member in "ab":
        examiner.made.online(member)
    examiner.look(looks)
    assert examiner.made.open == ["a", "b"]
    assert examiner.made.failures("a") == 0
    examiner.look(1)
    assert (examiner.made.open, examiner.made.failures("a"), examiner.made.failures("b")) == ([], 1, 1)
    examiner.made.left("b")
    examiner.now = 99.9
    examiner.look(1)
    assert examiner.sent == ["a", "b"]
    examiner.now = 100.0
    examiner.look(1)
    assert examiner.sent == ["a", "b", "a"]
    examiner.now = 1e6  # due again, while the answer is still awaited
    examiner.look(1)
    assert examiner.sent == ["a", "b", "a"]
    for _ in range(2):
        examiner.look(looks + 1)
    assert examiner.evicted == [("a", "SILENT")]


@pytest.mark.parametrize("seen", [0, 5], ids=["between two looks", "shortly before the end"])
def test_a_member_that_connects_anew_gets_no_more_time(seen: int) -> None:
    examiner = Examiner(challenge_timeout=3.0, challenge_interval=100)  # six looks
    for _ in range(3 * 7):
        examiner.made.online("a")
        examiner.look(seen)
        examiner.made.left("a")
    examiner.look(1)
    if not seen:  # failures are counted at looks: one for all of these streams
        assert examiner.made.failures("a") == 1
        return
    assert examiner.evicted[0] == ("a", "SILENT")


def test_a_machine_that_sleeps_fails_nothing_meanwhile() -> None:
    examiner = Examiner(challenge_timeout=3.0, challenge_interval=100)
    examiner.made.online("a")
    examiner.look(3)
    examiner.made.left("a")
    examiner.look(1000)
    assert (examiner.made.failures("a"), examiner.made.open) == (0, [])
    examiner.made.online("a")
    examiner.look(2)
    assert (examiner.made.failures("a"), examiner.made.open) == (0, ["a"])


def test_an_answer_that_cannot_be_read_is_a_failure_and_a_large_one_is_refused() -> None:
    examiner = Examiner()
    examiner.made.online("a")
    for statement, signature in ((8193, 0), (0, 73)):
        answer = membership_pb2.ChallengeAnswer(statement=bytes(statement), signature=bytes(signature))
        with pytest.raises(InvalidInput) as caught:
            examiner.made.answered("a", answer)
        assert caught.value.reason == "BAD_MESSAGE"
    assert (examiner.made.failures("a"), examiner.made.open) == (0, ["a"])
    examiner.made.answered("a", membership_pb2.ChallengeAnswer(statement=bytes(8192), signature=bytes(72)))
    assert (examiner.made.failures("a"), examiner.made.open) == (1, [])
