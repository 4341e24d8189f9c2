"""What a coordinator stores, for tests."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from sealring.coordinator.store import StoredMember, StoredToken
from sealring.mesh.crypto import KeyType, member_id
from sealring.mesh.pki import Role
from sealring.mesh.trust.levels import TrustLevel

M = TypeVar("M", bound=Message)
NOW = 1_800_000_000


def changed(message: M, **fields: Any) -> M:
    """A copy with other values of these fields."""
    made = type(message)()
    made.CopyFrom(message)
    for name in fields:
        made.ClearField(name)
    made.MergeFrom(type(message)(**fields))
    return made


def gateway(key: bytes, *, now: float = NOW) -> StoredMember:
    """A gateway with this identity key."""
    return StoredMember(
        id=member_id(key),
        role=Role.GATEWAY,
        name="gate",
        identity_key=key,
        key_type=KeyType.SOFTWARE,
        enrolled_at=int(now),
        level=TrustLevel.NONE,
    )


def token(identifier: str, role: Role = Role.MEMBER, *, now: int = NOW, seconds: int = 600) -> StoredToken:
    """A token for one machine."""
    return StoredToken(id=identifier, role=role, created=now, expires=now + seconds, uses=1)
