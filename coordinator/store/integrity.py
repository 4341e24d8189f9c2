"""Checks what is stored before it is used: a flipped bit is reported, not acted on."""

from __future__ import annotations

from sealring.coordinator.store import Store
from sealring.mesh.audit import FIRST_PREVIOUS
from sealring.mesh.crypto.dsse import parse_envelope
from sealring.mesh.crypto.identity import member_id
from sealring.mesh.errors import InvalidInput, RosterError
from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE, roster_hash


def check_stored(store: Store) -> None:
    """All but the audit log, which `audit verify` checks. Raises ConfigError (STATE_CORRUPT)."""
    store.check()
    if store.audit.head() == (0, FIRST_PREVIOUS):
        raise store.corrupt("its making was broken off")
    _check_roster(store)
    store.tokens.open(now=0)
    store.members.revocations(since=0, limit=None)
    for member in store.members.all():
        if not _is_key_of(member.identity_key, member.id):
            raise store.corrupt(f"the identity key of {member.name}")


def _is_key_of(identity_key: bytes, identifier: str) -> bool:
    try:
        return member_id(identity_key) == identifier
    except InvalidInput:
        return False


def _check_roster(store: Store) -> None:
    """The next roster names the hash of this one; were it wrong, every member would raise the alarm."""
    latest = store.rosters.latest()
    if latest is None:
        return
    try:
        opened = parse_envelope(latest.envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
        sound = roster_hash(opened.payload) == latest.hash
    except RosterError:
        sound = False
    if not sound:
        raise store.corrupt(f"roster {latest.version}")
