"""The sampling options of the client, by the names that the contract has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """How an answer is sampled; what is left out, or None, is off. docs/sampling.md explains each."""

    temperature: float
    """0, as when it is left out, is greedy; at most 2."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str]
    repetition_penalty: float | None
    repetition_context_size: int | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    """The answer does not end before it has so many."""
    ignore_eos: bool
    """The answer does not end by itself: `max_tokens` or `stop` ends it."""
    stop_token_ids: Sequence[int]
    """At most 16 more tokens that end the answer."""
    num_draft_tokens: int | None
    """Tokens guessed in one step at most, where the deployment speculates; 0: none."""
    logprobs: int | None
    """How many likeliest tokens are told beside each one, at most 20; None for no log-probabilities."""
