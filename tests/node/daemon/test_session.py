import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import structlog
from prooftest import answer_offer, identity
from structlog.testing import capture_logs

from sealring.mesh.crypto import Ed25519Signer, member_id, sign_envelope
from sealring.mesh.errors import ConfigError, InvalidInput, PermissionDenied
from sealring.mesh.member import Coordinators, Introduction, Purpose, SignProof, by_roster_keys, of_identity
from sealring.mesh.pki import PeerIdentity, Role
from sealring.mesh.roster import PAYLOAD_TYPE, roster_update
from sealring.mesh.rpc import Backoff, Server, TlsStore, server_credentials, silence
from sealring.mesh.system.addresses import free_port
from sealring.node.daemon import session as session_module
from sealring.node.daemon.session import CoordinatorSession
from sealring.v1 import membership_pb2, membership_pb2_grpc, proof_pb2


class Coordinator(membership_pb2_grpc.MembershipServicer):
    def __init__(self, sign: SignProof, member: bytes) -> None:
        self.sign = sign
        self.member = member
        self.member_store: Any = None
        self.proves = True
        self.offers = asyncio.Semaphore(0)
        self.parted = asyncio.Semaphore(0)
        self.heard: asyncio.Queue[membership_pb2.MemberMessage] = asyncio.Queue()
        self.say: asyncio.Queue[membership_pb2.CoordinatorMessage | None] = asyncio.Queue()
        self.refusal: Exception | None = None
        self.answers = False

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[membership_pb2.CoordinatorMessage]:
        proof, answer = await answer_offer(requests, context, Purpose.SESSION, self.sign)
        self.proof = proof
        self.offers.release()
        if not self.proves:
            yield GOODBYE
            return
        yield membership_pb2.CoordinatorMessage(proof=answer)
        proof.check((await anext(requests)).proof, of_identity(self.member))
        if self.refusal is not None:
            raise self.refusal
        yield membership_pb2.CoordinatorMessage(accepted=proof_pb2.ProofAccepted(hears=self.answers))

        async def read() -> None:
            async for message in requests:
                self.heard.put_nowait(message)
            self.parted.release()

        reader = asyncio.create_task(read())
        try:
            while (message := await self.say.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def offered(self, times: int) -> None:
        """Returns when `times` more streams have begun."""
        while self.offers.locked() is False:
            await self.offers.acquire()
        for _ in range(times):
            async with asyncio.timeout(200):
                await self.offers.acquire()

    async def hears(self, kind: str) -> membership_pb2.MemberMessage:
        async with asyncio.timeout(200):
            while True:
                message = await self.heard.get()
                if message.WhichOneof("message") == kind:
                    return message


class Listener:
    def __init__(self) -> None:
        self.heard: asyncio.Queue[str] = asyncio.Queue()
        self.rosters: list[bytes] = []
        self.out = asyncio.Event()
        self.working = True

    def hello(self) -> membership_pb2.Hello:
        return membership_pb2.Hello(software_version="1")

    def heartbeat(self) -> membership_pb2.Heartbeat:
        return membership_pb2.Heartbeat(memory_total=1)

    async def from_coordinator(self, message: membership_pb2.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        self.heard.put_nowait(kind)
        if kind == "roster":
            self.rosters.append(message.roster.envelope)
        if kind == "commit":
            raise InvalidInput("no")

    def thrown_out(self) -> None:
        self.out.set()


async def nobody() -> list[str]:
    raise AssertionError("the network is not asked for a coordinator on loopback")


@pytest.fixture
async def talk(cluster: Any) -> AsyncIterator[Any]:
    store = TlsStore(cluster.material(PeerIdentity("testbed", Role.COORDINATOR, "coordinator")))
    party = cluster.party()
    coordinator = Coordinator(by_roster_keys([cluster.authority.roster_signers[0]]), party.signer.public_key)
    coordinator.member_store = own_store = party.store()
    listener = Listener()
    add = membership_pb2_grpc.add_MembershipServicer_to_server
    server = Server([(add, coordinator, "sealring.v1.Membership")])
    port = server.listen("127.0.0.1:0", server_credentials(store))
    await server.start()
    standby = [f"127.0.0.1:{port}"]  # which took over
    coordinators = Coordinators(f"127.0.0.1:{free_port()}", own_store, lambda: standby, nobody)
    channel = coordinators.channel
    own = identity(party.signer, "testbed")

    async def newer_root() -> None:
        raise InvalidInput("there is none", reason="NO_NEWER_ROOT")

    introduction = Introduction(Purpose.SESSION, own, channel, lambda: cluster.authority.root, newer_root)
    session = CoordinatorSession(
        coordinators,
        introduction,
        listener,
        working=lambda: listener.working,
        heartbeat_seconds=0.2,
        backoff=partial(Backoff, 0.01, 0.1),
    )
    task = asyncio.create_task(session.run())
    yield coordinator, listener, session, channel
    assert not task.done() or not task.cancelled()
    task.cancel()
    await asyncio.wait((task,))
    await coordinators.close()
    await server.stop(0)


def fault(epoch: int) -> membership_pb2.MemberMessage:
    return membership_pb2.MemberMessage(fault=membership_pb2.EpochFault(ring="r", epoch=epoch))


GOODBYE = membership_pb2.CoordinatorMessage(goodbye=membership_pb2.Goodbye(reason="x"))
COMMIT = membership_pb2.CoordinatorMessage(commit=membership_pb2.CommitEpoch(ring="r"))


async def test_hello_heartbeats_and_messages_in_order(talk: Any) -> None:
    coordinator, listener, session, _ = talk
    assert (await coordinator.hears("hello")).hello.software_version == "1"
    for _ in range(3):
        await coordinator.hears("heartbeat")
    for epoch in range(50):
        session.send(fault(epoch))
    assert [(await coordinator.hears("fault")).fault.epoch for _ in range(50)] == list(range(50))
    coordinator.say.put_nowait(COMMIT)
    coordinator.say.put_nowait(GOODBYE)
    assert [await listener.heard.get() for _ in range(2)] == ["commit", "goodbye"]


async def test_rosters_come_whole_or_as_differences_from_the_one_before(talk: Any) -> None:
    coordinator, listener, _, _ = talk
    await coordinator.hears("hello")
    signers, entries = [Ed25519Signer.generate()], b",".join(b'{"id":"%d"}' % number for number in range(50))
    payloads = [b'{"members":[' + entries + b'],"version":%d}' % version for version in (1, 2, 3)]
    rosters = [sign_envelope(PAYLOAD_TYPE, payload, signers) for payload in payloads]
    for before, roster in zip((b"", *rosters), rosters, strict=False):
        update = roster_update(roster, before)
        coordinator.say.put_nowait(membership_pb2.CoordinatorMessage(roster=update))
    for _ in rosters:
        assert await listener.heard.get() == "roster"
    assert listener.rosters == rosters
    coordinator.say.put_nowait(
        membership_pb2.CoordinatorMessage(roster=roster_update(rosters[1], rosters[0]))
    )
    await coordinator.hears("hello")  # the node can not put that together, so it begins anew


async def test_it_ends_its_side_when_it_is_said_goodbye_to_and_says_the_rest_on_the_next_stream(
    talk: Any,
) -> None:
    coordinator, listener, session, _ = talk
    await coordinator.hears("hello")
    coordinator.say.put_nowait(GOODBYE)
    assert await listener.heard.get() == "goodbye"
    async with asyncio.timeout(200):
        await coordinator.parted.acquire()
    session.send(fault(7))
    coordinator.say.put_nowait(None)
    await coordinator.hears("hello")
    assert (await coordinator.hears("fault")).fault.epoch == 7


async def test_a_channel_that_is_replaced_does_not_end_the_session(talk: Any) -> None:
    coordinator, listener, _, channel = talk
    await coordinator.hears("hello")
    coordinator.say.put_nowait(GOODBYE)
    assert await listener.heard.get() == "goodbye"
    await channel.close()
    await coordinator.hears("hello")


def fails(error: Exception) -> Any:
    def hello() -> membership_pb2.Hello:
        raise error

    return hello


async def test_the_coordinator_is_told_what_keeps_a_node_from_coming_online(talk: Any) -> None:
    coordinator, listener, _, _ = talk
    listener.hello = fails(ConfigError("its version is unknown", reason="BROKEN_INSTALLATION"))
    coordinator.say.put_nowait(None)
    assert (await coordinator.hears("trouble")).trouble.reason == "BROKEN_INSTALLATION"
    listener.hello = fails(LookupError("no version"))
    with capture_logs() as logs:
        await coordinator.offered(2)
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [type(entry["exc_info"]) for entry in errors[:1]] == [LookupError]


@pytest.mark.parametrize("reason", ["NOT_ENROLLED", "EVICTED", "BANNED"])
async def test_a_node_that_is_not_enrolled_any_more_learns_it(talk: Any, reason: str) -> None:
    coordinator, listener, _, _ = talk
    await coordinator.hears("hello")
    coordinator.refusal = PermissionDenied("no", reason=reason)
    coordinator.say.put_nowait(None)
    async with asyncio.timeout(200):
        await listener.out.wait()


@pytest.mark.parametrize("reason", ["NOT_ENROLLED", "EVICTED", "BANNED"])
async def test_who_has_not_proved_to_be_the_coordinator_throws_nobody_out(talk: Any, reason: str) -> None:
    """With the authority's stolen key anybody can answer in its place."""
    coordinator, listener, _, _ = talk
    await coordinator.hears("hello")
    coordinator.sign = by_roster_keys([Ed25519Signer.generate()])
    coordinator.refusal = PermissionDenied("no", reason=reason)
    coordinator.say.put_nowait(None)
    await coordinator.offered(3)
    assert not listener.out.is_set()


async def test_a_coordinator_without_a_proof_is_told_nothing(talk: Any) -> None:
    coordinator, listener, session, _ = talk
    await coordinator.hears("hello")
    coordinator.proves = False
    coordinator.say.put_nowait(None)
    await coordinator.offered(2)
    while not coordinator.heard.empty():
        coordinator.heard.get_nowait()
    session.send(fault(1))
    coordinator.say.put_nowait(COMMIT)
    await coordinator.offered(2)
    assert coordinator.heard.empty()
    assert listener.heard.empty()
    coordinator.proves = True
    assert (await coordinator.hears("fault")).fault.epoch == 1


async def test_goodbye_is_said_last(talk: Any, time_for_goodbyes: None) -> None:
    coordinator, listener, session, _ = talk
    await coordinator.hears("hello")
    coordinator.say.put_nowait(COMMIT)
    assert await listener.heard.get() == "commit"
    session.send(fault(1))
    await session.goodbye("stopping")
    assert (await coordinator.hears("fault")).fault.epoch == 1
    assert (await coordinator.hears("goodbye")).goodbye.reason == "stopping"


def peer(coordinator: Coordinator) -> PeerIdentity:
    return PeerIdentity("testbed", Role.MEMBER, member_id(coordinator.member))


async def test_a_session_outlives_the_certificate_that_it_was_opened_with(talk: Any, cluster: Any) -> None:
    """Whenever there is a newer one it says so, on the same stream, with a proof of its own."""
    coordinator, _, _, _ = talk
    await coordinator.hears("hello")
    proof = coordinator.proof
    for _ in range(2):
        newer = cluster.material(peer(coordinator))
        coordinator.member_store.replace(newer)
        renewal = (await coordinator.hears("renewal")).renewal
        assert renewal.certificate == newer.certificate
        proof.check_renewal(renewal, of_identity(coordinator.member))
    assert coordinator.proof is proof


async def test_a_new_stream_does_not_begin_with_a_renewal_of_the_last(talk: Any, cluster: Any) -> None:
    coordinator, _, _, _ = talk
    await coordinator.hears("hello")
    coordinator.say.put_nowait(None)
    coordinator.member_store.replace(cluster.material(peer(coordinator)))
    await coordinator.hears("hello")
    coordinator.member_store.replace(newest := cluster.material(peer(coordinator)))
    renewal = (await coordinator.hears("renewal")).renewal
    while renewal.certificate != newest.certificate:
        renewal = (await coordinator.hears("renewal")).renewal
    coordinator.proof.check_renewal(renewal, of_identity(coordinator.member))


def test_of_very_many_messages_the_oldest_are_lost_and_the_log_says_so() -> None:
    session = CoordinatorSession(None, None, Listener())  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        for epoch in range(261):
            session.send(fault(epoch))
    assert [one.fault.epoch for one in session.waiting] == list(range(5, 261))
    lost = [(one["kind"], one["lost"]) for one in logs if one["event"] == "coordinator_message_lost"]
    assert lost == [("fault", 1), ("fault", 2), ("fault", 4)]


async def test_messages_without_end_hold_up_no_heartbeat(talk: Any) -> None:
    """Each is followed by the next before it has been written."""
    coordinator, _, session, _ = talk

    async def talks() -> None:
        while True:
            if len(session.waiting) < 2:
                session.send(fault(1))
            await asyncio.sleep(0)

    talking = asyncio.create_task(talks())
    try:
        for _ in range(3):
            await coordinator.hears("heartbeat")
            await coordinator.hears("fault")
    finally:
        talking.cancel()


@pytest.mark.parametrize("looks", [False, True])
async def test_a_rest_ends_with_work_or_when_somebody_looks(
    talk: Any, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    coordinator, listener, node, _ = talk
    monkeypatch.setattr(session_module, "REST_SECONDS", 1000.0)
    listener.working = False
    coordinator.say.put_nowait(None)  # the next stream begins at rest
    while (await coordinator.hears("heartbeat")).heartbeat.next_ms != 1_000_000:
        pass
    if looks:
        heard = membership_pb2.Heard(look_ms=60_000)
        coordinator.say.put_nowait(membership_pb2.CoordinatorMessage(heard=heard))
    else:
        listener.working = True
        node.stir()
    assert (await coordinator.hears("heartbeat")).heartbeat.next_ms == 200


@pytest.mark.parametrize("working", [False, True])
async def test_a_coordinator_that_answers_no_heartbeat_under_work_is_called_anew(
    talk: Any, monkeypatch: pytest.MonkeyPatch, working: bool
) -> None:
    """gRPC finds it as well, later."""
    coordinator, listener, _, _ = talk
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(silence, "GRACE_SECONDS", 0.0)
    await coordinator.hears("heartbeat")
    listener.working, coordinator.answers = working, True
    coordinator.say.put_nowait(None)
    if working:
        await coordinator.offered(3)  # each of them is given up
        return
    await coordinator.hears("hello")
    assert not (await coordinator.hears("heartbeat")).heartbeat.answer
