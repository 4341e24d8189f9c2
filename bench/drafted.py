"""Answers of which a small model is right about each token with a given probability, by construction.

The large model goes through a cycle of tokens that is longer than an answer, so that nothing repeats. It
draws: the cycle's next token with that probability, else any other. The small model is sure of the next one.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from bench.models import SAID, Shape, printable, random_model
from sealring.v1 import inference_pb2

CYCLE = 600
"""Tokens of the cycle."""

_SURE = 40.0
_STRIDE = 97
"""Tokens of the cycle between the beginnings of two answers."""

_NEVER = 1e-3


def models(large: Shape, small: Shape) -> tuple[Path, Path]:
    """The folders of both models."""
    return (
        random_model(dataclasses.replace(large, vocabulary=0, says=CYCLE)),
        random_model(dataclasses.replace(small, vocabulary=0, says=CYCLE, said=_SURE)),
    )


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
    drafted: int
    accepted: int


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
    return Answer(text, (asked.max_tokens - counted) / (time.perf_counter() - first), *drafts)
