"""The joining side against coordinators that lie; the honest one is in tests/coordinator."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leaftest import material
from refusals import refused

from sealring.mesh.clock import wall_clock
from sealring.mesh.crypto import (
    DEFAULT_SUITES,
    Ed25519Signer,
    KeyType,
    Label,
    SoftwareSigner,
    member_id,
    verify,
)
from sealring.mesh.errors import InvalidInput, PermissionDenied, SealringError
from sealring.mesh.member import JoinToken, NodeEvidence, enrol, enrolment, join_content
from sealring.mesh.pki import (
    ROLES,
    ClusterCA,
    LeafKey,
    PeerIdentity,
    Role,
    RootMetadata,
    encode_chain,
    sign_root,
    to_pem,
)
from sealring.mesh.roster import NO_PREVIOUS, Roster, RosterMember, check_roster, complete_roster, sign_roster
from sealring.mesh.rpc import Server, TlsStore, server_credentials
from sealring.mesh.trust.attestation import Posture, Statement, decode_statement
from sealring.mesh.trust.levels import TrustLevel
from sealring.v1 import membership_pb2, membership_pb2_grpc

DAY = 86400
EVIDENCE = NodeEvidence(b"s" * 32, b"m" * 32, ("127.0.0.1:7001",))


@dataclass
class Authority:
    """The cluster's keys, valid at the real time: gRPC's own TLS uses the real clock."""

    ca: ClusterCA
    roster_signer: Ed25519Signer
    root: RootMetadata


def make_authority(folder: Path) -> Authority:
    ca = ClusterCA.create(folder, "demo", now=wall_clock())
    root_signer, roster_signer = Ed25519Signer.generate(), Ed25519Signer.generate()
    now = int(wall_clock())
    draft = RootMetadata(
        cluster="demo",
        version=1,
        root_keys=(root_signer.public_key,),
        root_threshold=1,
        roster_keys=(roster_signer.public_key,),
        roster_threshold=1,
        authorities=(ca.certificate,),
        issued=now,
        expires=now + DAY,
    )
    return Authority(ca, roster_signer, sign_root(draft, [root_signer]))


class LyingCoordinator(membership_pb2_grpc.EnrolmentServicer):
    """Answers well, and then spoils the answer."""

    def __init__(self, authority: Authority, spoil: Callable[[Any, LyingCoordinator], None]) -> None:
        self.authority = authority
        self.spoil = spoil
        self.nonce = b"n" * 32
        self.request = membership_pb2.EnrolRequest()

    async def GetNonce(self, request: Any, context: Any) -> membership_pb2.GetNonceResponse:
        return membership_pb2.GetNonceResponse(nonce=self.nonce)

    async def Enrol(self, request: membership_pb2.EnrolRequest, context: Any) -> membership_pb2.EnrolResponse:
        self.request = request
        answer = membership_pb2.EnrolResponse(
            member_id=member_id(request.identity_key),
            cluster="demo",
            certificate_chain=self.certificate(),
            root_metadata=encode_chain(self.authority.root.chain),
            roster=self.roster(),
            coordinator_address="127.0.0.1:7700",
            name=request.name,
        )
        self.spoil(answer, self)
        return answer

    def certificate(self, *, csr: bytes = b"", peer: PeerIdentity | None = None) -> bytes:
        own = PeerIdentity("demo", Role.MEMBER, member_id(self.request.identity_key))
        return to_pem(
            self.authority.ca.issue(csr or self.request.csr, peer or own, lifetime=DAY, now=wall_clock())
        )

    def roster(
        self, *, with_member: bool = True, version: int = 1, age: int = 0, signer: Ed25519Signer | None = None
    ) -> bytes:
        issued = int(wall_clock()) - age
        key = self.request.identity_key
        member = RosterMember(
            id=member_id(key),
            identity_key=key,
            key_type=KeyType.SOFTWARE,
            sealing_key=self.request.sealing_key or b"s" * 32,
            level=TrustLevel.SOFTWARE,
            trust=10,
            attestation_hash=bytes(32),
            enrolled=1,
            attested_at=issued,
            challenged_at=issued,
            manifest_hash=bytes(32),
            addresses=("127.0.0.1:7001",),
        )
        draft = Roster(
            cluster="demo",
            root_version=1,
            version=version,
            previous=NO_PREVIOUS,
            issued=issued,
            expires=issued + 600,
            suites=DEFAULT_SUITES,
            trust_floor=10,
            min_trust=0,
            members=(member,) if with_member else (),
        )
        return sign_roster(complete_roster(draft), [signer or self.authority.roster_signer])


@dataclass
class Attempt:
    """A lying coordinator that listens, and the joiner's folder."""

    coordinator: LyingCoordinator
    address: str
    folder: Path

    async def join(self, **changes: Any) -> Any:
        authority = self.coordinator.authority
        values: dict[str, Any] = {
            "token": JoinToken.generate(authority.root.fingerprint, [self.address]).format(),
            "role": Role.MEMBER,
            "signer": SoftwareSigner.generate(),
            "state_dir": self.folder,
            "name": "alpha",
            "evidence": EVIDENCE,
        }
        return await enrol(**(values | changes))

    async def reason(self, **changes: Any) -> str:
        with pytest.raises(SealringError) as caught:
            await self.join(**changes)
        assert not (self.folder / "member.json").exists()
        return caught.value.reason


@pytest.fixture
def lying(tmp_path: Path) -> Any:
    authority = make_authority(tmp_path / "authority")

    @asynccontextmanager
    async def start(spoil: Callable[[Any, LyingCoordinator], None]) -> AsyncIterator[Attempt]:
        peer = PeerIdentity("demo", Role.COORDINATOR, "main")
        store = TlsStore(material(authority.ca, peer, root_chain=encode_chain(authority.root.chain)))
        coordinator = LyingCoordinator(authority, spoil)
        server = Server(
            [
                (
                    membership_pb2_grpc.add_EnrolmentServicer_to_server,
                    coordinator,
                    "sealring.v1.Enrolment",
                )
            ]
        )
        port = server.listen("127.0.0.1:0", server_credentials(store, require_client=False))
        await server.start()
        try:
            yield Attempt(coordinator, f"127.0.0.1:{port}", tmp_path / "node")
        finally:
            await server.stop(None)

    return start


def honest(answer: membership_pb2.EnrolResponse, coordinator: LyingCoordinator) -> None:
    pass


async def test_an_honest_answer_is_kept(lying: Any) -> None:
    async with lying(honest) as attempt:
        joined = await attempt.join()
        assert joined.roster.version == 1
        assert (attempt.folder / "member.json").exists()
        request = attempt.coordinator.request
        assert (request.name, list(request.addresses)) == ("alpha", ["127.0.0.1:7001"])
        assert (
            check_roster(
                (attempt.folder / "roster.dsse").read_bytes(),
                attempt.coordinator.authority.root,
                now=wall_clock(),
            )
            == joined.roster
        )
        assert attempt.folder.stat().st_mode & 0o777 == 0o700
        assert joined.state.coordinator == "127.0.0.1:7700"
        assert joined.state.join == attempt.address


async def test_a_node_shows_what_it_is_attested_by(lying: Any) -> None:
    evidence = dataclasses.replace(EVIDENCE, posture=Posture(sip=True), device_chain=(b"leaf", b"issuer"))
    async with lying(honest) as attempt:
        signer = SoftwareSigner.generate()
        await attempt.join(signer=signer, evidence=evidence)
        request = attempt.coordinator.request
    verify(signer.public_key, Label.JOIN, join_content("demo", request), request.signature)
    verify(signer.public_key, Label.ATTESTATION, request.attestation, request.attestation_signature)
    statement = decode_statement(request.attestation)
    assert abs(statement.timestamp - wall_clock()) < 600
    assert statement == Statement(
        cluster="demo",
        nonce=b"n" * 32,
        timestamp=statement.timestamp,
        identity_key=signer.public_key,
        key_type=KeyType.SOFTWARE,
        sealing_key=EVIDENCE.sealing_key,
        manifest_hash=EVIDENCE.manifest_hash,
        posture=Posture(sip=True),
    )
    assert list(request.device_chain) == [b"leaf", b"issuer"]


async def test_a_gateway_shows_none_of_that(lying: Any) -> None:
    async with lying(put(certificate_chain=b"no pem")) as attempt:
        assert await attempt.reason(role=Role.GATEWAY, evidence=None) == "BAD_CERTIFICATE"
        request = attempt.coordinator.request
    assert request.role == membership_pb2.ROLE_GATEWAY
    shown = (request.attestation, request.attestation_signature, request.sealing_key)
    assert (shown, [*request.addresses, *request.device_chain]) == ((b"", b"", b""), [])


async def test_a_root_older_than_the_one_that_the_server_showed_is_refused(
    lying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = enrolment.find_coordinator

    async def newer(*arguments: Any, **options: Any) -> Any:
        address, root = await find(*arguments, **options)
        return address, dataclasses.replace(root, version=2)

    monkeypatch.setattr(enrolment, "find_coordinator", newer)
    async with lying(honest) as attempt:
        assert await attempt.reason() == "BAD_ANSWER"


def put(**values: Any) -> Callable[[Any, LyingCoordinator], None]:
    def spoil(answer: Any, coordinator: LyingCoordinator) -> None:
        for name, value in values.items():
            setattr(answer, name, value(coordinator) if callable(value) else value)

    return spoil


def other_peer(**changes: Any) -> PeerIdentity:
    return PeerIdentity(**({"cluster": "demo", "role": Role.MEMBER, "id": "m" * 52} | changes))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (put(member_id="m" * 52), "BAD_ANSWER"),
        (put(cluster="other"), "BAD_ANSWER"),
        (put(coordinator_address="nowhere"), "BAD_ADDRESS"),
        (put(certificate_chain=b""), "BAD_CERTIFICATE"),
        (put(certificate_chain=b"no pem"), "BAD_CERTIFICATE"),
        (put(certificate_chain=lambda it: it.certificate(csr=LeafKey().csr())), "BAD_CERTIFICATE"),
        (put(certificate_chain=lambda it: it.certificate(peer=other_peer())), "BAD_CERTIFICATE"),
        (put(root_metadata=b""), "ROOT_CHAIN_LENGTH"),
        (put(root_metadata=b"noise"), "ROOT_MALFORMED"),
        (put(roster=b"noise"), "ENVELOPE_MALFORMED"),
        (put(roster=lambda it: it.roster(with_member=False)), "ROSTER_SELF_ABSENT"),
        (put(roster=lambda it: it.roster(age=5000)), "ROSTER_EXPIRED"),
        (put(roster=lambda it: it.roster(signer=Ed25519Signer.generate())), "THRESHOLD_NOT_MET"),
    ],
)
async def test_an_answer_that_lies_is_refused_and_nothing_is_enrolled(
    lying: Any, spoil: Callable[[Any, LyingCoordinator], None], reason: str
) -> None:
    async with lying(spoil) as attempt:
        assert await attempt.reason() == reason
        begun = reason == "ROSTER_SELF_ABSENT"
        assert attempt.folder.exists() == begun, "what cannot be believed leaves nothing on the disk"


async def test_a_certificate_by_another_authority_is_refused(lying: Any, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other")

    def spoil(answer: Any, coordinator: LyingCoordinator) -> None:
        peer = PeerIdentity("demo", Role.MEMBER, member_id(coordinator.request.identity_key))
        leaf = other.ca.issue(coordinator.request.csr, peer, lifetime=DAY, now=wall_clock())
        answer.certificate_chain = to_pem(leaf)

    async with lying(spoil) as attempt:
        assert await attempt.reason() == "NOT_ISSUED_HERE"


async def test_a_roster_older_than_one_used_before_is_refused(lying: Any) -> None:
    signer = SoftwareSigner.generate()
    version = 5

    def spoil(answer: Any, coordinator: LyingCoordinator) -> None:
        answer.roster = coordinator.roster(version=version)

    async with lying(spoil) as attempt:
        await attempt.join(signer=signer)
        version = 4
        with refused("ROSTER_ROLLBACK"):
            await attempt.join(signer=signer)


async def test_a_short_nonce_is_not_signed(lying: Any) -> None:
    async with lying(honest) as attempt:
        attempt.coordinator.nonce = b"short"
        assert await attempt.reason() == "BAD_ANSWER"
        assert not attempt.coordinator.request.identity_key


async def test_another_root_sees_nothing_of_us(lying: Any) -> None:
    async with lying(honest) as attempt:
        assert (
            await attempt.reason(token=JoinToken.generate(bytes(32), [attempt.address]).format())
            == "ROOT_PIN"
        )
        assert not attempt.coordinator.request.identity_key


@pytest.mark.parametrize(
    "changes",
    [{"token": "sr2.no"}, {"name": "Not A Name"}],
)
async def test_bad_input_is_refused_before_anything_is_sent(lying: Any, changes: dict[str, str]) -> None:
    async with lying(honest) as attempt:
        with pytest.raises(InvalidInput):
            await attempt.join(**changes)
        assert not attempt.coordinator.request.identity_key


async def test_a_refusal_is_told_as_the_coordinator_says_it(lying: Any) -> None:
    def refuse(answer: Any, coordinator: LyingCoordinator) -> None:
        raise PermissionDenied("no such token", hint="ask for another", reason="JOIN_REFUSED")

    async with lying(refuse) as attempt:
        with pytest.raises(PermissionDenied) as caught:
            await attempt.join()
        told = caught.value
        assert (told.message, told.hint, told.reason) == ("no such token", "ask for another", "JOIN_REFUSED")


contents = st.fixed_dictionaries(
    {
        "cluster": st.text(max_size=5),
        "token_id": st.text(max_size=5),
        "role": st.sampled_from(list(ROLES)),
        "nonce": st.binary(max_size=5),
        "identity_key": st.binary(max_size=5),
        "csr": st.binary(max_size=5),
        "sealing_key": st.binary(max_size=5),
        "name": st.text(max_size=5),
        "addresses": st.lists(st.text(max_size=5), max_size=3),
    }
)


@given(contents, contents)
def test_different_joins_never_have_the_same_content(first: dict[str, Any], second: dict[str, Any]) -> None:
    def content(cluster: str, **fields: Any) -> bytes:
        return join_content(cluster, membership_pb2.EnrolRequest(**fields))

    assert (content(**first) == content(**second)) == (first == second)
