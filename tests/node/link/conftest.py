"""Fixtures: two members that are about to shake hands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from rosterkit import clock, make_authority
from rosterkit import make_cluster as make_signed_cluster

from sealring.mesh.crypto import SoftwareSigner, Suite, member_id
from sealring.node.link.handshake import EphemeralLedger, Initiator, Responder
from sealring.node.link.keys import SessionKeys
from sealring.node.link.params import LinkParams
from sealring.node.link.records import Link
from sealring.testing import ManualClock

__all__ = ["clock", "make_authority", "make_signed_cluster"]


@dataclass
class Pair:
    """Two members that are about to shake hands over link 0 -> 1 of one ring."""

    signers: tuple[SoftwareSigner, SoftwareSigner]
    params: tuple[LinkParams, LinkParams]
    clock: ManualClock
    ledger: EphemeralLedger = field(default_factory=EphemeralLedger)

    def initiator(self, **changes: Any) -> Initiator:
        return Initiator(dataclasses.replace(self.params[0], **changes), self.signers[0], clock=self.clock)

    def responder(self, **changes: Any) -> Responder:
        params = dataclasses.replace(self.params[1], **changes)
        return Responder(params, self.signers[1], self.ledger, clock=self.clock)

    def handshake(self, *, initiator: Initiator | None = None, responder: Responder | None = None) -> Keys:
        """A whole honest handshake: the initiator's keys, then the responder's."""
        initiator, responder = initiator or self.initiator(), responder or self.responder()
        reply = responder.on_message(initiator.start()).message
        assert reply is not None
        proof = initiator.on_message(reply).message
        assert proof is not None
        last = responder.on_message(proof)
        assert last.message is not None
        first = initiator.on_message(last.message)
        assert first.message is None
        assert first.session is not None
        assert last.session is not None
        return first.session, last.session

    def link(self) -> tuple[Link, Link]:
        """Both ends of a confirmed link."""
        first, second = self.handshake()
        sender, receiver = Link(first, clock=self.clock), Link(second, clock=self.clock)
        receiver.opener.open_confirmation(sender.sealer.seal_confirmation())
        return sender, receiver


Keys = tuple[SessionKeys, SessionKeys]


@pytest.fixture
def make_pair(clock: ManualClock) -> Callable[..., Pair]:
    def make(
        suites: Sequence[Suite] = (Suite.X25519_CHACHA20POLY1305,),
        signers: tuple[SoftwareSigner, SoftwareSigner] | None = None,
        **changes: Any,
    ) -> Pair:
        signers = signers or (SoftwareSigner.generate(), SoftwareSigner.generate())
        ids = [member_id(signer.public_key) for signer in signers]

        def params(own: int) -> LinkParams:
            base = LinkParams(
                cluster="demo",
                ring="demo-0",
                epoch=7,
                from_rank=0,
                to_rank=1,
                own_rank=own,
                roster_version=3,
                roster_hash=b"\x55" * 32,
                own_id=ids[own],
                peer_id=ids[1 - own],
                peer_key=signers[1 - own].public_key,
                suites=tuple(suites),
            )
            return dataclasses.replace(base, **changes)

        return Pair(signers, (params(0), params(1)), clock)

    return make


@pytest.fixture
def pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair()
