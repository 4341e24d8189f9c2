"""Spans of a prompt that no chunk divides: the tokens that stand for an image.

The head names them and the gateway ends chunks, so the gateway has to know them. A row also never begins
inside one: what is kept of prompts is cut at their edges or outside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeAlias

from sealring.mesh.errors import InvalidInput
from sealring.v1 import control_pb2 as control

MAX_UNBROKEN = 1024
"""Spans of one prompt: more than the images that a request may have."""

Unbroken: TypeAlias = tuple[tuple[int, int], ...]
"""First token of each span, and the token behind its last; rising and disjoint."""


def unbroken(spans: Iterable[control.TokenSpan], tokens: int) -> Unbroken:
    """The spans of a prompt of `tokens` tokens. Raises InvalidInput (BAD_STEP) for spans that cannot be."""
    found = tuple((span.begin, span.end) for span in spans)
    edges = [0, *(edge for span in found for edge in span), tokens]
    empty = any(begin == end for begin, end in found)
    if len(found) > MAX_UNBROKEN or empty or edges != sorted(edges):
        raise InvalidInput(
            "the spans of a row that no chunk divides do not fit its prompt",
            reason="BAD_STEP",
            hint="gateway and head must run the same version",
        )
    return found


def around(spans: Unbroken, length: int) -> tuple[int, int]:
    """The span that a cut at this length would divide; (length, length) if there is none."""
    at = bisect_left(spans, length, key=lambda span: span[1])
    if at < len(spans) and spans[at][0] < length < spans[at][1]:
        return spans[at]
    return length, length
