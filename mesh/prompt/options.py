"""Options by which an answer is sampled: one line each has the name, the type and the bounds.

The client library takes them by these types. The bounds are checked by the client, the gateway and the head
(validate.py), and are those of the fields of HTTP bodies (sealring/api/sampling.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypedDict, get_origin, get_type_hints

if TYPE_CHECKING:
    from sealring.v1.model_pb2 import ModelCard

MAX_TEMPERATURE = 2.0
MAX_DRAFT_TOKENS = 256
MAX_TOP_K = 1 << 20
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.1, 10.0
MAX_REPETITION_CONTEXT_SIZE = 4096
MAX_PENALTY = 2.0
"""The bound of presence and frequency penalties, positive or negative."""

MAX_LOGPROBS = 20
MAX_TOKENS = (1 << 31) - 1


@dataclass(frozen=True)
class Bounds:
    """The least and the greatest value of a number. With `above`, `least` itself is out of bounds."""

    least: float
    most: float
    above: bool = False

    def hold(self, value: float) -> bool:
        """Whether the value is within the bounds; NaN never is."""
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        least, most = (f"{one:g}" if isinstance(one, float) else str(one) for one in (self.least, self.most))
        return f"above {least} and at most {most}" if self.above else f"from {least} to {most}"


class SamplingOptions(TypedDict, total=False):
    """How an answer is sampled; what is left out, or None, is off. docs/sampling.md explains each."""

    temperature: Annotated[float, Bounds(0, MAX_TEMPERATURE)]
    """0, as when it is left out, is greedy."""
    top_p: Annotated[float | None, Bounds(0, 1, above=True)]
    top_k: Annotated[int | None, Bounds(0, MAX_TOP_K)]
    min_p: Annotated[float | None, Bounds(0, 1)]
    seed: int | None
    stop: str | Sequence[str]
    repetition_penalty: Annotated[float | None, Bounds(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)]
    repetition_context_size: Annotated[int | None, Bounds(1, MAX_REPETITION_CONTEXT_SIZE)]
    presence_penalty: Annotated[float, Bounds(-MAX_PENALTY, MAX_PENALTY)]
    frequency_penalty: Annotated[float, Bounds(-MAX_PENALTY, MAX_PENALTY)]
    logit_bias: Mapping[int, float]
    min_tokens: Annotated[int, Bounds(0, MAX_TOKENS)]
    """The fewest tokens of an answer that neither `stop` nor a tool call ends."""
    ignore_eos: bool
    """The answer does not end by itself: `max_tokens` or `stop` ends it."""
    stop_token_ids: Sequence[int]
    """At most 16 more tokens that end the answer."""
    num_draft_tokens: Annotated[int | None, Bounds(0, MAX_DRAFT_TOKENS)]
    """Tokens guessed in one step at most, where the deployment speculates; 0: none."""
    logprobs: Annotated[int | None, Bounds(0, MAX_LOGPROBS)]
    """The number of likeliest tokens to report beside each token; None: no log-probabilities."""


def bounds_of(options: type) -> Mapping[str, Bounds]:
    """The bounds of each field of a TypedDict that has some."""
    return {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(options, include_extras=True).items()
        if get_origin(hint) is Annotated
    }


def plain_of(options: type) -> Mapping[str, type]:
    """The fields of a TypedDict that are a number or a switch, with their types."""
    return {
        name: kind
        for name, hint in get_type_hints(options).items()
        for kind in (int, float, bool)
        if hint in (kind, kind | None)
    }


_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_SMALL = Bounds(0, 1 << 50)
BOUNDS = bounds_of(SamplingOptions)
PLAIN = plain_of(SamplingOptions)
MODELS_OWN = {"temperature": 2, "top_p": 4, "top_k": 8, "min_p": 16, "repetition_penalty": 64}
"""Options that a model's folder may have for requests that do not name them: their bits in `unnamed`."""


def own_of(card: ModelCard, unnamed: int = sum(MODELS_OWN.values())) -> dict[str, float]:
    """The options that a model has of its own, out of those with a bit in `unnamed`."""
    own = {field.name: value for field, value in card.ListFields() if MODELS_OWN.get(field.name, 0) & unnamed}
    return {name: one if isinstance(one, int) else float(f"{one:.6g}") for name, one in own.items()}


def is_card(card: ModelCard) -> bool:
    """Whether what a node or a gateway says of a model may be shown: numbers in bounds, texts of one word."""
    return all(
        _WORD.match(one) if isinstance(one, str) else BOUNDS.get(field.name, _SMALL).hold(one)
        for field, one in card.ListFields()
    )
