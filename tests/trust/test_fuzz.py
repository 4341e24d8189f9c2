"""Every parser of outside bytes: only errors of the tree come out, soon, and without much memory.

`SEALRING_FUZZ=50 pytest tests/trust/test_fuzz.py` tries fifty times as much as a run in CI does.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from playedengine import PlayedEngine

from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.edge.http.body import parse_object
from sealring.mesh.crypto import (
    Label,
    SoftwareSigner,
    Suite,
    load_public_key,
    member_id,
    parse_envelope,
    sign_envelope,
    verify,
)
from sealring.mesh.errors import EnvelopeError, SealringError, Unauthenticated
from sealring.mesh.member import (
    JoinToken,
    MachineState,
    load_machine_state,
    save_machine_state,
    verify_coordinator_leaf,
)
from sealring.mesh.pki import PAYLOAD_TYPE as ROOT_TYPE
from sealring.mesh.pki import (
    ClusterCA,
    LeafKey,
    PeerIdentity,
    Role,
    TlsMaterial,
    certificate_peer,
    check_issued_by,
    decode_chain,
    encode_chain,
    follow_root,
    load_certificate,
    verify_root_chain,
)
from sealring.mesh.prompt.sealed import ReplayGuard, RequestInfo, SealingKey, seal_request
from sealring.mesh.prompt.validate import validate_prompt, validate_request
from sealring.mesh.ring import routing_key
from sealring.mesh.roster import PAYLOAD_TYPE as ROSTER_TYPE
from sealring.mesh.roster import RosterStateFile, check_roster, encode_roster
from sealring.mesh.settings.config import load
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.trust.attestation import decode_statement
from sealring.node.control.service import GatewayStream, parse_request, reframe
from sealring.node.daemon.plan import plan_epoch
from sealring.node.daemon.receipts import SignedOnce
from sealring.node.link.handshake import EphemeralLedger, Initiator, Responder
from sealring.node.link.keys import SessionKeys
from sealring.node.link.params import LinkParams
from sealring.node.link.records import Link
from sealring.node.settings import NodeSettings
from sealring.node.wire.channel import Kind, RecordHeader, decode_message, encode_message
from sealring.node.wire.frames import FrameSocket
from sealring.testing import PaperCluster
from sealring.v1 import control_pb2, engine_pb2, inference_pb2, links_pb2, membership_pb2, proof_pb2

HARD = int(os.environ.get("SEALRING_FUZZ", "1"))
MODEL = Path(__file__).parents[2] / "examples" / "demo_model" / "model"
MEMORY = 256 << 20
pytestmark = pytest.mark.timeout(300 * HARD)
SIGNERS = [SoftwareSigner.generate(), SoftwareSigner.generate()]
NOW = 1_800_000_000


def clock() -> float:
    return NOW


PAPER = PaperCluster(size=2, clock=clock)


def fuzz(examples: int = 100) -> Callable[[Any], Any]:
    """Settings for `examples` tries, times SEALRING_FUZZ. Input that hangs exceeds a test's time limit."""
    return settings(max_examples=examples * HARD, suppress_health_check=list(HealthCheck))


@st.composite
def damaged(draw: st.DrawFn, *originals: bytes) -> bytes:
    """Something that is nearly right, or not at all."""
    if not originals or draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, 1 << 16)) % max(1, len(data))
        match draw(st.integers(0, 6)):
            case 0:
                del data[place:]
            case 1:
                data[place:place] = draw(st.binary(min_size=1, max_size=8))
            case 2:
                data[place : place + 4] = draw(st.sampled_from([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"]))
            case 3:
                data[place : place + draw(st.integers(1, 40))] = b""
            case 4:
                data[place:place] = data[place : place + draw(st.integers(1, 40))]
            case 5:
                data[place:place] = draw(
                    st.sampled_from([b"[" * 3000, b'{"a":' * 3000, b"9" * 6000, b"null"])
                )
            case _:
                data[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
    return bytes(data)


def survives(parse: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result, or None when it was refused as it should be."""
    try:
        return parse(*arguments, **options)
    except SealringError as error:
        refusal = error
    assert refusal.reason
    return None


@pytest.fixture(autouse=True)
def _bounded_memory() -> Any:
    process = psutil.Process()
    before = process.memory_info().rss
    yield
    assert process.memory_info().rss - before < MEMORY


# Signed documents


@fuzz()
@given(damaged(PAPER.envelope))
def test_envelopes_of_rosters(data: bytes) -> None:
    survives(parse_envelope, data, payload_type=ROSTER_TYPE, max_payload=1 << 20)
    if data != PAPER.envelope:
        assert survives(check_roster, data, PAPER.root, now=NOW) in (None, PAPER.roster)


@fuzz()
@given(damaged(encode_roster(PAPER.roster)))
def test_rosters_that_the_roster_key_did_sign(payload: bytes) -> None:
    if payload:
        envelope = sign_envelope(ROSTER_TYPE, payload, [PAPER.authority.roster_signers[0]])
        survives(check_roster, envelope, PAPER.root, now=NOW)


@fuzz()
@given(damaged(*PAPER.root.chain))
def test_root_metadata(data: bytes) -> None:
    survives(follow_root, data, None)
    survives(verify_root_chain, [data], PAPER.root.fingerprint, now=NOW)


@fuzz()
@given(damaged(parse_envelope(PAPER.root.chain[0], payload_type=ROOT_TYPE, max_payload=1 << 20).payload))
def test_root_metadata_that_the_root_key_did_sign(payload: bytes) -> None:
    if payload:
        survives(follow_root, sign_envelope(ROOT_TYPE, payload, [PAPER.authority.root_signers[0]]), None)


@fuzz()
@given(damaged(encode_chain(PAPER.root.chain)))
def test_chains_of_root_metadata(data: bytes) -> None:
    survives(decode_chain, data)


# Identities, tokens, certificates


def _as_text(data: bytes) -> str:
    return data.decode("latin-1")


@fuzz()
@given(
    st.text(max_size=200)
    | damaged(JoinToken.generate(bytes(32), ["[::1]:7701"]).format().encode()).map(_as_text)
)
def test_tokens_and_addresses(text: str) -> None:
    survives(JoinToken.parse, text)
    survives(parse_address, text)


@fuzz()
@given(damaged(SIGNERS[0].public_key), damaged(SIGNERS[0].sign(Label.JOIN, b"x")))
def test_keys_and_signatures(key: bytes, signature: bytes) -> None:
    survives(load_public_key, key)
    survives(verify, SIGNERS[0].public_key, Label.JOIN, b"y", signature)


@fuzz()
@given(damaged(PAPER.root.authorities[0]))
def test_certificates(data: bytes) -> None:
    certificate = survives(load_certificate, data)
    if certificate is not None:
        survives(check_issued_by, certificate, PAPER.root.authorities, now=NOW)
        survives(certificate_peer, certificate)
    survives(verify_coordinator_leaf, data, PAPER.root.fingerprint, now=NOW)


def test_signing_requests(tmp_path: Path) -> None:
    ca = ClusterCA.create(tmp_path, "demo", now=NOW)
    peer = PeerIdentity("demo", Role.MEMBER, "a" * 52)

    @fuzz()
    @given(damaged(LeafKey().csr()))
    def run(csr: bytes) -> None:
        survives(ca.issue, csr, peer, lifetime=60, now=NOW)

    run()


@fuzz()
@given(damaged(b'{"cluster":"demo","nonce":"AAAA","version":1}'))
def test_attestation_statements(data: bytes) -> None:
    survives(decode_statement, data)


# Links


def ends() -> tuple[Initiator, Responder]:
    ids = [member_id(signer.public_key) for signer in SIGNERS]

    def params(own: int) -> LinkParams:
        peer = SIGNERS[1 - own].public_key
        suites = (Suite.X25519_AES256GCM,)
        return LinkParams("demo", "r", 1, 0, 1, own, 1, bytes(32), ids[own], ids[1 - own], peer, suites)

    return Initiator(params(0), SIGNERS[0]), Responder(params(1), SIGNERS[1], EphemeralLedger())


def keys() -> tuple[SessionKeys, SessionKeys]:
    initiator, responder = ends()
    proof = initiator.on_message(responder.on_message(initiator.start()).message).message
    last = responder.on_message(proof)
    return initiator.on_message(last.message).session, last.session


@fuzz()
@given(st.integers(0, 3), st.data())
def test_handshake_messages(turn: int, data: st.DataObject) -> None:
    """One message of the four is damaged; its receiver gets no keys, whatever the damage."""
    initiator, responder = ends()
    frame: bytes | None = initiator.start()
    for number in range(4):
        assert frame is not None
        good = frame
        if number == turn:
            frame = data.draw(damaged(good))
        machine = responder if number % 2 == 0 else initiator
        outcome = survives(machine.on_message, frame)
        if frame != good:
            if outcome is not None:  # a hello with another nonce is a hello: the other end finds it out
                assert outcome.session is None
                assert survives(initiator.on_message, outcome.message) is None
            return
        assert outcome is not None
        frame = outcome.message


@fuzz()
@given(damaged(keys()[0].to_carrier()))
def test_carrier_keys(data: bytes) -> None:
    survives(SessionKeys.from_carrier, data)


@fuzz()
@given(st.data())
def test_notes_and_records(data: st.DataObject) -> None:
    first, second = keys()
    note = first.seal_note(b"ring address", b"127.0.0.1:5")
    wrong = data.draw(damaged(note))
    if wrong != note:
        assert survives(second.open_note, b"ring address", wrong) is None
    sender, receiver = Link(first), Link(second)
    receiver.opener.open_confirmation(sender.sealer.seal_confirmation())
    header = RecordHeader(Kind.TOKENS, 1, bytes(32), "uint32", (4,), 16)
    sealed = bytearray(32)
    sender.sealer.seal_into(b"sixteen bytes...", sealed, header)
    wrong = data.draw(damaged(bytes(sealed)))
    out = bytearray(16)
    if wrong != sealed:
        assert survives(receiver.opener.open_into, wrong, out, header) is None
        assert out == bytes(16)
        assert receiver.poisoned


@fuzz()
@given(st.data())
def test_sealed_requests_and_replies(data: st.DataObject) -> None:
    key, guard = SealingKey(), ReplayGuard(clock=clock)
    info = RequestInfo("demo", secrets.token_bytes(16), NOW + 60, bytes(32))
    sealed, opener = seal_request(key.public_key, info, b"body")
    wrong = data.draw(damaged(sealed))
    if wrong != sealed:
        assert survives(key.open_request, wrong, info, guard) is None
    chunk = key.open_request(sealed, info, guard).reply.seal(b"text")
    wrong = data.draw(damaged(chunk))
    if wrong != chunk:
        assert survives(opener.open, wrong) is None
    survives(seal_request, data.draw(damaged(key.public_key)), info, b"body")


# Pipes between a daemon and its children


def test_frames() -> None:
    body = engine_pb2.EngineCommand(discard=control_pb2.DiscardRow(row=7)).SerializeToString()

    @fuzz()
    @given(damaged(struct.pack(">I", len(body)) + body))
    def run(data: bytes) -> None:
        left, right = socket.socketpair()
        frames = FrameSocket(left)
        right.sendall(data[: 64 << 10])
        right.close()
        while survives(frames.receive, engine_pb2.EngineCommand) is not None:
            pass
        frames.close()

    run()


@fuzz()
@given(damaged(encode_message(RecordHeader(Kind.TOKENS, 1, bytes(32), "uint32", (4,), 16), 0)))
def test_messages_of_the_data_channel(data: bytes) -> None:
    size = len(encode_message(RecordHeader(Kind.TOKENS, 1, bytes(32), "", (), 0), 0))
    survives(decode_message, data[:size].ljust(size, b"\0"))


# What a gateway, a coordinator or a client says


class Plan:
    ring, epoch, deployment, rank, size, kv_budget = "demo-0", 1, "demo", 0, 1, 1 << 20
    backend = ""
    members = PAPER.roster.rings[0].members


class Gate:
    async def pass_step(self) -> None:
        return

    def passed(self, step: int) -> None:
        return


class Epoch:
    """Keeps the fault that would have ended it."""

    def __init__(self) -> None:
        self.plan, self.engine, self.gate = Plan(), PlayedEngine(), Gate()
        self.faults: list[BaseException] = []
        self.signed_once = SignedOnce()

    def fault(self, error: BaseException) -> None:
        self.faults.append(error)


class Stranger:
    """A tenure that no proof renews."""

    def renew(self, renewal: proof_pb2.ProofRenewal) -> None:
        raise Unauthenticated("no proof", reason="BAD_PROOF")


class Unsealer:
    """One that opens nothing: no prompt here is sealed to it."""

    def open(self, open_row: control_pb2.OpenRow, plan: Plan) -> None:
        raise EnvelopeError("sealed message cannot be decrypted", reason="ENVELOPE_REFUSED")


REQUESTS = [
    control_pb2.ScheduleRequest(
        step=control_pb2.Step(number=1, prefill=control_pb2.Prefill(chunks=[control_pb2.Chunk(row=1, end=5)]))
    ),
    control_pb2.ScheduleRequest(
        open=control_pb2.OpenRow(
            row=1,
            deployment="demo",
            max_tokens=3,
            envelope=inference_pb2.Envelope(clear=inference_pb2.Prompt(text="x")),
        )
    ),
    control_pb2.ScheduleRequest(discard=control_pb2.DiscardRow(row=1)),
    control_pb2.ScheduleRequest(ping=control_pb2.Ping(sequence=1)),
    control_pb2.ScheduleRequest(renewal=proof_pb2.ProofRenewal(certificate=b"x")),
]


@fuzz()
@given(st.lists(damaged(*(one.SerializeToString() for one in REQUESTS)), max_size=4))
def test_what_a_gateway_schedules(messages: list[bytes]) -> None:
    """Through the handler: an engine gets commands that parse, an epoch ends by an error of the tree."""

    async def requests() -> Any:
        for message in messages:
            yield message

    epoch = Epoch()
    stream = GatewayStream("gateway", epoch, Unsealer(), Stranger(), Stranger())  # type: ignore[arg-type]
    asyncio.run(stream.read(requests()))
    assert all(isinstance(error, SealringError) for error in epoch.faults), epoch.faults
    for message in messages:
        survives(parse_request, message)
        survives(reframe, message, b"\x3a")


@fuzz()
@given(
    damaged(
        membership_pb2.PrepareEpoch(
            ring=PAPER.roster.rings[0].id,
            epoch=1,
            roster_version=PAPER.roster.version,
            roster_hash=PAPER.roster.hash,
            model="model",
            model_digest=("33" * 32),
            context=2048,
            max_rows=4,
            kv_budget=1 << 20,
            prefill_chunk=16,
        ).SerializeToString()
    )
)
def test_what_a_coordinator_prepares(data: bytes) -> None:
    message = parsed(membership_pb2.PrepareEpoch, data)
    if message is not None:
        survives(plan_epoch, message, PAPER.roster, PAPER.roster.rings[0].members[0].id)


@fuzz()
@given(
    damaged(
        inference_pb2.GenerateRequest(
            model="demo",
            prompt_cache_key="conversation",
            envelope=inference_pb2.Envelope(
                clear=inference_pb2.Prompt(
                    chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="x")]),
                    sampling=inference_pb2.Sampling(
                        temperature=0.5,
                        top_p=0.9,
                        repetition_penalty=1.5,
                        presence_penalty=0.5,
                        logit_bias={7: -100, 8: 2},
                        logprobs=3,
                    ),
                )
            ),
        ).SerializeToString()
    )
)
def test_what_a_client_asks_over_grpc(data: bytes) -> None:
    message = parsed(inference_pb2.GenerateRequest, data)
    if message is not None:
        survives(validate_request, message)
        survives(validate_prompt, message.envelope.clear)
        survives(routing_key, bytes(32), "tenant", message.prompt_cache_key, message.envelope.clear)
        survives(routing_key, bytes(32), "tenant", None, message.envelope.clear)


@fuzz()
@given(damaged(links_pb2.LinkHello(ring="r", epoch=1, to_rank=1).SerializeToString()))
def test_hellos(data: bytes) -> None:
    parsed(links_pb2.HandshakeFrame, data)


def parsed(kind: Any, data: bytes) -> Any:
    """As gRPC does it before a handler is called."""
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(data)
    except DecodeError:
        return None


CHAT = (
    b'{"model":"demo","prompt_cache_key":"conversation","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"stop":["x"],'
    b'"temperature":0.5,"max_tokens":5,"stream":true,"stream_options":{"include_usage":true},"user":"u"}'
)
COMPLETION = b'{"model":"demo","prompt":"a","max_tokens":5,"top_p":0.9,"seed":1,"stop":"x","echo":false}'


@fuzz(150)
@given(damaged(CHAT, COMPLETION))
def test_http_bodies(data: bytes) -> None:
    value = survives(parse_object, data)
    if value is None:
        return
    for ask in (ask_chat, ask_completion):
        asked = survives(ask, value, "request")
        if asked is not None:
            survives(validate_request, asked.request)


# Files


def test_settings(tmp_path: Path) -> None:
    good = b'[node]\nname = "a"\nlisten = "127.0.0.1:1"\nmodels = ["/x"]\nmemory_limit = 99999999\n'
    file = tmp_path / "sealring.toml"

    @fuzz()
    @given(damaged(good))
    def run(data: bytes) -> None:
        file.write_bytes(data)
        survives(load, NodeSettings, "node", file=file, environment={})
        text = data.decode("latin-1").replace("\0", "")
        survives(load, NodeSettings, "node", environment={"SEALRING_NODE_MODELS": text})

    run()


def test_roster_state(tmp_path: Path) -> None:
    state = RosterStateFile(tmp_path / "state")
    state.create("demo")
    good = state.path.read_bytes()

    @fuzz()
    @given(damaged(good))
    def run(data: bytes) -> None:
        state.path.write_bytes(data)
        survives(state.load)

    run()


def test_enrolments(tmp_path: Path) -> None:
    ca = ClusterCA.create(tmp_path / "ca", "paper", now=NOW)
    leaf, peer = LeafKey(), PeerIdentity("paper", Role.MEMBER, member_id(SIGNERS[0].public_key))
    material = TlsMaterial(
        leaf.private_pem(), ca.issue(leaf.csr(), peer, lifetime=600, now=NOW), PAPER.root.authorities
    )
    folder = tmp_path / "member"
    state = MachineState(peer, "n", "127.0.0.1:1", PAPER.root.fingerprint, PAPER.root, material)
    save_machine_state(folder, state)
    assert load_machine_state(folder).peer == peer
    goods = {
        name: (folder / name).read_bytes() for name in ("member.json", "tls.pem", "root.dsse", "tls.key")
    }

    @fuzz()
    @given(st.sampled_from(sorted(goods)), st.data())
    def run(name: str, data: st.DataObject) -> None:
        (folder / name).write_bytes(data.draw(damaged(goods[name])))
        survives(load_machine_state, folder)
        (folder / name).write_bytes(goods[name])

    run()


def test_weights(tmp_path: Path) -> None:
    from sealring.node.engine import read_header, weight_files

    header = b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"__metadata__":{"x":"y"}}'
    good = struct.pack("<Q", len(header)) + header + bytes(4)
    index = b'{"weight_map":{"a":"model.safetensors"}}'
    file = tmp_path / "model.safetensors"

    @fuzz()
    @given(damaged(good), damaged(index))
    def run(data: bytes, listed: bytes) -> None:
        file.write_bytes(data)
        (tmp_path / "model.safetensors.index.json").write_bytes(listed)
        survives(read_header, file)
        survives(weight_files, tmp_path)

    run()


def test_model_configurations(tmp_path: Path) -> None:
    from sealring.node.engine import read_config

    @fuzz()
    @given(damaged((MODEL / "config.json").read_bytes()))
    def run(data: bytes) -> None:
        (tmp_path / "config.json").write_bytes(data)
        survives(read_config, tmp_path)

    run()


def test_tokenizers(tmp_path: Path) -> None:
    from sealring.node.engine.text import load_tokenizer

    for name in ("config.json", "generation_config.json"):
        shutil.copy(MODEL / name, tmp_path / name)
    described = json.loads((MODEL / "tokenizer_config.json").read_text())
    del described["chat_template"]  # which would be tried in a process of its own each time
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    good = (MODEL / "tokenizer.json").read_bytes()

    @fuzz(60)
    @given(damaged(good[:4000] + good[-200:], good))
    def run(data: bytes) -> None:
        (tmp_path / "tokenizer.json").write_bytes(data)
        survives(load_tokenizer, tmp_path)

    run()
