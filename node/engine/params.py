"""The parameter record: what the tail must know of a row in order to sample it.

Made by the head, sealed along the ring like everything else, read by the tail only; members in between pass
its bytes on unread. Its length is a multiple of 256 bytes, so that it tells nothing of its content.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass

from mesh.errors import InvalidInput
from sealring.v1 import inference_pb2 as inference

VERSION = 1
BLOCK = 256
_FIELDS = struct.Struct("<BxxxfffIQ")  # version, temperature, top_p, min_p, top_k, seed


@dataclass(frozen=True, slots=True)
class RowParameters:
    """How one row is sampled. `temperature` 0 is greedy, `top_p` 1, `min_p` 0 and `top_k` 0 are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def from_sampling(sampling: inference.Sampling) -> RowParameters:
    """The parameters of a validated request; a request without a seed gets a random one."""
    return RowParameters(
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        top_k=min(sampling.top_k, 0x7FFFFFFF),
        seed=sampling.seed if sampling.HasField("seed") else int.from_bytes(os.urandom(8), "little"),
    )


def encode(parameters: RowParameters) -> bytes:
    """The record, padded with zeros to a multiple of BLOCK bytes."""
    fields = _FIELDS.pack(
        VERSION,
        parameters.temperature,
        parameters.top_p,
        parameters.min_p,
        parameters.top_k,
        parameters.seed,
    )
    return fields.ljust(-(-len(fields) // BLOCK) * BLOCK, b"\0")


def decode(record: bytes | memoryview) -> RowParameters:
    """Raises InvalidInput (reason BAD_PARAMETERS) for any record that `encode` does not make."""
    if len(record) != BLOCK or any(record[_FIELDS.size :]):
        raise _bad("has a wrong length or padding")
    version, temperature, top_p, min_p, top_k, seed = _FIELDS.unpack(record[: _FIELDS.size])
    if version != VERSION or any(record[1:4]):
        raise _bad("is of an unknown version")
    parameters = RowParameters(temperature, top_p, min_p, top_k, seed)
    if not _sane(parameters):
        raise _bad("holds values out of range")
    return parameters


def _sane(parameters: RowParameters) -> bool:
    return (
        math.isfinite(parameters.temperature)
        and parameters.temperature >= 0
        and 0 < parameters.top_p <= 1
        and 0 <= parameters.min_p <= 1
        and parameters.top_k <= 0x7FFFFFFF
    )


def _bad(why: str) -> InvalidInput:
    return InvalidInput(
        f"a parameter record {why}",
        reason="BAD_PARAMETERS",
        hint="all members of a ring must run the same version",
    )
