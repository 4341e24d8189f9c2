"""Routing of a conversation to the ring that keeps its prefix, unless that ring is too busy.

Rendezvous hashing (Thaler and Ravishankar 1998): every ring has a score for every key, and the highest score
wins. When a ring leaves, only its own keys move; a new ring takes some keys from each. The load is bounded as
in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016), against the least busy
ring instead of the mean.

Gateways route clear prompts in this way, client libraries sealed ones. Both use a digest under a secret of
their own, which never leaves them.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from sealring.v1 import inference_pb2 as inference

SECRET_BYTES = 32
SHORTEST = 256
"""Characters of the shortest prompt that a key is derived from; no prefix of a shorter one is kept."""

MOST_LEEWAY = 4
"""Requests by which a key's own ring may be busier than the least busy ring, at most."""

_KEY_BYTES = 8
_LOOKED_AT = 4096
_MESSAGES = 8
_MASK = (1 << 64) - 1

T = TypeVar("T")


def routing_key(secret: bytes, scope: str, key: str | None, prompt: inference.Prompt | None) -> bytes:
    """The routing key of a request; empty if it is routed by load alone.

    `key` is the client's own; an empty one asks for routing by load. With None, the key is derived from the
    beginning of the conversation, if the prompt can be read. Equal keys of different scopes are unrelated.
    """
    if key is not None:
        return _digest(secret, scope, b"key", key.encode()) if key else b""
    beginning = _beginning(prompt) if prompt is not None else b""
    return _digest(secret, scope, b"conversation", beginning) if beginning else b""


def ranked(key: bytes, rings: Iterable[T], name: Callable[[T], str], most: int) -> list[T]:
    """The key's `most` preferred rings, best first."""
    number = int.from_bytes(key, "big")
    return heapq.nlargest(most, rings, key=lambda ring: _mixed(number ^ _number(name(ring))))


def leeway(rows: int) -> int:
    """The leeway in requests of a ring with `rows` rows: one for every eight rows, 0 below four."""
    return min(MOST_LEEWAY, (rows + 4) // 8)


def choose(loads: Sequence[tuple[int, int]]) -> int:
    """The index of the first ring that is not much busier than the least busy one.

    A load is a ring's (requests, rows); loads are in the order of preference.
    """
    least = min(requests / rows for requests, rows in loads)
    return next(
        index for index, (requests, rows) in enumerate(loads) if (requests - leeway(rows)) / rows <= least
    )


def _beginning(prompt: inference.Prompt) -> bytes:
    """A digestible beginning that all turns of a conversation share: up to the user's first message."""
    if prompt.WhichOneof("input") == "text":
        return prompt.text[:_LOOKED_AT].encode() if len(prompt.text) >= SHORTEST else b""
    if prompt.WhichOneof("input") == "tokens":
        ids = prompt.tokens.ids
        return array("I", ids[:_LOOKED_AT]).tobytes() if len(ids) >= SHORTEST else b""
    messages = prompt.chat.messages
    sizes = (len(message.content) + sum(len(one.data) for one in message.images) for message in messages)
    if sum(sizes) < SHORTEST:
        return b""
    parts = []
    for message in messages[:_MESSAGES]:
        content = message.content[:_LOOKED_AT].encode()
        parts.append(b"%s %d %d %s" % (message.role.encode(), len(message.content), len(content), content))
        parts += [b"%d %d %s" % (one.at, len(one.data), one.data[:_LOOKED_AT]) for one in message.images]
        if message.role == "user":
            break
    return b"".join(parts)


def _digest(secret: bytes, scope: str, kind: bytes, value: bytes) -> bytes:
    scoped = scope.encode()
    content = b"%d %s %s %s" % (len(scoped), scoped, kind, value)
    return hashlib.blake2b(content, key=secret, digest_size=_KEY_BYTES).digest()


@lru_cache(maxsize=1 << 13)
def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=_KEY_BYTES).digest(), "big")


def _mixed(number: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every bit depends on all of them."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
