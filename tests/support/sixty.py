"""Answers of a ring against those of the whole model: equal token for token, or a near tie that is named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from ringtest import Ring

from sealring.v1 import inference_pb2 as inference

_NAMES = ["Peru", "Japan", "Kenya", "Norway", "Egypt", "Canada", "Poland", "Cuba", "Greece", "Nepal"]
_THINGS = ["The sea", "A good friend", "My old dog", "The first computer", "Winter", "A black hole"]
_THINGS += ["The history of bread", "Music", "Our teacher", "The heart"]
TEXTS = [f"The capital of {name} is" for name in _NAMES]
TEXTS += [f"{number} times {number + 2} is" for number in range(3, 13)]
TEXTS += [f"{thing} is" for thing in _THINGS]
TEXTS += [f"def add_{number}(x):\n    return" for number in range(10)]
CHATS = [f"What do people eat in {name}?" for name in _NAMES]
CHATS += [f"Write a line about this: {thing.lower()}." for thing in _THINGS]
"""With the texts sixty prompts."""


LIMIT_SECONDS = 3600
"""Within which an answer has come. MLX's build for Linux computes long prompts of real models for minutes."""


def said(prompt: inference.Prompt) -> inference.Prompt:
    """A chat whose first message is the system's, so that no template puts in a longer one."""
    for message, role in zip(prompt.chat.messages, ("system", *("user", "assistant") * 8), strict=False):
        message.role = role
    return prompt


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    text: str
    cached: int = 0


@dataclass(frozen=True)
class Tie:
    """The first token in which an answer differs from the whole model's, `margin` being how far that one's
    logit is above the other's. `noise` is how much logits differ by the way in which mlx_lm computes them."""

    prompt: str
    place: int
    margin: float
    noise: float

    def is_near(self) -> bool:
        """Whether either of the two logits, wrong by the noise, explains it."""
        return self.margin <= 2 * self.noise


async def ask(
    ring: Ring,
    prompt: inference.Prompt,
    max_tokens: int,
    *,
    sealed: bool = False,
    on_piece: Callable[[], object] = lambda: None,
) -> Answer:
    """A greedy answer of a ring, without the token that ends it; `on_piece` is called with each piece."""
    asked = inference.Prompt()
    asked.CopyFrom(prompt)
    asked.sampling.logprobs = 0
    tokens, text = [], ""
    if sealed:
        async with ring.sealing(timeout=LIMIT_SECONDS) as client:
            reply = client.ask(asked, model=ring.model, max_tokens=max_tokens)
            async for delta in reply:
                tokens += [one.id for one in delta.logprobs]
                text += delta.text
                on_piece()
        return Answer(tuple(tokens), text, reply.completion.usage.cached_tokens)
    request = inference.GenerateRequest(
        model=ring.model, envelope=inference.Envelope(clear=asked), max_tokens=max_tokens
    )
    response = inference.GenerateResponse()
    async for response in ring.stub.Generate(request, timeout=LIMIT_SECONDS, metadata=ring.metadata()):
        tokens += [one.id for one in response.delta.logprobs]
        text += response.delta.text
        on_piece()
    return Answer(tuple(tokens), text, response.finished.cached_tokens)


async def ask_all(
    ring: Ring,
    asked: Sequence[inference.Prompt],
    max_tokens: int,
    *,
    on_piece: Callable[[], object] = lambda: None,
) -> list[Answer]:
    """Eight at a time, every other sealed."""
    eight = asyncio.Semaphore(8)

    async def one(place: int, prompt: inference.Prompt) -> Answer:
        async with eight:
            return await ask(ring, prompt, max_tokens, sealed=bool(place % 2), on_piece=on_piece)

    return await asyncio.gather(*(one(place, prompt) for place, prompt in enumerate(asked)))


class Whole:
    """A whole model that runs alone, greedy, one row: `encode` makes tokens of a prompt as a ring's head has
    to, and `ends` are the tokens that end an answer."""

    def __init__(
        self, model: Any, encode: Callable[[inference.Prompt], list[int]], ends: Collection[int]
    ) -> None:
        self.model, self.ids, self.ends = model, encode, ends

    def cache(self, kv_bits: int = 0) -> list[Any]:
        """An empty one of each layer. With `kv_bits` mlx_lm's quantized caches, from the first token on."""
        from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

        if kv_bits:
            return [QuantizedKVCache(64, kv_bits) for _ in self.model.layers]
        return list(make_prompt_cache(self.model))

    def answer(self, ids: Sequence[int], max_tokens: int, *, kv_bits: int = 0) -> list[int]:
        """Greedy, without the token that ends it."""
        return self.go_on(ids, max_tokens, self.cache(kv_bits))

    def go_on(self, ids: Sequence[int], max_tokens: int, cache: list[Any]) -> list[int]:
        """As `answer`, by a cache that keeps all of it."""
        from mlx_lm.generate import generate_step

        tokens: list[int] = []
        for token, _ in generate_step(mx.array(ids), self.model, max_tokens=max_tokens, prompt_cache=cache):
            if token in self.ends:
                break
            tokens.append(int(token))
        return tokens

    def tie(
        self,
        prompt: inference.Prompt,
        found: Sequence[int],
        expected: Sequence[int],
        *,
        kv_bits: int = 0,
    ) -> Tie | None:
        """The first place in which the two differ, and by how much. None for two that are equal."""
        pairs = enumerate(zip(found, expected, strict=False))
        place = next((place for place, (one, other) in pairs if one != other), None)
        end = min(self.ends)
        if place is None:
            if len(found) == len(expected):
                return None
            place = min(len(found), len(expected))
        own, whole = ([*tokens, end][place] for tokens in (found, expected))
        ids = self.ids(prompt) + list(expected[:place])
        ways = [self._logits(ids, size, kv_bits) for size in (len(ids), max(1, len(ids) - 1), 8, 3)]
        noise = max(abs(one[token] - ways[0][token]) for one in ways for token in (own, whole))
        margin = min(one[whole] - one[own] for one in ways)
        return Tie(str(prompt)[:200], place, margin, noise)

    def _logits(self, ids: list[int], size: int, kv_bits: int) -> list[float]:
        """After the last of these tokens, which come in chunks of `size`."""
        import mlx.core as mx

        cache = self.cache(kv_bits)
        for start in range(0, len(ids), size):
            logits = self.model(mx.array([ids[start : start + size]]), cache=cache)
            mx.eval([one.state for one in cache])
        values: list[float] = logits[0, -1].astype(mx.float32).tolist()
        return values


def check_all(
    whole: Whole,
    asked: Sequence[inference.Prompt],
    answers: Sequence[Answer],
    tokens: int,
    kv_bits: int = 0,
) -> list[tuple[Answer, list[int]]]:
    """The answers are those of the whole model, or near ties, which the output names. Those that are equal,
    with the whole model's tokens."""
    ties, equal = [], []
    for prompt, answer in zip(asked, answers, strict=True):
        expected = whole.answer(whole.ids(prompt), tokens, kv_bits=kv_bits)
        if tie := whole.tie(prompt, answer.tokens, expected, kv_bits=kv_bits):
            ties.append(tie)
        else:
            equal.append((answer, expected))
    print(f"{len(equal)} of {len(asked)} are equal", *ties, sep="\n")  # noqa: T201
    assert all(tie.is_near() for tie in ties), ties
    return equal
