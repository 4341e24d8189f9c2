"""Names of prompt prefixes, which head and gateway exchange: at which lengths, and how they are made.

A prefix's name is a keyed hash, under a key that the head makes for every epoch. Equal names mean equal
tokens in the same scope; without the key a name reveals nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple, TypeAlias

from sealring.mesh.errors import InvalidInput

BLOCK = 64
"""The shortest prefix, in tokens, and the distance between boundaries."""

NAME_BYTES = 16
KEY_BYTES = 32
MAX_SCOPE_BYTES = 512
MAX_SALT_BYTES = 64

_STEPS_PER_OCTAVE = 64

OPENING = 16
"""Tokens with which a template opens an answer, at most. Where the answer is history, they may be others."""

MAX_ENDS = 16
"""Ends that one message names, at most."""

STORED_BLOCK = 256
"""The least tokens of a block on disk, and the distance of blocks' ends where boundaries are closer."""

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


def ends(tokens: int, after: int = 0) -> list[int]:
    """The lengths beside boundaries at which a sequence of `tokens` tokens is named, rising, above `after`.

    They are the whole of it and all but its OPENING: what follows in a conversation begins with one of them.
    """
    found = {tokens - OPENING, tokens}.difference(boundaries(tokens, max(0, tokens - OPENING - 1)))
    return sorted(length for length in found if length > max(after, BLOCK))


def edges(tokens: int) -> list[int]:
    """The boundaries at which blocks on disk end: one block lies between two of them."""
    return [length for length in boundaries(tokens) if length % STORED_BLOCK == 0]


class Chain(NamedTuple):
    """The names of a prompt's prefixes at its first edges, under a key that only its head knows and keeps.

    `scope` names the scope under the same key. Prompts in clear have one, and only these: by it, members know
    blocks on disk again in later epochs, which a gateway may learn of what it has read itself.
    """

    scope: bytes
    names: tuple[bytes, ...]

    @property
    def tokens(self) -> int:
        """The length of the longest prefix."""
        return self.edges[-1] if self.names else 0

    @property
    def edges(self) -> list[int]:
        """The lengths of the prefixes, one for each name."""
        return _edges()[: len(self.names)]

    def first(self, tokens: int) -> Chain:
        """The part of the chain that reaches no further than `tokens`."""
        names = self.names[: bisect_right(self.edges, tokens)]
        return Chain(self.scope, names) if names else NO_CHAIN

    def packed(self) -> bytes:
        """Scope and names, one behind the other; empty without a name."""
        return b"".join((self.scope, *self.names)) if self.names else b""

    @classmethod
    def unpack(cls, data: bytes) -> Chain:
        """The inverse of `packed`. Raises InvalidInput (BAD_PREFIXES)."""
        parts = [data[at : at + NAME_BYTES] for at in range(0, len(data), NAME_BYTES)]
        if len(data) % NAME_BYTES or len(parts) == 1 or len(parts) > 1 + len(_edges()):
            raise InvalidInput("the names of a prompt's blocks are malformed", reason="BAD_PREFIXES")
        return cls(parts[0], tuple(parts[1:])) if parts else NO_CHAIN


@cache
def _edges() -> list[int]:
    """All that a chain can have; the compute thread asks for them with each row."""
    return edges(MAX_STORED)


NO_CHAIN = Chain(b"", ())
MAX_STORED = 1 << 22
"""Tokens of the longest prompt of which blocks are stored."""

MAX_CHAIN_BYTES = NAME_BYTES * (1 + len(edges(MAX_STORED)))


def names_key(key: bytes) -> bytes:
    """The key of a head's chains, from that of its stage on disk."""
    return hmac.digest(key, b"sealring/v1 chains of prompts", "sha256")


def chain_of(key: bytes, scope: bytes, tokens: bytes) -> Chain:
    """The chain of a prompt, whose `tokens` have 4 bytes each, under this key."""
    names = PrefixNames(key, scope)
    names.extend(tokens)
    found = tuple(names.names[length] for length in edges(min(names.tokens, MAX_STORED)))
    return Chain(names.scope_name, found) if found else NO_CHAIN


def split(names: bytes, tokens: int, after: int = 0, ends: bytes = b"") -> Names:
    """(length, name) pairs from concatenated names at boundaries, and from packed ends; none from nothing.

    Raises InvalidInput (BAD_PREFIXES) unless there is one name for each boundary, and each end lies beside
    those, above `after`.
    """
    lengths = list(boundaries(tokens, after))
    if names and len(names) != NAME_BYTES * len(lengths):
        raise _bad_names()
    starts = range(0, len(names), NAME_BYTES)
    found = {length: names[at : at + NAME_BYTES] for length, at in zip(lengths, starts, strict=False)}
    if len(ends) % _END.size or len(ends) > MAX_ENDS * _END.size:
        raise _bad_names()
    least, known = max(after, BLOCK), set(lengths)
    for length, name in _END.iter_unpack(ends):
        if not least < length <= tokens or length in known or length in found:
            raise _bad_names()
        found[length] = name
    return tuple(sorted(found.items()))


_END = struct.Struct(f">I{NAME_BYTES}s")


def _bad_names() -> InvalidInput:
    return InvalidInput(
        "the names of a row's prefixes do not fit its length",
        reason="BAD_PREFIXES",
        hint="gateway and head must run the same version",
    )


def clear_scope(scope: str) -> bytes:
    """Scope of a clear prompt: the tenant that the gateway names. Raises InvalidInput (BAD_PREFIX_SCOPE)."""
    encoded = scope.encode()
    if len(encoded) >= MAX_SCOPE_BYTES:
        raise InvalidInput("the scope of prefixes is too long", reason="BAD_PREFIX_SCOPE")
    return b"c" + encoded


def is_clear(scope: bytes) -> bool:
    """Whether a scope is of prompts in clear."""
    return scope[:1] == b"c"


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
        self.scope_name = self._hash.copy().digest()[:NAME_BYTES]

    def extend(self, tokens: bytes, also: Iterable[int] = ()) -> bytes:
        """Appends tokens, 4 bytes each; returns the names at the boundaries that they reach, concatenated.

        They are named at the lengths `also` that they reach, too.
        """
        self._spelt += tokens
        start, at, found = self.tokens, 0, []
        self.tokens += len(tokens) // 4
        reached = set(boundaries(self.tokens, start))
        more = {length for length in also if start < length <= self.tokens}
        for length in sorted(reached | more):
            end = 4 * (length - start)
            self._hash.update(tokens[at:end])
            at = end
            name = self.names[length] = self._hash.copy().digest()[:NAME_BYTES]
            if length in reached:
                found.append(name)
        self._hash.update(tokens[at:])
        return b"".join(found)

    def packed(self, lengths: Iterable[int]) -> bytes:
        """Names at the longest of these lengths, as `split` takes `ends`."""
        longest = sorted(lengths)[-MAX_ENDS:]
        return b"".join(_END.pack(length, self.names[length]) for length in longest)

    def forget(self, lengths: Iterable[int]) -> None:
        """Takes names at these lengths away."""
        for length in lengths:
            del self.names[length]

    def common(self, other: PrefixNames) -> int:
        """Tokens of the longest prefix that both sequences are known to have, by names under one key."""
        shared = (length for length, name in other.names.items() if self.names.get(length) == name)
        return max(shared, default=0)

    def told(self, ends: Iterable[int] = ()) -> tuple[bytes, bytes]:
        """All names, as `split` takes them: those at boundaries, and ends, by default all of them."""
        regular = list(boundaries(self.tokens))
        ends = (set(ends) or self.names.keys()) - set(regular)
        return b"".join(map(self.names.__getitem__, regular)), self.packed(ends)

    def first(self, tokens: int, key: bytes = b"", also: Iterable[int] = ()) -> PrefixNames:
        """The names of the first `tokens` tokens at the same lengths, and `also` at others, under this key or
        another."""
        names = PrefixNames(key or self._key, self.scope)
        names.extend(bytes(self._spelt[: 4 * tokens]), self.names.keys() | set(also))
        return names
