"""The parameter record of a row, which travels ahead of its first chunk."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

from sealring.mesh.ring import MAX_CHOICES, NO_CHAIN, Chain

_RECORD = struct.Struct(f">III{MAX_CHOICES}I?32s")


@dataclass(frozen=True)
class Parameters:
    """How the tail samples a row. `lengths` has the tokens of this answer, and of those of its copies."""

    choice: int
    prompt_tokens: int
    answered: int
    lengths: tuple[int, ...]
    receipt: bytes = b""
    stored: Chain = NO_CHAIN
    """What may be stored of its prompt."""

    @property
    def length(self) -> int:
        return self.lengths[0]

    def copy(self, distance: int) -> Parameters:
        """Those of the copy that is so far behind."""
        return replace(self, choice=self.choice + distance, lengths=self.lengths[distance:])

    def encode(self) -> bytes:
        lengths = (*self.lengths, *[0] * MAX_CHOICES)[:MAX_CHOICES]
        receipt = bool(self.receipt), self.receipt.ljust(32, b"\0")
        fixed = _RECORD.pack(self.choice, self.prompt_tokens, self.answered, *lengths, *receipt)
        return fixed + self.stored.packed()


def parameters_in(record: bytes) -> Parameters:
    """The inverse of `encode`."""
    choice, prompt_tokens, answered, *lengths, has_receipt, receipt = _RECORD.unpack_from(record)
    stored = Chain.unpack(record[_RECORD.size :])
    return Parameters(
        choice, prompt_tokens, answered, tuple(lengths), receipt if has_receipt else b"", stored
    )
