"""Names of prompt prefixes, which head and gateway exchange: at which lengths, and how they are made.

A prefix's name is a keyed hash, under a key that the head makes for every epoch. Equal names mean equal
tokens in the same scope; without the key a name reveals nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import TypeAlias

from sealring.mesh.errors import InvalidInput

BLOCK = 64
"""The shortest prefix, in tokens, and the distance between boundaries."""

NAME_BYTES = 16
KEY_BYTES = 32
MAX_SCOPE_BYTES = 512
MAX_SALT_BYTES = 64

_STEPS_PER_OCTAVE = 64

Names: TypeAlias = tuple[tuple[int, bytes], ...]
"""Lengths and names of prefixes of one sequence, rising."""


def boundaries(tokens: int, after: int = 0) -> Iterator[int]:
    """The lengths at which prefixes of `tokens` tokens are named, rising, above `after`.

    Multiples of BLOCK up to 8,192; from there 64 in each octave, so that their number grows with the
    logarithm of the length.
    """
    at = step = BLOCK
    while at <= tokens:
        if at > after:
            yield at
        if at >= 2 * _STEPS_PER_OCTAVE * step:
            step *= 2
        at += step


def split(names: bytes, tokens: int, after: int = 0) -> Names:
    """(length, name) pairs from concatenated names; none from an empty string.

    Raises InvalidInput (BAD_PREFIXES) if there is not one name for each boundary.
    """
    lengths = list(boundaries(tokens, after))
    if names and len(names) != NAME_BYTES * len(lengths):
        raise InvalidInput(
            "the names of a row's prefixes do not fit its length",
            reason="BAD_PREFIXES",
            hint="gateway and head must run the same version",
        )
    starts = range(0, len(names), NAME_BYTES)
    return tuple((length, names[at : at + NAME_BYTES]) for length, at in zip(lengths, starts, strict=False))


def clear_scope(scope: str) -> bytes:
    """Scope of a clear prompt: the tenant that the gateway names. Raises InvalidInput (BAD_PREFIX_SCOPE)."""
    encoded = scope.encode()
    if len(encoded) >= MAX_SCOPE_BYTES:
        raise InvalidInput("the scope of prefixes is too long", reason="BAD_PREFIX_SCOPE")
    return b"c" + encoded


def sealed_scope(salt: bytes) -> bytes:
    """Scope of a sealed prompt: a salt that only the client and the head know; empty without a salt.

    Without it, a gateway could send guesses in the client's name and compare the names of their prefixes.
    Raises InvalidInput (BAD_PREFIX_SCOPE).
    """
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidInput("the salt of prefixes is too long", reason="BAD_PREFIX_SCOPE", param="prefix_salt")
    return b"s" + salt if salt else b""


class PrefixNames:
    """The names of one sequence's prefixes, while it grows. HMAC-SHA256 (RFC 2104), cut to 16 bytes.

    The scope goes in first, behind its length, so that equal tokens of different scopes have different names.
    """

    def __init__(self, key: bytes, scope: bytes) -> None:
        if len(key) != KEY_BYTES or not 0 < len(scope) <= MAX_SCOPE_BYTES:
            raise ValueError("a prefix key has 32 bytes and a scope 1 to 512")
        self.tokens = 0
        self.names: dict[int, bytes] = {}
        self.scope = scope
        self._key = key
        self._spelt = bytearray()
        self._hash = hmac.new(key, len(scope).to_bytes(2, "big") + scope, hashlib.sha256)

    def extend(self, tokens: bytes) -> bytes:
        """Appends tokens, 4 bytes each; returns the names at the boundaries that they reach, concatenated."""
        self._spelt += tokens
        start, at, found = self.tokens, 0, []
        self.tokens += len(tokens) // 4
        for length in boundaries(self.tokens, start):
            end = 4 * (length - start)
            self._hash.update(tokens[at:end])
            at = end
            name = self.names[length] = self._hash.copy().digest()[:NAME_BYTES]
            found.append(name)
        self._hash.update(tokens[at:])
        return b"".join(found)

    def first(self, tokens: int, key: bytes = b"") -> PrefixNames:
        """The names of the first `tokens` tokens, under this key or another."""
        names = PrefixNames(key or self._key, self.scope)
        names.extend(bytes(self._spelt[: 4 * tokens]))
        return names
