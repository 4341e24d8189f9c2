"""Answers of which a small model, an MTP head or a drafter that reads hidden states is right about each token
with a given probability, by construction.

The large model goes through a cycle of tokens that is longer than an answer, so that nothing repeats. It
draws: the cycle's next token with that probability, else any other. The small model is sure of the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.drafters import drafter
from bench.models import SAID, Shape, printable, random_model
from bench.paced.figures import StageTime
from sealring.v1 import inference_pb2

CYCLE = 600
"""Tokens of the cycle."""

SURE = 40.0
"""The logit of the next token by what guesses."""

_STRIDE = 97
"""Tokens of the cycle between the beginnings of two answers."""

_NEVER = 1e-3

_MOST = 8
"""Drafts of a row in a step, in arithmetic."""


def models(large: Shape, small: Shape) -> tuple[Path, Path]:
    """The folders of both models."""
    return (
        random_model(dataclasses.replace(large, vocabulary=0, says=CYCLE)),
        random_model(dataclasses.replace(small, vocabulary=0, says=CYCLE, said=SURE)),
    )


def model_with_head(shape: Shape) -> Path:
    """The folder of a model with an MTP head."""
    return random_model(dataclasses.replace(shape, kind="mimo", vocabulary=0, says=CYCLE, guessed=SURE))


def model_with_drafter(shape: Shape, kind: str) -> tuple[Path, Path]:
    """The folders of a model and of a drafter that reads its hidden states, of a key of
    bench.drafters.LAYERS."""
    says = dataclasses.replace(shape, vocabulary=0, says=CYCLE)
    model = random_model(says)
    return model, drafter(model, says, kind, SURE)


def request(
    model: str, number: int, tokens: int, right: float, *, drafts: bool
) -> inference_pb2.GenerateRequest:
    """The request number `number`. With `right` 0 the small model is hardly ever right."""
    odds = max(right, _NEVER) * (CYCLE - 1) / (1 - right)
    temperature = min(2.0, SAID / math.log(max(2.0, odds)))
    sampling = inference_pb2.Sampling(seed=number, temperature=temperature)
    if not drafts:
        sampling.num_draft_tokens = 0
    first = printable(CYCLE)[number * _STRIDE % CYCLE]
    prompt = inference_pb2.Prompt(tokens=inference_pb2.TokenIds(ids=[first]), sampling=sampling)
    envelope = inference_pb2.Envelope(clear=prompt)
    return inference_pb2.GenerateRequest(model=model, envelope=envelope, max_tokens=tokens)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, its tokens a second after its first piece, and tokens guessed and right."""

    text: str
    rate: float
    drafts: tuple[int, int]


def reachable(stages: Sequence[StageTime], draft: StageTime, rows: int, right: float, hop: float) -> float:
    """Times as fast with drafts as without, by figures alone: for the best lanes of `rows` rows and the best
    number of drafts in each, if every lane has one run at a time.

    A round takes what the busiest Mac computes of all lanes, and as long as the longest lane's step takes
    from Mac to Mac. The first Mac guesses besides, for all rows of a lane at once.
    """

    def rate(lanes: Sequence[int], drafts: Sequence[int]) -> float:
        times = [
            [one.step(size, 1 + more, 0) for one in stages] for size, more in zip(lanes, drafts, strict=True)
        ]
        for each, size, more in zip(times, lanes, drafts, strict=True):
            each[0] += more * draft.step(size, 1, 0)
        busiest = max(sum(stage) for stage in zip(*times, strict=True))
        longest = max(sum(each) for each in times) + len(stages) * hop
        each_row = [sum(right**n for n in range(1 + more)) for more in drafts]
        tokens = sum(size * each for size, each in zip(lanes, each_row, strict=True))
        return tokens / max(busiest, longest)

    ways = list(_lanes(rows, rows))
    plain = max(rate(lanes, [0] * len(lanes)) for lanes in ways)
    best = max(
        rate(lanes, drafts) for lanes in ways for drafts in itertools.product(range(_MOST), repeat=len(lanes))
    )
    return best / plain


def _lanes(rows: int, largest: int) -> Iterator[list[int]]:
    """All ways to spread rows over lanes of at most `largest`."""
    if not rows:
        yield []
    for size in range(min(rows, largest), 0, -1):
        yield from ([size, *others] for others in _lanes(rows - size, size))


async def answer(stub: Any, asked: inference_pb2.GenerateRequest) -> Answer:
    """Sends a request."""
    text, first, counted, drafts = "", 0.0, 0, (0, 0)
    async for event in stub.Generate(asked):
        if event.HasField("delta"):
            text += event.delta.text
            if not first:
                first, counted = time.perf_counter(), event.delta.tokens
        elif event.HasField("finished"):
            drafts = event.finished.drafted_tokens, event.finished.accepted_tokens
    return Answer(text, (asked.max_tokens - counted) / (time.perf_counter() - first), drafts)
