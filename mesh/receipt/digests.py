"""The hashes in a receipt: a request as the head has read it, an answer as the head has sent it, its tokens.

All are SHA-256. A client computes them from what it has sent and got. Text and reasoning are hashed as one
string each, because gateways join deltas. Of a tool call the name and the arguments count, and not its id,
which some APIs make up.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sealring.mesh.crypto.encoding import pack_fields
from sealring.v1 import inference_pb2 as inference

HASH_BYTES = 32
_REQUEST = b"sealring/v1 receipt request"
_TOKENS = b"sealring/v1 receipt tokens"


@dataclass(frozen=True)
class AnswerDigests:
    """SHA-256 over the text, the reasoning and the tool calls of one choice."""

    text: bytes
    reasoning: bytes
    calls: bytes


class AnswerHash:
    """Takes an answer piece by piece; a hash update for each piece."""

    def __init__(self) -> None:
        self._text, self._reasoning, self._calls = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()

    def add(self, text: str, reasoning: str = "", calls: Iterable[inference.ToolCall] = ()) -> None:
        """Takes the next piece in."""
        if text:
            self._text.update(text.encode())
        if reasoning:
            self._reasoning.update(reasoning.encode())
        for call in calls:
            self._calls.update(pack_fields(call.name.encode(), canonical_arguments(call.arguments)))

    def digests(self) -> AnswerDigests:
        """The hashes of what was taken so far."""
        return AnswerDigests(self._text.digest(), self._reasoning.digest(), self._calls.digest())


def request_digest(prompt: inference.Prompt, max_tokens: int) -> bytes:
    """The hash of a request: its prompt, with all sampling options, and its limit of tokens.

    The prompt counts without what an earlier epoch has answered, so it is the same in every epoch. Its bytes
    are those of protobuf's deterministic serialization.
    """
    asked = inference.Prompt()
    asked.CopyFrom(prompt)
    asked.ClearField("resume")
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
    return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("a number is too large")
    return number


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
