"""Joining a cluster with a token: everything is verified before it is used, and nothing is half written.

Root metadata is fetched and checked against the token's pin before anything is sent. The join signature by
the identity key covers the coordinator's nonce and all that the answer will bind to it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.encoding import encode_base32, pack_fields
from sealring.mesh.crypto.identity import Signer, member_id
from sealring.mesh.crypto.keys import KeyType, Label
from sealring.mesh.errors import PermissionDenied
from sealring.mesh.member.bootstrap import JoinToken, find_coordinator
from sealring.mesh.member.state import ROSTER, ROSTER_STATE, MachineState, own_material, save_machine_state
from sealring.mesh.names import check_name
from sealring.mesh.pki.certificates import PROTO_ROLES, ROLES, LeafKey, PeerIdentity, Role
from sealring.mesh.pki.root import RootMetadata, decode_chain, verify_root_chain
from sealring.mesh.roster.memory import RosterStateFile
from sealring.mesh.roster.model import Roster
from sealring.mesh.roster.reader import RosterReader, check_roster
from sealring.mesh.rpc.reach import patiently
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import joining_channel
from sealring.mesh.system.addresses import parse_address
from sealring.mesh.system.files import write_atomic
from sealring.mesh.trust.attestation import NONCE_BYTES, UNKNOWN_POSTURE, Posture, Statement, sign_statement
from sealring.v1 import membership_pb2, membership_pb2_grpc

_CONTENT = b"sealring join v1"


@dataclass(frozen=True)
class NodeEvidence:
    """A node's evidence besides its identity: HPKE public key, manifest hash, facts of its machine.

    `device_chain` is Apple's attestation of the machine, DER, leaf first; empty without one.
    """

    sealing_key: bytes
    manifest_hash: bytes
    addresses: tuple[str, ...]
    posture: Posture = UNKNOWN_POSTURE
    device_chain: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Enrolled:
    """A finished join, all of it in the state folder.

    The machine's name may differ from the requested one if another machine has that.
    """

    state: MachineState
    roster: Roster


def join_content(cluster: str, request: membership_pb2.EnrolRequest) -> bytes:
    """The bytes of the join signature, under the label `join`: injective, each field behind its length."""
    return pack_fields(
        _CONTENT,
        cluster.encode(),
        request.token_id.encode(),
        ROLES[request.role].encode(),
        request.nonce,
        request.identity_key,
        hashlib.sha256(request.csr).digest(),
        request.sealing_key,
        request.name.encode(),
        *(address.encode() for address in request.addresses),
    )


async def enrol(
    *,
    token: str,
    role: Role,
    signer: Signer,
    state_dir: Path,
    name: str,
    evidence: NodeEvidence | None = None,
    deadline: float = 30.0,
    clock: Clock = wall_clock,
) -> Enrolled:
    """Join the cluster of the token at the first of its addresses that answers, and keep the result.

    Nodes bring `evidence`, gateways none. `signer` is the identity key of `state_dir`. Raises InvalidInput
    (BAD_TOKEN, BAD_NAME), RosterError and CertificateError when the coordinator does not have the pinned
    root, PermissionDenied (JOIN_REFUSED), Unavailable.
    """
    pinned = JoinToken.parse(token)
    check_name(name, "name")
    coordinator, root = await patiently(
        lambda: find_coordinator(pinned.root_sha256, pinned.addresses, deadline=deadline, clock=clock)
    )
    leaf = LeafKey()
    async with joining_channel(coordinator, root.authorities) as channel:
        stub = membership_pb2_grpc.EnrolmentStub(channel)

        async def fresh_nonce() -> bytes:
            asked = membership_pb2.GetNonceRequest()
            try:
                answer = await stub.GetNonce(asked, timeout=deadline, wait_for_ready=True)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None
            return bytes(answer.nonce)

        nonce = await patiently(fresh_nonce)
        peer = PeerIdentity(root.cluster, role, member_id(signer.public_key))
        request = _request(pinned, peer, signer, name, leaf.csr(), nonce, evidence, clock())
        try:
            # once: whether a call that broke off has spent the token's use cannot be known here
            answer = await stub.Enrol(request, timeout=deadline, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return _keep(answer, peer, pinned, leaf, root, state_dir, coordinator, clock)


def _request(
    token: JoinToken,
    peer: PeerIdentity,
    signer: Signer,
    name: str,
    csr: bytes,
    nonce: bytes,
    evidence: NodeEvidence | None,
    now: float,
) -> membership_pb2.EnrolRequest:
    if len(nonce) != NONCE_BYTES:
        raise _bad_answer("its nonce has a wrong length")
    request = membership_pb2.EnrolRequest(
        token_id=token.token_id,
        token_secret=encode_base32(token.secret),
        role=PROTO_ROLES[peer.role],
        identity_key=signer.public_key,
        key_type=signer.key_type,
        csr=csr,
        nonce=nonce,
        sealing_key=evidence.sealing_key if evidence else b"",
        addresses=evidence.addresses if evidence else (),
        name=name,
    )
    request.signature = signer.sign(Label.JOIN, join_content(peer.cluster, request))
    if evidence is not None:
        statement = Statement(
            cluster=peer.cluster,
            nonce=nonce,
            timestamp=int(now),
            identity_key=signer.public_key,
            key_type=KeyType(signer.key_type),
            sealing_key=evidence.sealing_key,
            manifest_hash=evidence.manifest_hash,
            posture=evidence.posture,
        )
        request.attestation, request.attestation_signature = sign_statement(signer, statement)
        request.device_chain.extend(evidence.device_chain)
    return request


def _keep(
    answer: membership_pb2.EnrolResponse,
    peer: PeerIdentity,
    token: JoinToken,
    leaf: LeafKey,
    fetched: RootMetadata,
    state_dir: Path,
    join: str,
    clock: Clock,
) -> Enrolled:
    """Verify the whole answer, then write it; the rollback memory starts with its roster."""
    now = clock()
    root = verify_root_chain(decode_chain(answer.root_metadata), token.root_sha256, now=now)
    if root.version < fetched.version:
        raise _bad_answer("its root metadata is older than the one in its certificate")
    if (answer.member_id, answer.cluster) != (peer.id, peer.cluster):
        raise _bad_answer("it names another member or cluster")
    parse_address(answer.coordinator_address)
    material = own_material(answer.certificate_chain, leaf, peer, root.authorities, now=now)
    check_roster(answer.roster, root, now=now)
    name = check_name(answer.name, "name")
    state = MachineState(peer, name, answer.coordinator_address, token.root_sha256, root, material, join)
    RosterStateFile(state_dir / ROSTER_STATE).create(peer.cluster)
    roster = RosterReader(root, state_dir / ROSTER_STATE, peer.id, clock=clock).accept(answer.roster)
    write_atomic(state_dir / ROSTER, answer.roster)
    save_machine_state(state_dir, state)
    return Enrolled(state, roster)


def _bad_answer(what: str) -> PermissionDenied:
    return PermissionDenied(
        f"the coordinator's answer is refused: {what}",
        hint="run the same release everywhere, and check the coordinator's log",
        reason="BAD_ANSWER",
    )
