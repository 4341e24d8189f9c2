import asyncio
import secrets
import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import until
from playedengine import PlayedEngine
from prooftest import identity, introduce
from rowoutput import row_output

from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import Label, SoftwareSigner, verify
from sealring.mesh.errors import InvalidInput, PermissionDenied, SealringError, Unavailable
from sealring.mesh.member import Credentials, Purpose
from sealring.mesh.pki import PeerIdentity, Role, expires_at, to_pem
from sealring.mesh.prompt.sealed import RequestInfo, seal_request
from sealring.mesh.receipt.digests import request_digest
from sealring.mesh.receipt.statement import TailStatement, parse_statement
from sealring.mesh.ring import MAX_CHANGES, MAX_CHOICES
from sealring.mesh.roster import RingMember
from sealring.mesh.rpc import (
    PIECE_BYTES,
    PROTOCOL_VERSION,
    Lease,
    Outgoing,
    PeerChannel,
    Server,
    from_rpc_error,
    read_from_12,
    server_credentials,
    silence,
)
from sealring.mesh.rpc.protocol import OLDEST_PROTOCOL
from sealring.mesh.system.power import power
from sealring.node.control import service as control
from sealring.node.control.service import SERVICE, ControlService, add_control_to_server, reframe
from sealring.node.daemon.epoch import MemberEpoch, Phase
from sealring.node.daemon.receipts import ReceiptKey, SignedOnce
from sealring.node.daemon.sealed_rows import Unsealer
from sealring.testing import PaperCluster
from sealring.v1 import control_pb2, engine_pb2, inference_pb2, membership_pb2


class Plan:
    ring, epoch, deployment, rank, size, kv_budget = "demo-0", 1, "demo", 0, 1, 1 << 20
    backend, model_digest, layers, protocol = "", "", (0, 1), PROTOCOL_VERSION
    members: tuple[RingMember, ...] = ()


class Desk:
    """A daemon with one epoch that is up."""

    def __init__(self, rank: int, gateway: bytes = b"") -> None:
        self.signer = SoftwareSigner.generate()
        self.gateway = gateway
        self.plan = Plan()
        self.plan.rank = rank
        self.faults: list[str] = []
        self.trusted: tuple[bytes, ...] = ()
        self.epoch = MemberEpoch(self.plan, self)
        self.epoch.phase = Phase.UP
        self.engine = self.epoch.engine = PlayedEngine()
        paper = PaperCluster(size=1)
        self.key = paper.keys["demo-0"]
        self.roster = paper.roster
        ring = paper.roster.rings[0]
        self.plan.members, self.plan.model_digest = ring.members, ring.model_digest.hex()
        self.unsealer = Unsealer(key=self.key, own_id=self.plan.members[0].id)
        self.unsealer.learn(self.roster)
        self.ahead = 0.0  # how far somebody has set the clock ahead
        self.receipt_key = ReceiptKey(
            "testbed", self.plan.members[0].id, self.signer, lambda: wall_clock() + self.ahead
        )

    def report(self, message: membership_pb2.MemberMessage) -> None:
        self.faults.append(message.fault.problem.reason)

    def release(self, plan: Any) -> None:
        return

    @property
    def identity(self) -> Credentials:
        return identity(self.signer, "testbed")

    def gateway_key(self, cluster: str, identifier: str) -> bytes:
        if cluster != "testbed":
            raise PermissionDenied("no", reason="GATEWAY_NOT_ALLOWED")
        return self.gateway

    def authorities(self) -> tuple[bytes, ...]:
        return self.trusted

    def serving_epoch(self, ring: str, epoch: int) -> MemberEpoch:
        return self.epoch


class Stream:
    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, message: Any = None, **fields: Any) -> None:
        raw = (
            message
            if isinstance(message, bytes)
            else control_pb2.ScheduleRequest(**fields).SerializeToString()
        )
        await self.call.write(raw)

    async def next(self) -> control_pb2.ScheduleResponse | None:
        async with asyncio.timeout(200):
            answer = await self.call.read()
        return None if answer is grpc.aio.EOF else control_pb2.ScheduleResponse.FromString(answer)


def packed(**fields: Any) -> bytes:
    return control_pb2.ScheduleRequest(**fields).SerializeToString()


def unpacked(data: bytes) -> control_pb2.ScheduleResponse:
    return control_pb2.ScheduleResponse.FromString(data)


@pytest.fixture
async def connect(cluster):
    """Opens an attached stream to a desk."""
    member, gateway = cluster.party(), cluster.party(Role.GATEWAY)
    closing: list[Any] = []

    async def open_stream(
        rank: int = 0, backend: str = "", clear_links: bool = False, yields: bool = False, **limits: Any
    ) -> tuple[Desk, Stream]:
        desk = Desk(rank, gateway.signer.public_key)
        desk.plan.backend = backend
        desk.trusted = (cluster.authority.ca.certificate,)
        server = Server([(add_control_to_server, ControlService(desk, **limits), SERVICE)])
        port = server.listen("127.0.0.1:0", server_credentials(member.store()))
        await server.start()
        name = member.peer.server_name
        channel = PeerChannel(f"127.0.0.1:{port}", gateway.store(), name)
        stream = Stream(channel.get().stream_stream("/sealring.v1.Control/Schedule")())
        stream.channel, stream.party, stream.material = channel, gateway, gateway.material
        closing.extend((channel.close, lambda: server.stop(0)))
        own, certificate = identity(gateway.signer, "testbed"), gateway.material.certificate
        stream.proof = await introduce(
            stream.call, packed, own, certificate, Purpose.SCHEDULE, called=desk.identity.id, parse=unpacked
        )
        attach = control_pb2.Attach(ring="demo-0", epoch=1, clear_links=clear_links, yields=yields)
        await stream.send(attach=attach)
        if yields or (backend and not clear_links):
            return desk, stream
        attached = (await stream.next()).attached
        assert (attached.rank, attached.kv_bytes_per_token, attached.kv_bytes_per_row) == (rank, 3, 4)
        assert attached.kv_budget == 1 << 20
        assert attached.capabilities == ["tools"]
        assert attached.vision_not_installed
        assert len(attached.device) == 32, "a name of the GPU that says nothing elsewhere"
        return desk, stream

    yield open_stream
    for close in closing:
        await close()


def open_row(**changes: Any) -> control_pb2.OpenRow:
    envelope = inference_pb2.Envelope(clear=inference_pb2.Prompt(text="hello"))
    fields = {"row": 1, "request_id": "r", "deployment": "demo", "envelope": envelope, "max_tokens": 9}
    return control_pb2.OpenRow(**{**fields, **changes})


async def test_who_yields_does_not_schedule(connect) -> None:
    desk, stream = await connect(yields=True)
    with pytest.raises(grpc.RpcError) as refused:
        await stream.next()
    assert from_rpc_error(refused.value).reason == "NOBODY_SCHEDULES"
    assert desk.epoch.gateway is None


async def test_what_passes_through(connect) -> None:
    desk, stream = await connect()
    step = control_pb2.Step(number=1, prefill=control_pb2.Prefill(chunks=[control_pb2.Chunk(row=1, end=5)]))
    await stream.send(open=open_row())
    await stream.send(step=step)
    await stream.send(discard=control_pb2.DiscardRow(row=4))
    await until(lambda: len(desk.engine.work) == 3)
    opened, stepped, discarded = desk.engine.work
    assert (opened.open_row.prompt.text, opened.open_row.max_tokens) == ("hello", 9)
    assert stepped.step == step
    assert discarded.discard.row == 4
    await until(lambda: desk.engine.waited_for == [1, 2, 3])
    done = control_pb2.StepDone(step=1, outputs=[row_output(1, text="x" * 500, tokens=1)])
    events = [
        engine_pb2.EngineEvent(opened=control_pb2.RowOpened(row=1, prompt_tokens=5)),
        engine_pb2.EngineEvent(refused=control_pb2.RowRefused(row=2)),
        engine_pb2.EngineEvent(done=done),
    ]
    for event in events:
        desk.epoch.row_event(event.SerializeToString())
    assert (await stream.next()).opened.prompt_tokens == 5
    assert (await stream.next()).refused.row == 2
    assert (await stream.next()).done == done
    await stream.send(ping=control_pb2.Ping(sequence=3))
    saving = {"on_battery": power().on_battery, "low_power": power().low}
    pong = control_pb2.Pong(sequence=3, steps=5, engine_memory=77, **saving)
    assert (await stream.next()).pong == pong
    assert desk.faults == []


async def test_a_head_signs_for_what_its_engine_has_sent(connect) -> None:
    desk, stream = await connect()
    desk.ahead = 90.0
    nonce, prompt = bytes(range(16)), inference_pb2.Prompt(text="hello")
    asked = inference_pb2.ReceiptRequest(nonce=nonce, roster_hash=desk.roster.hash)
    await stream.send(open=open_row(row=3, choices=2, receipt=asked))
    await until(lambda: desk.engine.work)
    desk.ahead = 0.0
    bound = desk.engine.work[0].open_row.receipt
    digests = engine_pb2.RowDigests(row=4, binding=bound, tokens=9, given=2, sampled=bytes(32), finish=1)
    for name in ("text", "reasoning", "calls", "order"):
        setattr(digests, name, bytes(32))
    desk.epoch.row_digests(digests)
    receipt = (await stream.next()).receipt
    statement = parse_statement(receipt.head.statement)
    verify(desk.signer.public_key, Label.RECEIPT, receipt.head.statement, receipt.head.signature)
    assert (receipt.row, statement.row, statement.choice, statement.nonce) == (4, 4, 1, nonce)
    assert (statement.request, statement.binding) == (request_digest(prompt, 9), bound)
    assert (statement.tokens, statement.given, statement.roster_hash) == (9, 2, desk.roster.hash)
    assert statement.finished == statement.opened, "an answer that ends after its clock was set back"
    desk.epoch.row_digests(digests)  # it was signed for already, so nothing more comes
    await stream.send(open=open_row(row=9, receipt=inference_pb2.ReceiptRequest(nonce=b"short")))
    assert (await stream.next()).refused.problem.reason == "BAD_NONCE"


async def test_a_head_signs_once_an_epoch_for_a_nonce_and_a_request(connect, monkeypatch) -> None:
    """A gateway that asks again with them, until it likes the answer, gets no receipt for the others."""
    monkeypatch.setattr(SignedOnce, "MAX_CLAIMS", 5)
    desk, stream = await connect()

    async def signed(row: int, nonce: bytes, *, choices: int = 1, **more: Any) -> list[str]:
        asked = inference_pb2.ReceiptRequest(nonce=nonce, roster_hash=desk.roster.hash)
        await stream.send(open=open_row(row=row, choices=choices, receipt=asked, **more))
        await until(lambda: any(one.open_row.row == row for one in desk.engine.work))
        bound = desk.engine.work[-1].open_row.receipt
        found = []
        for number in range(row, row + choices):
            digests = engine_pb2.RowDigests(row=number, binding=bound, tokens=9, sampled=bytes(32), finish=1)
            for name in ("text", "reasoning", "calls", "order"):
                setattr(digests, name, bytes(32))
            desk.epoch.row_digests(digests)
            found.append((await stream.next()).receipt.head.missing)
        return found

    one, other = bytes(range(16)), bytes(range(1, 17))
    assert await signed(1, one) == [""]
    assert await signed(2, one) == ["SIGNED_BEFORE"]
    assert await signed(3, one, choices=3) == ["SIGNED_BEFORE", "", ""]
    assert await signed(6, one, choices=3) == ["SIGNED_BEFORE"] * 3
    assert await signed(9, one, max_tokens=8) == [""], "for another request"
    assert await signed(10, other) == [""], "with another nonce"
    assert await signed(11, bytes(16)) == ["EPOCH_HAS_SIGNED_ENOUGH"], "what cannot be remembered"
    goes_on = inference_pb2.Prompt(text="hello", resume={"tokens": [1]})
    assert await signed(12, one, envelope={"clear": goes_on}) == [""], "verifiers take none with such tokens"


async def test_a_request_is_the_same_with_and_without_what_it_does_not_name(connect) -> None:
    """Verifiers take either of the two hashes."""
    desk, stream = await connect()
    for row, unnamed, missing in ((1, 2, ""), (2, 0, "SIGNED_BEFORE"), (3, 6, "SIGNED_BEFORE")):
        prompt = inference_pb2.Prompt(text="hello", sampling={"temperature": 1, "unnamed": unnamed})
        asked = inference_pb2.ReceiptRequest(nonce=bytes(16), roster_hash=desk.roster.hash)
        await stream.send(open=open_row(row=row, receipt=asked, envelope={"clear": prompt}))
        await until(lambda row=row: any(one.open_row.row == row for one in desk.engine.work))
        bound = desk.engine.work[-1].open_row.receipt
        digests = dict.fromkeys(("text", "reasoning", "calls", "order", "sampled"), bytes(32))
        desk.epoch.row_digests(engine_pb2.RowDigests(row=row, binding=bound, tokens=9, finish=1, **digests))
        assert (await stream.next()).receipt.head.missing == missing


def test_claims_that_were_never_made_are_seldom_taken_for_old_ones() -> None:
    once = SignedOnce()
    assert {once.claim(number.to_bytes(16, "big"), bytes(32), 0) for number in range(2000)} == {""}


async def test_a_tail_signs_for_what_its_engine_has_sampled(connect) -> None:
    desk, stream = await connect(rank=2)
    await stream.send(sign=control_pb2.SignRow(row=3, tokens=9))
    await until(lambda: desk.engine.work)
    assert desk.engine.work[0].sign == control_pb2.SignRow(row=3, tokens=9)
    digests = engine_pb2.RowDigests(row=3, binding=bytes(32), tokens=9, sampled=b"s" * 32)
    desk.epoch.row_digests(digests)
    receipt = (await stream.next()).receipt
    plan = desk.plan
    expected = TailStatement(
        "testbed",
        plan.ring,
        plan.epoch,
        3,
        bytes(32),
        plan.members[0].id,
        plan.layers,
        bytes.fromhex(plan.model_digest),
        0,
        9,
        b"s" * 32,
        receipt.tail.finished,
    )
    verify(desk.signer.public_key, Label.RECEIPT, expected.encode(), receipt.tail.signature)
    desk.epoch.row_digests(engine_pb2.RowDigests(row=3, tokens=10))
    assert (await stream.next()).receipt.tail.missing == "NOT_SAMPLED"


async def test_a_key_that_cannot_sign_leaves_an_answer_visibly_without_a_receipt(connect) -> None:
    desk, stream = await connect(rank=1)
    desk.signer.sign = failing  # type: ignore[method-assign]
    desk.epoch.row_digests(engine_pb2.RowDigests(row=3, binding=bytes(32), tokens=9, sampled=bytes(32)))
    assert (await stream.next()).receipt.tail.missing == "ENCLAVE_FAILED"
    assert desk.epoch.phase is Phase.UP


def failing(label: Label, content: bytes) -> bytes:
    raise Unavailable("the enclave does not answer", reason="ENCLAVE_FAILED")


async def test_a_row_that_cannot_be_opened_is_refused_and_the_epoch_goes_on(connect) -> None:
    desk, stream = await connect()
    await stream.send(open=open_row(deployment="other"))
    assert (await stream.next()).refused.problem.reason == "WRONG_DEPLOYMENT"
    await stream.send(open=open_row(row=2, envelope=inference_pb2.Envelope()))
    assert (await stream.next()).refused.problem.reason == "EMPTY_ENVELOPE"
    await stream.send(open=open_row(row=3, choices=MAX_CHOICES + 1))
    assert (await stream.next()).refused.problem.reason == "BAD_CHOICES"
    assert desk.epoch.phase is Phase.UP
    assert desk.engine.work == []
    await stream.send(open=open_row(row=4 + MAX_CHOICES, choices=MAX_CHOICES))
    await until(lambda: desk.engine.work)
    assert desk.engine.work[0].open_row.choices == MAX_CHOICES


def sealed_row(desk: Desk, row: int, **changes: Any) -> tuple[control_pb2.OpenRow, Any]:
    fields = {
        "request_id": secrets.token_bytes(16),
        "expires": int(time.time()) + 200,
        "roster_hash": desk.roster.hash,
    }
    info = RequestInfo(deployment="demo", **{**fields, **changes})
    prompt = inference_pb2.Prompt(text="the secret")
    body = inference_pb2.SealedPrompt(prompt=prompt, max_tokens=9).SerializeToString()
    ciphertext, opener = seal_request(desk.key.public_key, info, body)
    sealed_for = inference_pb2.SealedFor(
        ring="demo-0", request_id=info.request_id, expires=info.expires, roster_hash=info.roster_hash
    )
    envelope = inference_pb2.Envelope(sealed=ciphertext, sealed_for=sealed_for)
    return open_row(row=row, envelope=envelope), opener


@pytest.mark.parametrize("spoken", [OLDEST_PROTOCOL, PROTOCOL_VERSION])
async def test_sealed_rows_are_opened_here_and_answered_sealed(connect, spoken: int) -> None:
    desk, stream = await connect()
    desk.plan.protocol = spoken
    row, opener = sealed_row(desk, 1)
    await stream.send(open=row)
    await stream.send(open=open_row(row=2))
    await until(lambda: len(desk.engine.work) == 2)
    assert desk.engine.work[0].open_row.prompt.text == "the secret"
    opened = engine_pb2.EngineEvent(opened=control_pb2.RowOpened(row=1, prompt_tokens=5))
    desk.epoch.row_event(opened.SerializeToString())
    assert (await stream.next()).opened.prompt_tokens == 5
    chunks = []
    for number, (text, finish) in enumerate([("the ", 0), ("", 0), ("answer", 0), ("", 1)]):
        outputs = [
            row_output(1, text=text, tokens=number + 1, finish=finish),
            row_output(2, text="clear", tokens=1),
        ]
        done = control_pb2.StepDone(step=number + 1, outputs=outputs)
        desk.epoch.row_event(engine_pb2.EngineEvent(done=done).SerializeToString())
        told = (await stream.next()).done
        assert text.encode() not in told.outputs[0].SerializeToString() or not text
        assert told.outputs[1].HasField("delta") == (spoken > OLDEST_PROTOCOL)
        if spoken == OLDEST_PROTOCOL:
            read_from_12(told)
        sealed, clear = (output.delta for output in told.outputs)
        assert clear.text == "clear"
        assert not sealed.text
        if sealed.sealed:
            chunks.append(opener.open(sealed.sealed))
    deltas = [inference_pb2.SealedDelta.FromString(chunk) for chunk, _ in chunks]
    assert [delta.text for delta in deltas] == ["the ", "", "answer", ""]
    assert [last for _, last in chunks] == [False, False, False, True]
    assert (deltas[-1].finish, deltas[-1].tokens, deltas[-1].prompt_tokens) == (1, 4, 5)
    row.row = 3
    await stream.send(open=row)
    assert (await stream.next()).refused.problem.reason == "ENVELOPE_REPLAYED"
    late = control_pb2.StepDone(step=9, outputs=[row_output(1, text="late", tokens=9)])
    desk.epoch.row_event(engine_pb2.EngineEvent(done=late).SerializeToString())
    assert (await stream.next()).fault.problem.reason == "REPLY_ENDED"


async def test_a_head_whose_links_are_in_clear_opens_nothing_that_is_sealed(connect) -> None:
    desk, stream = await connect(backend="ring", clear_links=True)
    await stream.send(open=sealed_row(desk, 1)[0])
    assert (await stream.next()).refused.problem.reason == "LINKS_IN_CLEAR"
    await stream.send(open=open_row(row=2))
    await until(lambda: desk.engine.work)
    assert desk.engine.work[0].open_row.row == 2


async def test_a_gateway_that_does_not_know_links_in_clear_is_not_attached_to_them(connect) -> None:
    """One of a release that knows no tensor rings would pass on whatever trust is demanded."""
    desk, stream = await connect(backend="ring")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.next()
    assert from_rpc_error(refused.value).reason == "LINKS_IN_CLEAR"
    assert desk.epoch.gateway is None


async def test_sealed_rows_that_do_not_open_are_refused(connect) -> None:
    desk, stream = await connect()
    good, _ = sealed_row(desk, 1)
    sealed = good.envelope.sealed
    rows = {
        "ENVELOPE_EXPIRED": sealed_row(desk, 1, expires=int(time.time()) - 1)[0],
        "SEALED_BY_OTHER_ROSTER": sealed_row(desk, 1, roster_hash=bytes(32))[0],
        "BAD_REQUEST_INFO": open_row(envelope=inference_pb2.Envelope(sealed=sealed)),
    }
    cases = list(rows.items())
    for bytes_sealed in (sealed[:-1] + bytes([sealed[-1] ^ 1]), *(sealed[:cut] for cut in (0, 1, 19, 40))):
        bad, _ = sealed_row(desk, 1)
        bad.envelope.sealed = bytes_sealed
        cases.append(("ENVELOPE_REFUSED", bad))
    for number, (reason, row) in enumerate(cases, start=1):
        row.row = number
        await stream.send(open=row)
        assert (await stream.next()).refused.problem.reason == reason
    assert desk.engine.work == []
    assert desk.epoch.phase is Phase.UP


async def test_a_row_number_that_comes_again_ends_the_epoch(connect) -> None:
    desk, stream = await connect()
    await stream.send(open=open_row(row=2))
    await stream.send(open=open_row(row=2))
    await until(lambda: desk.faults)
    assert desk.faults == ["BAD_MESSAGE"]


BROKEN = [
    b"",
    b"\x22",
    b"\x22\x05\x08",
    b"\x22\x02\x08\x01\x7a\x00",
    b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xff" * 40,
    b"\x22\x03\x08\x01\xff",
    b"\x7a\x00",
    control_pb2.ScheduleRequest(attach=control_pb2.Attach(ring="demo-0", epoch=1)).SerializeToString(),
]


@pytest.mark.parametrize("message", BROKEN)
async def test_a_broken_message_ends_the_epoch(connect, message: bytes) -> None:
    desk, stream = await connect()
    await stream.send(message)
    assert (await stream.next()).fault.problem.reason == "BAD_MESSAGE"
    assert await stream.next() is None
    assert desk.faults == ["BAD_MESSAGE"]
    assert desk.engine.work == []


async def test_only_the_head_opens_rows(connect) -> None:
    desk, stream = await connect(rank=1)
    await stream.send(open=open_row())
    assert (await stream.next()).fault.problem.reason == "BAD_MESSAGE"
    assert desk.engine.work == []


GOODBYES = {
    "LEAVING": "GATEWAY_LEFT",
    "RECORD_LOST": "GATEWAY_ENDED",
    "what\nis this": "GATEWAY_ENDED",
    "half close": "GATEWAY_GONE",
    "cancel": "GATEWAY_GONE",
}


@pytest.mark.parametrize("how", GOODBYES)
@pytest.mark.parametrize("used", [True, False])
async def test_a_gateway_that_leaves(connect, how: str, used: bool) -> None:
    desk, stream = await connect()
    if used:
        await stream.send(step=control_pb2.Step(number=1))
        await until(lambda: desk.engine.work)
    if how == "half close":
        await stream.call.done_writing()
    elif how == "cancel":
        stream.call.cancel()
    else:
        await stream.send(goodbye=membership_pb2.Goodbye(reason=how))
    await until(lambda: desk.epoch.gateway is None)
    if used:
        await until(lambda: desk.epoch.phase is Phase.ENDED)
    else:  # what would end it is due by now
        await asyncio.sleep(0.05)
    assert desk.faults == ([GOODBYES[how]] if used else [])
    assert desk.epoch.phase is (Phase.ENDED if used else Phase.UP)


@pytest.fixture
def leases(monkeypatch) -> list[Lease]:
    """Those of the streams that are opened, in their order."""
    made: list[Lease] = []

    class Noted(Lease):
        def __init__(self, limit: asyncio.Timeout, ends: float) -> None:
            super().__init__(limit, ends)
            self.limit = limit
            made.append(self)

        def end_now(self) -> None:
            self.limit.reschedule(asyncio.get_running_loop().time())

    monkeypatch.setattr("sealring.mesh.rpc.interceptor.Lease", Noted)
    return made


async def test_a_stream_ends_when_its_callers_certificate_does(connect, cluster, leases, monkeypatch) -> None:
    """The connection would last for as long as somebody keeps it open."""
    desk, stream = await connect()
    ends = expires_at(stream.material.certificate)
    assert leases[0].ends == ends
    leases[0].end_now()
    async with asyncio.timeout(200):
        assert await stream.call.code() is grpc.StatusCode.UNAUTHENTICATED
    await until(lambda: desk.epoch.gateway is None)
    monkeypatch.setattr("sealring.mesh.rpc.interceptor.SKEW_SECONDS", time.time() - ends - 1)
    again = stream.channel.get().stream_stream("/sealring.v1.Control/Schedule")()
    assert await again.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stream_outlives_its_callers_certificate_once_it_has_shown_the_next(
    connect, cluster, leases
) -> None:
    desk, stream = await connect()
    gateway = stream.party
    later = cluster.material(gateway.peer, age=-50).certificate
    own = identity(gateway.signer, "testbed")
    await stream.send(renewal=await stream.proof.renew(later, own.sign))
    await stream.send(ping=control_pb2.Ping(sequence=1))
    assert (await stream.next()).pong.sequence == 1
    assert leases[0].ends == expires_at(later) > expires_at(stream.material.certificate)
    assert desk.faults == []


@pytest.mark.parametrize("how", ["another key", "another stream", "thrown out"])
async def test_what_does_not_prove_the_next_certificate_ends_the_epoch(
    connect, cluster, leases, how: str
) -> None:
    desk, stream = await connect()
    _, other = await connect()
    gateway, proof = stream.party, stream.proof
    later = cluster.material(gateway.peer, age=-50).certificate
    sign = identity(gateway.signer, "testbed").sign
    if how == "another key":
        sign = identity(SoftwareSigner.generate(), "testbed").sign
    elif how == "another stream":
        proof = other.proof
    else:
        desk.gateway_key = lambda *_: (_ for _ in ()).throw(PermissionDenied("no", reason="REMOVED"))
    await stream.send(renewal=await proof.renew(later, sign))
    await until(lambda: desk.faults)
    assert desk.faults == ["REMOVED" if how == "thrown out" else "BAD_PROOF"]
    assert leases[0].ends == expires_at(stream.material.certificate)


async def test_a_daemon_that_stops_says_goodbye(connect) -> None:
    desk, stream = await connect()
    desk.epoch.gateway.say_goodbye("stopping")
    desk.epoch.fault(InvalidInput("x"))
    assert (await stream.next()).goodbye.reason == "stopping"
    assert await stream.next() is None


@given(st.binary(max_size=400), st.integers(0, 2**64 - 1))
def test_reframing_keeps_the_inner_message(text: bytes, number: int) -> None:
    step = control_pb2.Step(number=number)
    step.changes.extend(control_pb2.Change(evict=control_pb2.Evict(row=byte)) for byte in text)
    raw = control_pb2.ScheduleRequest(step=step).SerializeToString()
    assert engine_pb2.EngineCommand.FromString(reframe(raw, b"\x3a")) == engine_pb2.EngineCommand(step=step)


@given(st.binary(max_size=64))
def test_reframing_never_lets_a_second_field_through(tail: bytes) -> None:
    try:
        command = engine_pb2.EngineCommand.FromString(reframe(b"\x22" + tail, b"\x3a"))
    except SealringError:
        return
    except Exception as error:
        assert type(error).__name__ == "DecodeError"  # noqa: PT017
        return
    assert command.WhichOneof("command") == "step"


def test_a_length_has_at_most_five_bytes() -> None:
    assert reframe(b"\x22" + b"\x80" * 4 + b"\x00", b"\x3a") == b"\x3a" + b"\x80" * 4 + b"\x00"
    for message in (b"\x22" + b"\x80" * 5 + b"\x00", b"\x22\x80", b"\x22", b"", b"\x22\x01", b"\x22\x00x"):
        with pytest.raises(InvalidInput) as raised:
            reframe(message, b"\x3a")
        assert raised.value.reason == "BAD_MESSAGE"


class Caller:
    """A stream's context, and what is written to it."""

    def __init__(self, cluster: Any, role: Role) -> None:
        self.party = cluster.party(role)
        self.peer = self.party.peer
        self.written: list[bytes] = []

    def auth_context(self) -> dict[str, list[bytes]]:
        return {
            "transport_security_type": [b"ssl"],
            "peer_uri": [self.peer.uri.encode()],
            "x509_pem_cert": [to_pem(self.party.material.certificate)],
        }

    async def write(self, message: bytes) -> None:
        self.written.append(message)


async def said(*messages: bytes) -> Any:
    for message in messages:
        yield message


@pytest.mark.parametrize("role", [Role.MEMBER, Role.COORDINATOR, Role.OPERATOR])
async def test_nobody_but_a_gateway_schedules(cluster, role: Role) -> None:
    desk = Desk(0)
    caller = Caller(cluster, Role.GATEWAY)
    caller.peer = PeerIdentity("testbed", role, caller.party.id if role is Role.MEMBER else "operator")
    with pytest.raises(PermissionDenied) as raised:
        await ControlService(desk).schedule(said(), caller)
    assert (raised.value.reason, caller.written) == ("NOT_A_GATEWAY", [])


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ([], "NO_ATTACH"),
        ([b"\xff"], "BAD_MESSAGE"),
        ([packed(attach=control_pb2.Attach(ring="demo-0", epoch=1))], "NO_PROOF"),
        ([packed()], "NO_PROOF"),
    ],
)
async def test_a_stream_begins_with_an_offer(cluster, first: list[bytes], reason: str) -> None:
    caller = Caller(cluster, Role.GATEWAY)
    with pytest.raises(SealringError) as raised:
        await ControlService(Desk(0)).schedule(said(*first), caller)
    assert (raised.value.reason, caller.written) == (reason, [])


async def test_who_says_nothing_is_not_waited_for(cluster) -> None:
    async def silent() -> Any:
        await asyncio.Event().wait()
        yield b""

    with pytest.raises(SealringError) as raised:
        await ControlService(Desk(0), attach_seconds=0.001).schedule(silent(), Caller(cluster, Role.GATEWAY))
    assert raised.value.reason == "NO_ATTACH"


def stream_of(desk: Desk, renewals: list[Any] | None = None, **limits: int) -> control.GatewayStream:
    """The part of a stream that needs no connection."""
    tenure: Any = SimpleNamespace(renew=(renewals if renewals is not None else []).append)
    return control.GatewayStream("gateway", desk.epoch, desk.unsealer, tenure, desk.receipt_key, **limits)


async def test_messages_are_passed_on_while_their_reader_keeps_up() -> None:
    """By bytes: one of 16 MiB counts as much as a hundred thousand small ones."""
    stream = stream_of(Desk(0), max_waiting=4000)
    forward = control_pb2.Forward(guest=1, key="x" * 2500)
    stream.pass_on(forward=forward)
    assert stream.behind
    stream.say_goodbye("over")
    assert (len(await read(stream)), stream.behind) == (2, False)


def pieces(message: bytes) -> list[bytes]:
    """A message as a gateway sends it."""
    outgoing = Outgoing(lambda piece: packed(piece=piece))
    outgoing.put_long(message)
    sent = []
    while outgoing:
        sent.append(outgoing.take()[0])
    return sent


async def test_a_guests_prompt_in_pieces_reaches_the_gateway_that_schedules() -> None:
    desk = Desk(0)
    scheduler, guest = stream_of(desk), stream_of(desk)
    for stream in (scheduler, guest):
        desk.epoch.attach(stream)
    envelope = inference_pb2.Envelope(sealed=bytes(3 * PIECE_BYTES))
    asked = inference_pb2.GenerateRequest(envelope=envelope)
    sent = pieces(packed(forward=control_pb2.Forward(number=1, request=asked)))
    assert len(sent) == 4
    for message in sent:
        assert guest.take(message)
    guest.take(packed(forward=control_pb2.Forward(number=1, cancel=True)))
    written = list[control_pb2.ScheduleResponse]()

    async def write(message: bytes) -> None:
        written.append(unpacked(message))

    answering = asyncio.create_task(scheduler.answer(write))
    await until(lambda: len(written) == 5)
    assert not scheduler.behind
    scheduler.say_goodbye("over")
    await answering
    whole = b"".join(message.piece.data for message in written[:4])
    assert [message.piece.last for message in written[:4]] == [False, False, False, True]
    assert unpacked(whole).forward.request == asked
    assert [message.WhichOneof("message") for message in written[4:]] == ["forward", "goodbye"]
    assert written[4].forward.cancel


async def test_a_prompt_in_pieces_is_opened_and_a_step_comes_between(connect) -> None:
    desk, stream = await connect()
    envelope = inference_pb2.Envelope(clear=inference_pb2.Prompt(text="x" * (2 * PIECE_BYTES)))
    first, *others = pieces(packed(open=open_row(envelope=envelope)))
    await stream.send(first)
    await stream.send(step=control_pb2.Step(number=1))
    for message in others:
        await stream.send(message)
    await until(lambda: len(desk.engine.work) == 2)
    assert desk.engine.work[0].step.number == 1
    assert desk.engine.work[1].open_row.prompt == envelope.clear


@pytest.mark.parametrize(
    "message",
    [
        packed(step=control_pb2.Step(number=1)),
        b"",
        packed(piece=control_pb2.Piece(data=b"x", last=True)),
    ],
)
async def test_nothing_but_a_prompt_comes_in_pieces(message: bytes) -> None:
    stream = stream_of(Desk(0))
    with pytest.raises(InvalidInput) as caught:
        stream.take(packed(piece=control_pb2.Piece(data=message, last=True)))
    assert caught.value.reason == "BAD_MESSAGE"


async def read(stream: control.GatewayStream) -> list[control_pb2.ScheduleResponse]:
    """Everything that a stream has for its gateway, in order."""
    written: list[control_pb2.ScheduleResponse] = []

    async def write(message: bytes) -> None:
        written.append(unpacked(message))

    await stream.answer(write)
    return written


async def test_a_guests_cancel_arrives_though_the_scheduling_gateway_was_behind() -> None:
    """Each once, however often it is sent; a guest that leaves takes back everything at once."""
    desk = Desk(0)
    scheduler, staying, leaving = stream_of(desk, max_waiting=8000), stream_of(desk), stream_of(desk)
    for stream in (scheduler, staying, leaving):
        desk.epoch.attach(stream)
    scheduler.pass_on(forward=control_pb2.Forward(guest=1, number=4, key="x" * 4500))
    for guest, number in ((staying, 4), (staying, 9), (staying, 4), (leaving, 1)):
        guest.take(packed(forward=control_pb2.Forward(number=number, cancel=True)))
    desk.epoch.detach(leaving)
    reading = asyncio.create_task(read(scheduler))
    await until(lambda: not scheduler.behind)
    scheduler.say_goodbye("over")
    cancels = [one.forward for one in await reading if one.forward.cancel]
    assert sorted((one.guest, one.number) for one in cancels) == [(1, 4), (1, 9), (2, 0)]


async def test_a_guest_that_takes_back_more_than_can_be_held_has_to_go() -> None:
    desk = Desk(0)
    scheduler, guest = stream_of(desk, max_waiting=1 << 20), stream_of(desk)
    for stream in (scheduler, guest):
        desk.epoch.attach(stream)
    scheduler.pass_on(forward=control_pb2.Forward(guest=1, number=1, key="x" * 600_000))

    taken: list[int] = []

    async def flood() -> Any:
        for number in range(1, 2 * control.MAX_TAKEN_BACK):
            taken.append(number)
            yield packed(forward=control_pb2.Forward(number=number, cancel=True))

    await guest.read(flood())
    assert (len(taken), desk.faults) == (control.MAX_TAKEN_BACK + 1, [])
    desk.epoch.detach(guest)
    scheduler.say_goodbye("over")
    assert [one.forward.number for one in await read(scheduler) if one.forward.cancel] == [0]


async def test_a_guest_that_does_not_read_has_to_go_by_itself() -> None:
    desk = Desk(0)
    guest = stream_of(desk, max_guest=1000)
    guest.guest = 1
    for _ in range(5):
        guest.pass_on(forwarded=control_pb2.Forwarded(problem=membership_pb2.Problem(message="x" * 300)))
    written = await read(guest)
    assert [one.WhichOneof("message") for one in written] == ["forwarded", "forwarded", "goodbye"]
    assert (written[-1].goodbye.reason, desk.faults) == ("GATEWAY_SLOW", [])


async def test_waiting_bytes_are_bounded_and_nothing_follows_the_last() -> None:
    desk = Desk(0)
    stream = stream_of(desk, max_waiting=3000)
    problem = membership_pb2.Problem(message="x" * 1000)
    event = engine_pb2.EngineEvent(refused=control_pb2.RowRefused(row=2, problem=problem)).SerializeToString()
    for faults in ([], [], ["GATEWAY_SLOW"]):
        stream.row_event(event)
        assert desk.faults == faults
    stream.say_goodbye("stopping")
    stream.say_goodbye("again")
    stream.row_event(event)
    assert [one.WhichOneof("message") for one in await read(stream)] == ["refused", "refused", "goodbye"]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("LEAVING", "LEAVING"),
        ("X" * 40, "X" * 40),
        ("X" * 41, "UNKNOWN"),
        ("a secret", "UNKNOWN"),
        ("", "UNKNOWN"),
    ],
)
async def test_a_gateways_goodbye_is_one_word(reason: str, told: str) -> None:
    stream = stream_of(Desk(0))
    assert not stream.used
    assert stream.take(packed(ping=control_pb2.Ping(sequence=1)))
    assert stream.take(packed(goodbye=membership_pb2.Goodbye(reason=reason))) is False
    assert (stream.goodbye, stream.used) == (told, False)
    stream.close()


async def test_a_renewal_goes_to_who_checks_it_and_work_to_the_engine() -> None:
    desk, renewals = Desk(0), []
    stream = stream_of(desk, renewals)
    request = control_pb2.ScheduleRequest()
    request.renewal.SetInParent()
    assert stream.take(request.SerializeToString())
    assert renewals == [request.renewal]
    change = control_pb2.Change(evict=control_pb2.Evict(row=1))
    step = control_pb2.Step(number=1, changes=[change] * MAX_CHANGES)
    assert stream.take(packed(step=step))
    assert (stream.used, desk.engine.work[0].step) == (True, step)
    desk.epoch.engine = None
    with pytest.raises(SealringError) as raised:
        stream.take(packed(step=control_pb2.Step(number=2)))
    assert raised.value.reason == "EPOCH_ENDED"


@pytest.mark.parametrize("fields", [{"open": {}}, {"discard": {"row": 1}}, {"attach": {}}, {}])
async def test_what_is_not_the_place_of_a_member_is_refused(fields: dict[str, Any]) -> None:
    stream = stream_of(Desk(1))
    with pytest.raises(InvalidInput) as raised:
        stream.take(control_pb2.ScheduleRequest(**fields).SerializeToString())
    assert raised.value.reason == "BAD_MESSAGE"


async def test_a_step_of_very_many_changes_ends_the_epoch_before_anything_is_kept_of_it(connect) -> None:
    """With a sealed row open, what leaves is noted; a hostile gateway may not have a million noted."""
    desk, stream = await connect()
    row, _ = sealed_row(desk, 1)
    await stream.send(open=row)
    change = control_pb2.Change(evict=control_pb2.Evict(row=1))
    await stream.send(step=control_pb2.Step(number=1, changes=[change] * (MAX_CHANGES + 1)))
    await until(lambda: desk.faults)
    assert desk.faults == ["BAD_MESSAGE"]
    assert len(desk.engine.work) == 1


@pytest.mark.parametrize("moment", ["offer", "proof", "attach"])
async def test_a_gateway_that_is_thrown_out_before_it_attaches_is_refused(cluster, moment: str) -> None:
    """It opened its stream while it was in the roster, and says what it wants when it is not."""
    desk = Desk(0)
    allowed = [True]

    def check(cluster: str, identifier: str) -> bytes:
        if not allowed[0]:
            raise PermissionDenied("no", reason="GATEWAY_NOT_ALLOWED")
        return gateway.signer.public_key

    class Context(Caller):
        async def write(self, message: bytes) -> None:
            answers.put_nowait(message)

    context = Context(cluster, Role.GATEWAY)
    gateway = context.party
    desk.gateway_key = check  # type: ignore[method-assign]
    said: asyncio.Queue[bytes] = asyncio.Queue()
    answers: asyncio.Queue[bytes] = asyncio.Queue()

    async def requests() -> Any:
        while True:
            yield await said.get()

    class Call:
        """What a gateway's end of the stream would be."""

        async def write(self, message: bytes) -> None:
            kind = control_pb2.ScheduleRequest.FromString(message).WhichOneof("message")
            allowed[0] = allowed[0] and kind != moment
            said.put_nowait(message)

        async def read(self) -> bytes:
            return await answers.get()

    async def attach() -> None:
        own = identity(gateway.signer, "testbed")
        certificate = gateway.material.certificate
        options = {"called": desk.identity.id, "parse": unpacked}
        await introduce(Call(), packed, own, certificate, Purpose.SCHEDULE, **options)
        await Call().write(packed(attach=control_pb2.Attach(ring="demo-0", epoch=1)))

    serving = asyncio.create_task(ControlService(desk).schedule(requests(), context))
    attaching = asyncio.create_task(attach())
    with pytest.raises(PermissionDenied):
        await serving
    attaching.cancel()
    assert desk.epoch.gateway is None


async def test_a_gateway_that_has_said_when_it_pings_and_does_not_is_gone(
    connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(silence, "GRACE_SECONDS", 0.0)
    desk, stream = await connect()
    await stream.send(ping=control_pb2.Ping(sequence=1, next_ms=1))
    while await stream.next() is not None:  # a pong may come first
        pass
    await until(lambda: desk.epoch.gateway is None)
