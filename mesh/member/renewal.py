"""Renewal by identity: an enrolled machine whose certificate has expired gets another.

It cannot use mTLS, so it calls the join address. The coordinator shows the pinned root in its certificate
(`mesh/member/bootstrap.py`), and the machine signs with its identity key. Only an enrolled machine gets a
certificate. The signature covers the coordinator's nonce, the key of its certificate and the machine's new
TLS key: it is of no use at another time, to another server or for another key.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import grpc
import grpc.aio

from sealring.mesh.clock import Clock, wall_clock
from sealring.mesh.crypto.encoding import pack_fields
from sealring.mesh.crypto.identity import Signer
from sealring.mesh.crypto.keys import Label
from sealring.mesh.errors import FailedPrecondition
from sealring.mesh.member.bootstrap import fetch_leaf, find_coordinator, verify_coordinator_leaf
from sealring.mesh.pki.certificates import key_hash
from sealring.mesh.rpc.status import from_rpc_error
from sealring.mesh.rpc.tls import joining_channel
from sealring.mesh.system.addresses import parse_address
from sealring.v1 import membership_pb2, membership_pb2_grpc

DEADLINE_SECONDS = 10.0
_CONTENT = b"sealring renewal v1"


def renewal_content(
    *, cluster: str, nonce: bytes, server_key: bytes, identity_key: bytes, csr: bytes
) -> bytes:
    """The bytes to sign under the label `identity csr`; `server_key` is the hash of the coordinator's TLS
    key."""
    fields = (cluster.encode(), nonce, server_key, identity_key, hashlib.sha256(csr).digest())
    return pack_fields(_CONTENT, *fields)


async def renew_by_identity(
    addresses: Sequence[str], root_sha256: bytes, signer: Signer, csr: bytes, *, clock: Clock = wall_clock
) -> membership_pb2.RenewResponse:
    """The answer of the coordinator at one of these join addresses (host:port), not verified.

    Raises FailedPrecondition (NO_JOIN_ADDRESS), RosterError (ROOT_*) and CertificateError for a server that
    is not the pinned root's coordinator, PermissionDenied (RENEWAL_REFUSED), Unavailable, DeadlineExceeded.
    """
    if not addresses:
        raise FailedPrecondition(
            "the certificate is not valid now, and the address where this machine joined is not on record",
            hint="an older release enrolled it: join again in its folder, with a new token",
            reason="NO_JOIN_ADDRESS",
        )
    address, _ = await find_coordinator(root_sha256, addresses, deadline=DEADLINE_SECONDS, clock=clock)
    leaf = await fetch_leaf(*parse_address(address), deadline=DEADLINE_SECONDS)
    root = verify_coordinator_leaf(leaf, root_sha256, now=clock())
    async with joining_channel(address, root.authorities) as channel:
        stub = membership_pb2_grpc.RenewalStub(channel)
        try:
            asked = membership_pb2.GetNonceRequest()
            nonce = (await stub.GetNonce(asked, timeout=DEADLINE_SECONDS)).nonce
            content = renewal_content(
                cluster=root.cluster,
                nonce=nonce,
                server_key=key_hash(leaf),
                identity_key=signer.public_key,
                csr=csr,
            )
            request = membership_pb2.RenewByIdentityRequest(
                identity_key=signer.public_key,
                csr=csr,
                nonce=nonce,
                signature=await asyncio.to_thread(signer.sign, Label.CSR_BY_IDENTITY, content),
            )
            return await stub.RenewByIdentity(request, timeout=DEADLINE_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
