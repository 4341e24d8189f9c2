"""The options of a question, by the names that the contract has for them."""

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
    """The fewest tokens of an answer that neither `stop` nor a tool call ends."""
    ignore_eos: bool
    """The answer does not end by itself: `max_tokens` or `stop` ends it."""
    stop_token_ids: Sequence[int]
    """At most 16 more tokens that end the answer."""
    num_draft_tokens: int | None
    """Tokens guessed in one step at most, where the deployment speculates; 0: none."""
    logprobs: int | None
    """The number of likeliest tokens to report beside each token, at most 20; None: no log-probabilities."""


class RequestOptions(TypedDict, total=False):
    """The model, the bounds and the place in the queue of a question."""

    model: str
    """The deployment's name; empty for the only one."""
    max_tokens: int
    """The most tokens of the answer; 0: as many as the context holds."""
    min_trust: int
    """0 to 30: a ring with a member that scores less gets nothing."""
    timeout: float | None
    """Seconds, at most 3600; None: the client's."""
    n: int
    """The number of answers, at most 8."""
    priority: int
    """-10 to 10, the lower the earlier among this client's questions."""
    deadline_ms: int
    """The answer begins within this time or is refused; 0: no deadline."""
    prompt_cache_key: str | None
    """Questions with the same key go to the same ring, unless it is too busy. None: the key is derived from
    the beginning of the conversation; empty: the least busy ring answers. The key stays in this process."""


class Options(RequestOptions, SamplingOptions, total=False):
    """All options of a chat or a completion."""
