"""API keys whose hashes cost nothing, and are counted."""

from __future__ import annotations

import hmac

import pytest

from sealring.edge.access import gate, keyfile
from sealring.edge.access.keys import ApiKey

HASH = "$argon2id$v=19$m=65536,t=2,p=1$"


def cheap_hash(key: ApiKey) -> str:
    return f"{HASH}{'a' * 22}${key.text[-43:]}"


class Checks:
    """Counts the hashes that are made, without their cost."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, key: ApiKey, stored: str) -> bool:
        self.count += 1
        return hmac.compare_digest(stored, cheap_hash(key))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    made = Checks()
    monkeypatch.setattr(keyfile, "hash_key", cheap_hash)
    monkeypatch.setattr(gate, "matches", made)
    return made
