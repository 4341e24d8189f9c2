import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import structlog
from actedcoordinator import ActedCoordinator, MemberSession
from prooftest import identity
from structlog.testing import capture_logs

from sealring.mesh.crypto import Ed25519Signer, sign_envelope
from sealring.mesh.errors import ConfigError, InvalidInput, PermissionDenied
from sealring.mesh.member import Coordinators, Introduction, Purpose, of_identity
from sealring.mesh.roster import PAYLOAD_TYPE, roster_update
from sealring.mesh.rpc import Backoff, Server, TlsStore, server_credentials, silence
from sealring.mesh.system.addresses import free_port
from sealring.node.daemon import session as session_module
from sealring.node.daemon.session import CoordinatorSession
from sealring.v1 import membership_pb2


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


@dataclass
class Talk:
    """A node's session with a played coordinator; `told` is the coordinator's side of it."""

    coordinator: ActedCoordinator
    told: MemberSession
    listener: Listener
    session: CoordinatorSession
    party: Any
    store: TlsStore
    """The node's."""
    channel: Any


@pytest.fixture
async def talk(cluster: Any) -> AsyncIterator[Talk]:
    store = TlsStore(cluster.coordinator)
    party = cluster.party()
    coordinator = ActedCoordinator(cluster.authority, {party.id: party.signer.public_key})
    own_store = party.store()
    listener = Listener()
    server = Server(coordinator.services())
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
    yield Talk(coordinator, coordinator.sessions[party.id], listener, session, party, own_store, channel)
    assert not task.done() or not task.cancelled()
    task.cancel()
    await asyncio.wait((task,))
    await coordinators.close()
    await server.stop(0)


def fault(epoch: int) -> membership_pb2.MemberMessage:
    return membership_pb2.MemberMessage(fault=membership_pb2.EpochFault(ring="r", epoch=epoch))


GOODBYE = membership_pb2.CoordinatorMessage(goodbye=membership_pb2.Goodbye(reason="x"))
COMMIT = membership_pb2.CoordinatorMessage(commit=membership_pb2.CommitEpoch(ring="r"))


async def test_hello_heartbeats_and_messages_in_order(talk: Talk) -> None:
    assert (await talk.told.hears("hello")).software_version == "1"
    for _ in range(3):
        await talk.told.hears("heartbeat")
    for epoch in range(50):
        talk.session.send(fault(epoch))
    assert [(await talk.told.hears("fault")).epoch for _ in range(50)] == list(range(50))
    talk.told.say.put_nowait(COMMIT)
    talk.told.say.put_nowait(GOODBYE)
    assert [await talk.listener.heard.get() for _ in range(2)] == ["commit", "goodbye"]


async def test_rosters_come_whole_or_as_differences_from_the_one_before(talk: Talk) -> None:
    await talk.told.hears("hello")
    signers, entries = [Ed25519Signer.generate()], b",".join(b'{"id":"%d"}' % number for number in range(50))
    payloads = [b'{"members":[' + entries + b'],"version":%d}' % version for version in (1, 2, 3)]
    rosters = [sign_envelope(PAYLOAD_TYPE, payload, signers) for payload in payloads]
    for before, roster in zip((b"", *rosters), rosters, strict=False):
        update = roster_update(roster, before)
        talk.told.say.put_nowait(membership_pb2.CoordinatorMessage(roster=update))
    for _ in rosters:
        assert await talk.listener.heard.get() == "roster"
    assert talk.listener.rosters == rosters
    talk.told.say.put_nowait(membership_pb2.CoordinatorMessage(roster=roster_update(rosters[1], rosters[0])))
    await talk.told.hears("hello")  # the node can not put that together, so it begins anew


async def test_it_ends_its_side_when_it_is_said_goodbye_to_and_says_the_rest_on_the_next_stream(
    talk: Talk,
) -> None:
    await talk.told.hears("hello")
    talk.told.say.put_nowait(GOODBYE)
    assert await talk.listener.heard.get() == "goodbye"
    async with asyncio.timeout(200):
        await talk.told.parted.acquire()
    talk.session.send(fault(7))
    talk.told.say.put_nowait(None)
    await talk.told.hears("hello")
    assert (await talk.told.hears("fault")).epoch == 7


async def test_a_channel_that_is_replaced_does_not_end_the_session(talk: Talk) -> None:
    await talk.told.hears("hello")
    talk.told.say.put_nowait(GOODBYE)
    assert await talk.listener.heard.get() == "goodbye"
    await talk.channel.close()
    await talk.told.hears("hello")


def fails(error: Exception) -> Any:
    def hello() -> membership_pb2.Hello:
        raise error

    return hello


async def test_the_coordinator_is_told_what_keeps_a_node_from_coming_online(talk: Talk) -> None:
    talk.listener.hello = fails(ConfigError("its version is unknown", reason="BROKEN_INSTALLATION"))
    talk.told.say.put_nowait(None)
    assert (await talk.told.hears("trouble")).reason == "BROKEN_INSTALLATION"
    talk.listener.hello = fails(LookupError("no version"))
    with capture_logs() as logs:
        await talk.told.offered(2)
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [type(entry["exc_info"]) for entry in errors[:1]] == [LookupError]


@pytest.mark.parametrize("reason", ["NOT_ENROLLED", "EVICTED", "BANNED"])
async def test_a_node_that_is_not_enrolled_any_more_learns_it(talk: Talk, reason: str) -> None:
    await talk.told.hears("hello")
    talk.coordinator.refusal = PermissionDenied("no", reason=reason)
    talk.told.say.put_nowait(None)
    async with asyncio.timeout(200):
        await talk.listener.out.wait()


@pytest.mark.parametrize("reason", ["NOT_ENROLLED", "EVICTED", "BANNED"])
async def test_who_has_not_proved_to_be_the_coordinator_throws_nobody_out(talk: Talk, reason: str) -> None:
    """With the authority's stolen key anybody can answer in its place."""
    await talk.told.hears("hello")
    talk.coordinator.signers = [Ed25519Signer.generate()]
    talk.coordinator.refusal = PermissionDenied("no", reason=reason)
    talk.told.say.put_nowait(None)
    await talk.told.offered(3)
    assert not talk.listener.out.is_set()


async def test_a_coordinator_without_a_proof_is_told_nothing(talk: Talk) -> None:
    await talk.told.hears("hello")
    talk.coordinator.proves = False
    talk.told.say.put_nowait(None)
    await talk.told.offered(2)
    talk.told.heard.clear()
    talk.session.send(fault(1))
    talk.told.say.put_nowait(COMMIT)
    await talk.told.offered(2)
    assert not talk.told.heard
    assert talk.listener.heard.empty()
    talk.coordinator.proves = True
    assert (await talk.told.hears("fault")).epoch == 1


async def test_goodbye_is_said_last(talk: Talk, time_for_goodbyes: None) -> None:
    await talk.told.hears("hello")
    talk.told.say.put_nowait(COMMIT)
    assert await talk.listener.heard.get() == "commit"
    talk.session.send(fault(1))
    await talk.session.goodbye("stopping")
    assert (await talk.told.hears("fault")).epoch == 1
    assert (await talk.told.hears("goodbye")).reason == "stopping"


async def test_a_session_outlives_the_certificate_that_it_was_opened_with(talk: Talk, cluster: Any) -> None:
    """Whenever there is a newer one it says so, on the same stream, with a proof of its own."""
    await talk.told.hears("hello")
    proof = talk.told.proof
    for _ in range(2):
        newer = cluster.material(talk.party.peer)
        talk.store.replace(newer)
        renewal = await talk.told.hears("renewal")
        assert renewal.certificate == newer.certificate
        proof.check_renewal(renewal, of_identity(talk.party.signer.public_key))
    assert talk.told.proof is proof


async def test_a_new_stream_does_not_begin_with_a_renewal_of_the_last(talk: Talk, cluster: Any) -> None:
    await talk.told.hears("hello")
    talk.told.say.put_nowait(None)
    talk.store.replace(cluster.material(talk.party.peer))
    await talk.told.hears("hello")
    talk.store.replace(newest := cluster.material(talk.party.peer))
    renewal = await talk.told.hears("renewal")
    while renewal.certificate != newest.certificate:
        renewal = await talk.told.hears("renewal")
    talk.told.proof.check_renewal(renewal, of_identity(talk.party.signer.public_key))


def test_of_very_many_messages_the_oldest_are_lost_and_the_log_says_so() -> None:
    session = CoordinatorSession(None, None, Listener())  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        for epoch in range(261):
            session.send(fault(epoch))
    assert [one.fault.epoch for one in session.waiting] == list(range(5, 261))
    lost = [(one["kind"], one["lost"]) for one in logs if one["event"] == "coordinator_message_lost"]
    assert lost == [("fault", 1), ("fault", 2), ("fault", 4)]


async def test_messages_without_end_hold_up_no_heartbeat(talk: Talk) -> None:
    """Each is followed by the next before it has been written."""

    async def talks() -> None:
        while True:
            if len(talk.session.waiting) < 2:
                talk.session.send(fault(1))
            await asyncio.sleep(0)

    talking = asyncio.create_task(talks())
    try:
        for _ in range(3):
            await talk.told.hears("heartbeat")
            await talk.told.hears("fault")
    finally:
        talking.cancel()


@pytest.mark.parametrize("looks", [False, True])
async def test_a_rest_ends_with_work_or_when_somebody_looks(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    monkeypatch.setattr(session_module, "REST_SECONDS", 1000.0)
    talk.listener.working = False
    talk.told.say.put_nowait(None)  # the next stream begins at rest
    while (await talk.told.hears("heartbeat")).next_ms != 1_000_000:
        pass
    if looks:
        heard = membership_pb2.Heard(look_ms=60_000)
        talk.told.say.put_nowait(membership_pb2.CoordinatorMessage(heard=heard))
    else:
        talk.listener.working = True
        talk.session.stir()
    assert (await talk.told.hears("heartbeat")).next_ms == 200


@pytest.mark.parametrize("working", [False, True])
async def test_a_coordinator_that_answers_no_heartbeat_under_work_is_called_anew(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, working: bool
) -> None:
    """gRPC finds it as well, later."""
    monkeypatch.setattr(session_module, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(silence, "GRACE_SECONDS", 0.0)
    await talk.told.hears("hello")
    await talk.told.hears("heartbeat")
    talk.listener.working, talk.coordinator.hears_beats = working, True
    talk.told.say.put_nowait(None)
    if working:
        await talk.told.offered(3)  # each of them is given up
        return
    await talk.told.hears("hello")
    talk.told.heard.clear()
    assert not (await talk.told.hears("heartbeat")).answer
