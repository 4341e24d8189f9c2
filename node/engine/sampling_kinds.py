"""One sampler of each kind, run when a stage is loaded on a GPU.

MLX builds a GPU's kernels for gathers, scatters and fused operations from source when they are first used. On
Metal that takes 0.1 to 0.5 s each, in the thread that computes, and all rows would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import mlx.core as mx

from sealring.node.engine import device
from sealring.node.engine.grammar import Matcher
from sealring.node.engine.params import DEFAULT_CONTEXT_SIZE, RowParameters
from sealring.node.engine.ranks import MOST
from sealring.node.engine.sampling import Sampler
from sealring.node.engine.staging import Stage


def _no_grammar() -> Matcher:
    """A matcher whose grammar was not compiled; it allows every token."""
    made: Future[None] = Future()
    made.cancel()
    return Matcher(made, [])


KINDS = (
    RowParameters(temperature=0.5),
    RowParameters(temperature=0.5, top_p=0.5),
    RowParameters(temperature=0.5, top_p=0.5, top_k=2),
    RowParameters(temperature=0.5, top_k=MOST + 1),
    RowParameters(temperature=0.5, min_p=0.5),
    RowParameters(repetition_penalty=2.0, repetition_context_size=DEFAULT_CONTEXT_SIZE, prompt_tail=(0,)),
    RowParameters(presence_penalty=1.0, frequency_penalty=1.0),
    RowParameters(logit_bias=((0, 1.0),)),
    RowParameters(masked_until=2, masked=(0,), masked_always=(1,)),
    RowParameters(logprobs=0),
    RowParameters(logprobs=2),
    RowParameters(matcher=_no_grammar()),
)
"""Together they depart from each default that changes what is computed."""


def warm_up(stage: Stage) -> None:
    """Runs the samplers of a stage that makes logits, unless the device has no kernels to build."""
    if stage.spec.makes_logits and not stage.pools and not device.rows_in_turn():
        inputs = [mx.zeros((1, 1, *tensor.tail), getattr(mx, tensor.dtype)) for tensor in stage.spec.receives]
        logits = stage.last_logits(inputs, stage.make_cache())
        for results in samples(logits.reshape(-1, logits.shape[-1])[-1:]):
            mx.eval(results)
        mx.clear_cache()


def samples(logits: mx.array) -> Iterator[list[mx.array]]:
    """Results of each kind alone, beside a greedy row, and after rows have joined and left.

    `logits`: [1, vocabulary].
    """
    for kind in KINDS:
        one = Sampler([kind], [0])
        yield _sample(one, logits)
        one.extend(Sampler([RowParameters(), kind], [0, 0]))
        yield _sample(one, mx.repeat(logits, 3, axis=0))
        one.filter([2, 1])
        yield _sample(one, mx.repeat(logits, 2, axis=0))


def _sample(sampler: Sampler, logits: mx.array) -> list[mx.array]:
    tokens = sampler(logits)
    report = sampler.report(logits, tokens)
    return [tokens] if report is None else [tokens, report]
