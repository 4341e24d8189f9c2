"""The coordinator as members and gateways see it, played: real streams and proofs, and a test's words."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from prooftest import answer_offer

from sealring.mesh.crypto import Ed25519Signer, Label, verify
from sealring.mesh.errors import SealringError
from sealring.mesh.member import CalledProof, Purpose, by_roster_keys, of_identity, refusal
from sealring.mesh.member.proof import renewal
from sealring.mesh.pki import PeerIdentity, encode_chain, to_pem
from sealring.mesh.rpc import peer_identity
from sealring.testing.authority import Authority
from sealring.v1 import membership_pb2 as membership
from sealring.v1 import membership_pb2_grpc as membership_grpc
from sealring.v1 import proof_pb2


class MemberSession:
    """The words to and from one member, over all its streams."""

    def __init__(self) -> None:
        self.say: asyncio.Queue[membership.CoordinatorMessage | None] = asyncio.Queue()
        """The words to it that come next; None ends the stream."""
        self.heard: list[membership.MemberMessage] = []
        self.offers = asyncio.Semaphore(0)
        self.parted = asyncio.Semaphore(0)
        """Is released when the member has ended its side of a stream."""
        self.proof: CalledProof | None = None
        self.talks = False
        self._changed = asyncio.Condition()

    async def offered(self, times: int) -> None:
        """Returns when `times` more streams have begun."""
        while self.offers.locked() is False:
            await self.offers.acquire()
        for _ in range(times):
            async with asyncio.timeout(200):
                await self.offers.acquire()

    async def listen(self, requests: Any) -> None:
        async for message in requests:
            self.heard.append(message)
            async with self._changed:
                self._changed.notify_all()
        self.parted.release()

    async def hears(self, kind: str, *, unless: str = "", **fields: Any) -> Any:
        """The first message of a kind whose fields are as given, taken from what was heard.

        Raises AssertionError for one of the kind `unless` that came before.
        """

        def find() -> Any:
            for message in self.heard:
                named = message.WhichOneof("message")
                inner = getattr(message, named)
                if named == kind and all(getattr(inner, name) == value for name, value in fields.items()):
                    self.heard.remove(message)
                    return inner
                assert kind == unless or named != unless, f"{named} instead of {kind}: {inner}"
            return None

        async with asyncio.timeout(200), self._changed:
            while (found := find()) is None:
                await self._changed.wait()
            return found


class ActedCoordinator(
    membership_grpc.MembershipServicer,
    membership_grpc.SchedulingServicer,
    membership_grpc.CertificatesServicer,
):
    """`Session`, `Follow` and `Renew` of the coordinator, without rings, rosters or a store of its own."""

    def __init__(self, authority: Authority, identities: Mapping[str, bytes] | None = None) -> None:
        """`identities` are the identity keys of its callers by id; all others are believed."""
        self.ca, self.root = authority.ca, authority.root
        self.signers: Sequence[Ed25519Signer] = authority.roster_signers
        self.identities = identities or {}
        self.proves = True
        """Otherwise it answers a member's offer with a goodbye, and asks no gateway who it is."""
        self.refusal: SealringError | None = None
        """The error of every call."""
        self.hears_beats = False
        """It says that it answers heartbeats, and does not."""
        self.sessions: dict[str, MemberSession] = defaultdict(MemberSession)
        self.watched: asyncio.Queue[None] = asyncio.Queue()
        self.told: asyncio.Queue[membership.WatchRequest] = asyncio.Queue()
        """What gateways say, but for renewals."""
        self.renewed: asyncio.Queue[bytes] = asyncio.Queue()
        """Certificates of which gateways have said that they have them now."""
        self.snapshot: dict[str, membership.WatchResponse] = {}
        self._watches: set[asyncio.Queue[membership.WatchResponse | None]] = set()
        self.clock: Callable[[], float] = time.time
        self.peer: PeerIdentity | None = None
        """The peer that all certificates name; None: the caller."""
        self.refused = b""
        """The identity key of which it says that it is not enrolled."""
        self.spoil: Callable[[membership.RenewResponse], None] = lambda answer: None

    def services(self) -> list[tuple[Any, ActedCoordinator, str]]:
        """Those of a server that plays it."""
        return [
            (getattr(membership_grpc, f"add_{name}Servicer_to_server"), self, f"sealring.v1.{name}")
            for name in ("Membership", "Scheduling", "Certificates")
        ]

    def _check(self, peer: PeerIdentity) -> Any:
        key = self.identities.get(peer.id)
        return of_identity(key) if key is not None else lambda content, given: None

    # Members

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[membership.CoordinatorMessage]:
        peer = peer_identity(context)
        session = self.sessions[peer.id]
        proof, answer = await answer_offer(requests, context, Purpose.SESSION, by_roster_keys(self.signers))
        session.proof = proof
        session.offers.release()
        if not self.proves:
            yield membership.CoordinatorMessage(goodbye=membership.Goodbye(reason="x"))
            return
        yield membership.CoordinatorMessage(proof=answer)
        proof.check((await anext(requests)).proof, self._check(peer))
        if self.refusal is not None:
            raise self.refusal
        yield membership.CoordinatorMessage(accepted=proof_pb2.ProofAccepted(hears=self.hears_beats))
        reader = asyncio.create_task(session.listen(requests))
        session.talks = True
        try:
            while (message := await session.say.get()) is not None:
                yield message
        finally:
            session.talks = False
            reader.cancel()

    # Gateways

    def tell(self, event: membership.WatchResponse | None, *, name: str = "") -> None:
        """Tells everybody who watches; None ends their streams. With a name later watches hear it too."""
        if event is not None and name:
            self.snapshot[name] = event
        for watch in self._watches:
            watch.put_nowait(event)

    async def Follow(self, requests: Any, context: Any) -> AsyncIterator[membership.WatchResponse]:
        if self.refusal is not None:
            raise self.refusal
        proof = None
        if self.proves:
            proof, answer = await answer_offer(requests, context, Purpose.WATCH, by_roster_keys(self.signers))
            yield membership.WatchResponse(proof=answer)
            proof.check((await anext(requests)).proof, self._check(peer_identity(context)))
        self.watched.put_nowait(None)
        reader = asyncio.create_task(self._follow(requests, proof, context))
        watch: asyncio.Queue[membership.WatchResponse | None] = asyncio.Queue()
        self._watches.add(watch)
        try:
            for event in [*self.snapshot.values()]:
                yield event
            yield membership.WatchResponse(all_told=membership.AllTold())
            while (said := await watch.get()) is not None:
                yield said
        finally:
            reader.cancel()
            self._watches.discard(watch)

    async def _follow(self, requests: Any, proof: CalledProof | None, context: Any) -> None:
        async for request in requests:
            if not request.HasField("renewal"):
                self.told.put_nowait(request)
                continue
            if proof is not None:
                proof.check_renewal(request.renewal, self._check(peer_identity(context)))
            self.renewed.put_nowait(request.renewal.certificate)

    # Certificates

    async def Renew(self, request: Any, context: Any) -> membership.RenewResponse:
        return self.renew(request, peer_identity(context))

    def renew(self, request: membership.RenewRequest, peer: PeerIdentity) -> membership.RenewResponse:
        """A certificate for an hour, as the real one gives it unless a test spoils the answer."""
        if self.refusal is not None:
            raise self.refusal
        if (key := self.identities.get(peer.id)) is not None:
            verify(key, Label.CSR, request.csr, request.signature)
        answer = membership.RenewResponse(root_metadata=encode_chain(self.root.chain))
        if not self.refused:
            der = self.ca.issue(request.csr, self.peer or peer, lifetime=3600, now=self.clock())
            answer.certificate_chain = to_pem(der)
        self.spoil(answer)
        if not answer.proof:
            said = renewal(request.csr, answer.certificate_chain, answer.root_metadata)
            if self.refused:
                said = refusal(request.csr, self.refused)
            answer.proof = by_roster_keys(self.signers, Label.RENEWAL)(said)
        return answer
