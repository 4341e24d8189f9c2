"""Facts of rings, from what their members say of their memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from sealring.gateway.scheduler import RingFacts, StepCosts
from sealring.v1 import control_pb2 as control


def member_with(budget: int = 1 << 40, *, token: int = 1, row: int = 0, mark: int = 0) -> control.Attached:
    """A member with this budget, and what a token, a row and a mark take of it, in bytes."""
    return control.Attached(kv_budget=budget, kv_bytes_per_token=token, kv_bytes_per_row=row, mark_bytes=mark)


def ring_of(*members: control.Attached, rows: int = 8, chunk: int = 64, **known: Any) -> RingFacts:
    """A ring of these members, else of one; `known` are other fields of its facts than those they tell."""
    facts = RingFacts.of(members or [member_with()], epoch=1, max_rows=rows, prefill_chunk=chunk)
    return dataclasses.replace(facts, **({"costs": StepCosts(), "head": None} | known))
