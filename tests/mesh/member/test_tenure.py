"""Streams that outlive the certificate of their handshake: by what proof, and by which not."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto import Label, SoftwareSigner, member_id
from sealring.mesh.errors import PermissionDenied, SealringError
from sealring.mesh.member import (
    CalledProof,
    CallerProof,
    Connection,
    HeldRoster,
    Purpose,
    Tenure,
    by_identity,
    of_identity,
)
from sealring.mesh.pki import ClusterCA, LeafKey, PeerIdentity, Role, expires_at
from sealring.mesh.rpc import Lease, stream_lease
from sealring.v1 import proof_pb2

GATEWAY, MEMBER = SoftwareSigner.generate(), SoftwareSigner.generate()
CALLER = PeerIdentity("demo", Role.GATEWAY, member_id(GATEWAY.public_key))
CONNECTION = Connection(Purpose.SCHEDULE, "demo", CALLER.id, member_id(MEMBER.public_key), b"\x01" * 32)


def evicted() -> bytes:
    raise PermissionDenied("not in the roster", reason="GATEWAY_NOT_ALLOWED")


class Stream:
    """One stream, proved by both ends, whose first certificate ends in a minute."""

    def __init__(self, ca: ClusterCA, limit: asyncio.Timeout) -> None:
        self.ca, self.limit = ca, limit
        self.now = time.time()
        self.lease = Lease(limit, self.now + 60)
        stream_lease.set(self.lease)
        self.key: Any = lambda: GATEWAY.public_key

    async def begin(self, connection: Connection = CONNECTION) -> Stream:
        self.caller = CallerProof(connection, HeldRoster())
        self.called = CalledProof(connection, self.caller.offer, HeldRoster())
        answer = await self.called.answer(by_identity(MEMBER))
        self.caller.check(answer, of_identity(MEMBER.public_key))
        finish = await self.caller.finish(by_identity(GATEWAY))
        self.called.check(finish, of_identity(GATEWAY.public_key))
        self.tenure = Tenure(
            self.called, CALLER, lambda: self.key(), lambda: (self.ca.certificate,), clock=lambda: self.now
        )
        return self

    def certificate(
        self,
        lifetime: float = 3600,
        *,
        peer: PeerIdentity = CALLER,
        ca: ClusterCA | None = None,
        ago: float = 0,
    ) -> bytes:
        return (ca or self.ca).issue(LeafKey().csr(), peer, lifetime=lifetime, now=self.now - ago)

    async def renewal(self, certificate: bytes, signer: Any = GATEWAY) -> proof_pb2.ProofRenewal:
        return await self.caller.renew(certificate, by_identity(signer))

    @property
    def ends(self) -> float:
        """When the stream ends, in seconds since 1970."""
        when = self.limit.when()
        assert when is not None
        return time.time() + when - asyncio.get_running_loop().time()

    def refused(self, renewal: proof_pb2.ProofRenewal) -> str:
        """Why; the stream still ends when it would have."""
        before = self.limit.when()
        with pytest.raises(SealringError) as caught:
            self.tenure.renew(renewal)
        assert self.limit.when() == before
        return caught.value.reason


@pytest.fixture
def ca(tmp_path: Path) -> ClusterCA:
    return ClusterCA.create(tmp_path / "ca", "demo", now=time.time())


@pytest.fixture
async def stream(ca: ClusterCA) -> AsyncIterator[Stream]:
    async with asyncio.timeout(None) as limit:
        yield await Stream(ca, limit).begin()


async def test_a_stream_goes_on_until_the_last_certificate_that_was_proved_ends(stream: Stream) -> None:
    assert stream.ends == pytest.approx(stream.now + 60 + SKEW_SECONDS, abs=5)
    for lifetime in (3600, 7200):
        certificate = stream.certificate(lifetime)
        stream.tenure.renew(await stream.renewal(certificate))
        assert stream.ends == pytest.approx(expires_at(certificate) + SKEW_SECONDS, abs=5)


async def test_a_certificate_that_ends_sooner_takes_nothing_away(stream: Stream) -> None:
    before = stream.limit.when()
    stream.tenure.renew(await stream.renewal(stream.certificate(30)))
    assert stream.limit.when() == before


async def test_another_identity_key_renews_nothing(stream: Stream) -> None:
    stranger = SoftwareSigner.generate()
    assert stream.refused(await stream.renewal(stream.certificate(), stranger)) == "BAD_PROOF"
    assert stream.refused(proof_pb2.ProofRenewal(certificate=stream.certificate())) == "BAD_PROOF"


async def test_the_proof_is_about_one_certificate(stream: Stream) -> None:
    renewal = await stream.renewal(stream.certificate())
    renewal.certificate = stream.certificate(7200)
    assert stream.refused(renewal) == "BAD_PROOF"


@pytest.mark.parametrize("other", [Purpose.SESSION, Purpose.WATCH, Purpose.SCHEDULE])
async def test_the_proof_of_one_stream_renews_no_other(stream: Stream, ca: ClusterCA, other: Purpose) -> None:
    """Not even one of the same two ends."""
    renewal = await stream.renewal(stream.certificate())
    async with asyncio.timeout(None) as limit:
        second = await Stream(ca, limit).begin(dataclasses.replace(CONNECTION, purpose=other))
        assert second.refused(renewal) == "BAD_PROOF"
    stream.tenure.renew(renewal)


async def test_the_proof_that_a_stream_began_with_renews_nothing(stream: Stream) -> None:
    finish = await stream.caller.finish(by_identity(GATEWAY))
    renewal = proof_pb2.ProofRenewal(certificate=stream.certificate(), proof=finish.proof)
    assert stream.refused(renewal) == "BAD_PROOF"


async def test_a_signature_under_another_label_renews_nothing(stream: Stream) -> None:
    certificate = stream.certificate()
    renewal = await stream.caller.renew(certificate, lambda content: GATEWAY.sign(Label.CSR, content))
    assert stream.refused(renewal) == "BAD_PROOF"


async def test_somebody_elses_certificate_renews_nothing(stream: Stream) -> None:
    for peer in (
        PeerIdentity("demo", Role.GATEWAY, member_id(MEMBER.public_key)),
        PeerIdentity("demo", Role.MEMBER, CALLER.id),
        PeerIdentity("other", Role.GATEWAY, CALLER.id),
    ):
        assert stream.refused(await stream.renewal(stream.certificate(peer=peer))) == "BAD_PROOF"


async def test_a_certificate_of_another_authority_or_time_renews_nothing(
    stream: Stream, tmp_path: Path
) -> None:
    other = ClusterCA.create(tmp_path / "other", "demo", now=time.time())
    assert stream.refused(await stream.renewal(stream.certificate(ca=other))) == "NOT_ISSUED_HERE"
    expired = stream.certificate(100, ago=3600)
    assert stream.refused(await stream.renewal(expired)) == "CERTIFICATE_EXPIRED"
    assert stream.refused(await stream.renewal(b"junk")) == "BAD_CERTIFICATE"


async def test_who_was_thrown_out_meanwhile_renews_nothing(stream: Stream) -> None:
    stream.key = evicted
    assert stream.refused(await stream.renewal(stream.certificate())) == "GATEWAY_NOT_ALLOWED"


async def test_a_stream_that_is_ending_ends(ca: ClusterCA) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            stream = await Stream(ca, limit).begin()
            limit.reschedule(asyncio.get_running_loop().time())
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
            stream.tenure.renew(await stream.renewal(stream.certificate()))
            assert limit.expired()
            raise asyncio.CancelledError
