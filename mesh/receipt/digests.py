"""The hashes in a receipt: a request as the head has read it, an answer as the head has sent it, its tokens.

All are SHA-256. A client computes them from what it has sent and got. Text and reasoning are hashed as one
string each, because gateways join deltas. Their order and that of the calls has a hash of its own, because
some APIs do not tell it. Of a tool call the name and the arguments count, and not its id, which some APIs
make up.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sealring.mesh.crypto.encoding import pack_fields, unique_object
from sealring.v1 import inference_pb2 as inference

HASH_BYTES = 32
_REQUEST = b"sealring/v1 receipt request"
_TOKENS = b"sealring/v1 receipt tokens"


@dataclass(frozen=True)
class AnswerDigests:
    """SHA-256 over the text, the reasoning, the tool calls and the order of the parts of one choice."""

    text: bytes
    reasoning: bytes
    calls: bytes
    order: bytes


class AnswerHash:
    """Takes an answer piece by piece; a hash update for each piece."""

    def __init__(self) -> None:
        self._texts = {"text": hashlib.sha256(), "reasoning": hashlib.sha256()}
        self._calls, self._order = hashlib.sha256(), hashlib.sha256()
        self._open, self._bytes = "", 0

    def add(self, text: str, reasoning: str = "", calls: Iterable[inference.ToolCall] = ()) -> None:
        """Takes the next piece in: its reasoning, then its text, then its calls."""
        if reasoning:
            self.say("reasoning", reasoning)
        if text:
            self.say("text", text)
        for call in calls:
            self.call(call)

    def say(self, kind: str, text: str) -> None:
        """Takes `text` or `reasoning`, which goes on where the same was the last."""
        if kind != self._open:
            self._close()
            self._open = kind
        said = text.encode()
        self._texts[kind].update(said)
        self._bytes += len(said)

    def call(self, call: inference.ToolCall) -> None:
        self._close()
        self._order.update(_part("call", 0))
        self._calls.update(pack_fields(call.name.encode(), canonical_arguments(call.arguments)))

    def _close(self) -> None:
        if self._open:
            self._order.update(_part(self._open, self._bytes))
        self._open, self._bytes = "", 0

    def digests(self) -> AnswerDigests:
        """The hashes of what was taken so far."""
        order = self._order.copy()
        if self._open:
            order.update(_part(self._open, self._bytes))
        text, reasoning = (one.digest() for one in self._texts.values())
        return AnswerDigests(text, reasoning, self._calls.digest(), order.digest())


def vector_text(vector: Iterable[float]) -> str:
    """A vector as its receipt has it, in the place of text: float32, little-endian, in hex."""
    return b"".join(struct.pack("<f", number) for number in vector).hex()


def _part(kind: str, size: int) -> bytes:
    """One part in the order: its kind, and the bytes of its text."""
    return pack_fields(kind.encode(), size.to_bytes(8, "big"))


def request_digest(prompt: inference.Prompt, max_tokens: int, *, unnamed: bool = True) -> bytes:
    """The hash of a request: its prompt, with all sampling options, and its limit of tokens.

    The prompt counts without what an earlier epoch has answered, so it is the same in every epoch. Its bytes
    are those of protobuf's deterministic serialization. Without `unnamed`, the request counts as one that
    names all its options.
    """
    asked = inference.Prompt()
    asked.CopyFrom(prompt)
    asked.ClearField("resume")
    if asked.sampling.unnamed and not unnamed:
        asked.sampling.ClearField("unnamed")
    serialized = asked.SerializeToString(deterministic=True)
    return hashlib.sha256(pack_fields(_REQUEST, max_tokens.to_bytes(4, "big"), serialized)).digest()


def sampled_digest(binding: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of the token ids that one epoch has sampled, each below 2^32.

    `binding` (32 bytes) has the client's nonce in it, so that nobody else can try out what the tokens were.
    """
    ids = struct.pack(f">{len(tokens)}I", *tokens)
    return hashlib.sha256(pack_fields(_TOKENS, binding, ids)).digest()


def canonical_arguments(arguments: str) -> bytes:
    """A call's arguments with sorted keys and without spaces: some APIs give them as an object and not as the
    model's text. What is no JSON, or what two readers may read differently, is taken as it stands."""
    try:
        value = parse_json(arguments or "{}")
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return arguments.encode()


def parse_json(text: str) -> Any:
    """JSON that every reader reads alike: no name twice in an object, no number that is not finite.

    Raises ValueError, RecursionError.
    """
    return json.loads(text, object_pairs_hook=unique_object, parse_float=_finite, parse_constant=_finite)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number is not finite")
    return number
