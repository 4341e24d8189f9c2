"""The links of a new epoch: handshakes on all of them at once, and the ring's addresses.

The end that receives on a link listens for it, on a port that is free and drawn anew for every epoch, and
tells it to the sender alone, sealed under the handshake.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass

from mesh.addresses import free_port, parse_address
from mesh.errors import DeadlineExceeded, HandshakeError
from mesh.session import SessionKeys
from node.daemon_epoch import LinkSecrets
from node.daemon_plan import EpochPlan, LinkPlan
from node.links import Conversation, Links
from sealring.v1 import membership_pb2

PEER_SECONDS = 40.0
"""How long a member waits for its lower-ranked neighbour's handshake, its end included."""

_LABEL = b"ring address"


@dataclass(frozen=True)
class LinkResult:
    """A finished handshake: the session, and where the next member's ring port is (outgoing links only)."""

    session: SessionKeys
    neighbour_address: str


async def establish(links: Links, plan: EpochPlan, ring_host: str) -> LinkSecrets:
    """Shakes hands on all links of an epoch.

    Raises an ExceptionGroup of HandshakeError, Unavailable (PEER_UNREACHABLE), DeadlineExceeded (PEER_SILENT)
    and others; then nothing is expected any more and no keys are left.
    """
    own_address = f"{ring_host}:{free_port(ring_host)}"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_establish_one(links, link, own_address)) for link in plan.links]
    results = [task.result() for task in tasks]
    incoming = next(result for link, result in zip(plan.links, results, strict=True) if link.receives)
    outgoing = next(result for link, result in zip(plan.links, results, strict=True) if not link.receives)
    return LinkSecrets(
        outgoing_keys=outgoing.session.to_carrier(),
        incoming_keys=incoming.session.to_carrier(),
        own_address=own_address,
        next_address=outgoing.neighbour_address,
        infos=[_info(link, result) for link, result in zip(plan.links, results, strict=True)],
    )


async def _establish_one(links: Links, link: LinkPlan, own_address: str) -> LinkResult:
    async def talk(conversation: Conversation) -> LinkResult:
        if link.receives:
            await conversation.tell(_LABEL, own_address.encode("ascii"))
            return LinkResult(conversation.session, "")
        return LinkResult(conversation.session, _ring_address(await conversation.hear(_LABEL)))

    if link.params.initiates:
        return await links.call(link.params, link.peer_addresses, 0, talk)
    try:
        async with asyncio.timeout(PEER_SECONDS):
            return await links.answer(link.params, 0, talk)
    except TimeoutError:
        raise DeadlineExceeded(
            "the neighbour did not shake hands", reason="PEER_SILENT", peer=link.params.peer_id
        ) from None


def _ring_address(note: bytes) -> str:
    """The neighbour's ring address. Raises HandshakeError (BAD_RING_ADDRESS)."""
    try:
        address = note.decode("ascii")
        host, port = parse_address(address)
        ipaddress.IPv4Address(host)
        if port:
            return address
    except ValueError:
        pass
    raise HandshakeError("the neighbour's ring address is malformed", reason="BAD_RING_ADDRESS")


def _info(link: LinkPlan, result: LinkResult) -> membership_pb2.LinkInfo:
    return membership_pb2.LinkInfo(
        from_rank=link.params.from_rank, to_rank=link.params.to_rank, suite=result.session.suite.value
    )
