"""Checks what is stored before it is used: a flipped bit is reported, not acted on."""

from __future__ import annotations

from sealring.coordinator.store import Store, StoredRoster
from sealring.coordinator.store.database import RESTORE_HINT
from sealring.mesh.crypto.dsse import parse_envelope
from sealring.mesh.crypto.identity import member_id
from sealring.mesh.errors import ConfigError, InvalidInput, RosterError
from sealring.mesh.roster.codec import MAX_PAYLOAD_BYTES, PAYLOAD_TYPE, roster_hash


def check_stored(store: Store) -> None:
    """Rosters, deployments and members. Raises ConfigError (STATE_CORRUPT)."""
    check_roster(store.rosters.latest())
    store.deployments.all()
    try:
        members = store.members.all()
    except ValueError:  # a word that is none, JSON that is none
        raise corrupt("the list of members") from None
    for member in members:
        if not _is_key_of(member.identity_key, member.id):
            raise corrupt(f"the identity key of {member.name}")


def _is_key_of(identity_key: bytes, identifier: str) -> bool:
    try:
        return member_id(identity_key) == identifier
    except InvalidInput:
        return False


def check_roster(latest: StoredRoster | None) -> None:
    """The next roster names the hash of this one; were it wrong, every member would raise the alarm.

    Raises ConfigError (STATE_CORRUPT).
    """
    if latest is None:
        return
    try:
        opened = parse_envelope(latest.envelope, payload_type=PAYLOAD_TYPE, max_payload=MAX_PAYLOAD_BYTES)
        sound = roster_hash(opened.payload) == latest.hash
    except RosterError:
        sound = False
    if not sound:
        raise corrupt(f"roster {latest.version}")


def corrupt(what: str) -> ConfigError:
    """Something in the database is not what was written."""
    return ConfigError(
        f"the coordinator's database is corrupt: {what}", hint=RESTORE_HINT, reason="STATE_CORRUPT"
    )
