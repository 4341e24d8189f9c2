"""API keys: `srk_<id>_<secret>`. The id is no secret; of the whole key only an Argon2id hash is kept.

Argon2id (RFC 9106) through libsodium with its interactive limits: 64 MiB, two passes, about 0.1 s.
"""

from __future__ import annotations

import base64
import enum
import re
import secrets
from dataclasses import dataclass, field

from nacl.exceptions import InvalidkeyError
from nacl.pwhash import argon2id

_ID_BYTES = 10
_SECRET_BYTES = 32
_KEY = re.compile(r"srk_([a-z2-7]{16})_[a-z2-7]{52}\Z")
_HASH = re.compile(
    r"\$argon2id\$v=19\$m=([0-9]{1,7}),t=([0-9]{1,2}),p=1\$[A-Za-z0-9+/]{22}\$[A-Za-z0-9+/]{43}\Z"
)
_MAX_HASH_KIBIBYTES = 256 << 10


class Scope(enum.StrEnum):
    """What a key is good for. `admin` includes the others."""

    INFERENCE = "inference"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A well-formed key. Its text is in no representation."""

    id: str
    text: str = field(repr=False)


def new_key() -> ApiKey:
    """A key of 256 random bits under an id of 80."""
    key_id = _base32(secrets.token_bytes(_ID_BYTES))
    return ApiKey(key_id, f"srk_{key_id}_{_base32(secrets.token_bytes(_SECRET_BYTES))}")


def parse_key(text: str) -> ApiKey | None:
    """The key that `text` is, or None."""
    found = _KEY.match(text)  # which looks at no more characters than a key has
    return ApiKey(found[1], text) if found else None


def hash_key(key: ApiKey) -> str:
    """What may be stored of a key."""
    hashed = argon2id.str(
        key.text.encode(), opslimit=argon2id.OPSLIMIT_INTERACTIVE, memlimit=argon2id.MEMLIMIT_INTERACTIVE
    )
    return hashed.decode()


def is_hash(text: str) -> bool:
    """Whether `text` is a hash as `hash_key` makes them, with costs that a gateway can bear."""
    found = _HASH.match(text)
    return found is not None and 0 < int(found[1]) <= _MAX_HASH_KIBIBYTES and 0 < int(found[2]) <= 16


def matches(key: ApiKey, stored: str) -> bool:
    """Whether the hash is of this key; slow on purpose, and libsodium compares in constant time."""
    try:
        return bool(argon2id.verify(stored.encode(), key.text.encode()))
    except InvalidkeyError:
        return False


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()
