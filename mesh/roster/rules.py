"""The rules of a well-formed roster, the same for the coordinator that signs and the reader that believes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from sealring.mesh.clock import SKEW_SECONDS
from sealring.mesh.crypto.identity import member_id
from sealring.mesh.errors import FailedPrecondition, InvalidInput, RosterError
from sealring.mesh.roster.model import (
    MAX_LIFETIME_SECONDS,
    MAX_RINGS_OF_MEMBER,
    Gateway,
    Revoked,
    Ring,
    Roster,
    RosterMember,
    cluster_min_trust,
    ring_min_trust,
)
from sealring.mesh.trust.levels import TrustLevel, ceiling


def check_structure(roster: Roster) -> None:
    """The rules that need no memory and no clock: ids, keys, revocation, ranks, layers.

    Raises RosterError (ROSTER_MEMBERS, ROSTER_REVOKED, ROSTER_RINGS).
    """
    _check_parties(roster)
    for ring in roster.rings:
        _check_ring(ring, roster)
    _check_places(roster)
    replicas = [(ring.deployment, ring.replica) for ring in roster.rings]
    _check_sorted([ring.id for ring in roster.rings], "ROSTER_RINGS")
    if len(set(replicas)) != len(replicas):
        raise RosterError("a replica has two rings", reason="ROSTER_RINGS")


def check_trust(roster: Roster) -> None:
    """Recompute every trust figure that the roster states. Raises RosterError (ROSTER_TRUST)."""
    for member in roster.members:
        if member.trust > ceiling(member.level, member.key_type):
            raise RosterError(
                "a member's trust is above its evidence", reason="ROSTER_TRUST", member=member.id
            )
    levels = {member.id: member.level for member in roster.members}
    for ring in roster.rings:
        if any(levels[member.id] is TrustLevel.NONE for member in ring.members):
            raise RosterError("a member without trust serves in a ring", reason="ROSTER_TRUST", ring=ring.id)
        lowest = ring_min_trust(ring.members, roster.members)
        if ring.min_trust != lowest or lowest < max(ring.trust_floor, roster.trust_floor):
            raise RosterError(
                "a ring's trust is not what its members have, or below the floor",
                reason="ROSTER_TRUST",
                ring=ring.id,
            )
    if roster.min_trust != cluster_min_trust(roster.rings, roster.members):
        raise RosterError("the cluster's trust is not what its members have", reason="ROSTER_TRUST")


def check_lifetime(issued: int, expires: int) -> None:
    """Require a life above zero and of at most 15 minutes. Raises RosterError (ROSTER_LIFETIME)."""
    if not 0 < expires - issued <= MAX_LIFETIME_SECONDS:
        raise RosterError("roster lives for too long or not at all", reason="ROSTER_LIFETIME")


def links_in_clear(deployment: str) -> FailedPrecondition:
    """The error for a request that is sealed or demands trust, to a deployment whose rings have clear
    links."""
    return FailedPrecondition(
        f"the nodes that serve {deployment} compute parts of every layer, and add them up in clear",
        hint="ask for a model that a pipeline serves; or send the prompt in clear and without min_trust",
        reason="LINKS_IN_CLEAR",
        param="model",
    )


def _check_parties(roster: Roster) -> None:
    parties: tuple[RosterMember | Gateway | Revoked, ...] = (
        *roster.members,
        *roster.gateways,
        *roster.revoked,
    )
    for party in parties:
        try:
            matches = member_id(party.identity_key) == party.id
        except InvalidInput:
            matches = False
        if not matches:
            raise RosterError("an id is not that of its key", reason="ROSTER_MEMBERS")
    _check_sorted([member.id for member in roster.members], "ROSTER_MEMBERS")
    _check_sorted([gateway.id for gateway in roster.gateways], "ROSTER_MEMBERS")
    _check_sorted([(entry.id, entry.enrolled) for entry in roster.revoked], "ROSTER_REVOKED")
    if any(
        max(member.attested_at, member.challenged_at) > roster.issued + SKEW_SECONDS
        for member in roster.members
    ):
        raise RosterError("a member's evidence is from the future", reason="ROSTER_MEMBERS")
    sealing_keys = [member.sealing_key for member in roster.members]
    if len(set(sealing_keys)) != len(sealing_keys):
        raise RosterError("two members have one sealing key", reason="ROSTER_MEMBERS")
    members = {member.id for member in roster.members}
    gateways = {gateway.id for gateway in roster.gateways}
    if members & gateways:
        raise RosterError("a key is both member and gateway", reason="ROSTER_MEMBERS")
    since = {member.id: member.enrolled for member in roster.members}
    if any(entry.id in gateways or entry.at >= since.get(entry.id, entry.at + 1) for entry in roster.revoked):
        raise RosterError("a revoked key is listed, and has not joined since", reason="ROSTER_REVOKED")


def _check_ring(ring: Ring, roster: Roster) -> None:
    known = {member.id for member in roster.members}
    if not ring.members or any(member.id not in known for member in ring.members):
        raise RosterError("a ring has no members, or unknown ones", reason="ROSTER_RINGS", ring=ring.id)
    if [member.rank for member in ring.members] != list(range(len(ring.members))):
        raise RosterError("ranks are not 0, 1, 2, ... in order", reason="ROSTER_RINGS", ring=ring.id)
    if ring.clear_links:
        covered = all(member.layers == (0, ring.total_layers) for member in ring.members)
    else:
        edges = [0, *(member.layers[1] for member in ring.members)]
        ranges = list(itertools.pairwise(edges))
        covered = edges[-1] == ring.total_layers and all(
            member.layers == (low, high) and low < high
            for member, (low, high) in zip(ring.members, ranges, strict=True)
        )
        if any(member.prompts is not None for member in ring.members):
            covered = covered and _cut_for_prompts(ring)
    if not covered:
        raise RosterError(
            "layers are not contiguous, disjoint and complete", reason="ROSTER_RINGS", ring=ring.id
        )


def _cut_for_prompts(ring: Ring) -> bool:
    """Whether the layers of prompts are contiguous and complete, too, and each layer is held by two members
    at most, of which the first computes prompts with it."""
    edges = [0, *((member.prompts or member.layers)[1] for member in ring.members)]
    return edges[-1] == ring.total_layers and all(
        member.prompts == (low, high) and low < high and member.layers[0] <= low <= member.layers[1] <= high
        for member, (low, high) in zip(ring.members, itertools.pairwise(edges), strict=True)
    )


def _check_places(roster: Roster) -> None:
    """Requires at most one place of a member in a deployment, and MAX_RINGS_OF_MEMBER in all."""
    places = [(ring.deployment, member.id) for ring in roster.rings for member in ring.members]
    if len(set(places)) != len(places):
        raise RosterError("a member serves a deployment in two places", reason="ROSTER_RINGS")
    rings = Counter(member for _, member in places)
    if any(count > MAX_RINGS_OF_MEMBER for count in rings.values()):
        raise RosterError("a member serves in too many rings", reason="ROSTER_RINGS")


def _check_sorted(identifiers: Sequence[str] | Sequence[tuple[str, int]], reason: str) -> None:
    if any(low >= high for low, high in itertools.pairwise(identifiers)):  # type: ignore[operator]  # all alike
        raise RosterError("entries are not unique and sorted by id", reason=reason)
