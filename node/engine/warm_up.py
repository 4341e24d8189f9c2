"""Warms a loaded stage up, and finds out meanwhile whether its code evaluates arrays while it is called.

A decode step's graph is built before its input is there (docs/decisions/0008). A model that looks at an array
in the middle of its call, as some mixtures of experts look where tokens are routed, would compute with what
lay there before. A landing tells whether it was evaluated, whatever its content, so a call of each kind that
steps make shows it. `StageEpoch` asks the same of every step that it builds ahead, so none is missed
silently.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import structlog

from sealring.node.engine import device, records
from sealring.node.engine.staging import Stage, caches
from sealring.node.engine.staging.caches import Cache
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.engine.transfer import Transfer, through_record, transfer

log = structlog.get_logger()


def warm_up(stage: Stage) -> None:
    """Runs some tokens, so that the first requests do not wait for kernels to be compiled or loaded: of two
    rows alone, and of a lane that they join and leave. What is handed on is made a record, as in an epoch.

    Then `stage.awaits_input` is known. Raises what mlx raises on what it cannot compute on this machine.
    """
    ahead = list(_steps(stage))
    mx.clear_cache()
    stage.awaits_input = not all(ahead)
    if stage.awaits_input:
        log.info("stage_awaits_input", model_type=stage.spec.model_type)


def _steps(stage: Stage) -> Iterator[bool]:
    """Whether each of the steps ran ahead of its input."""
    made = transfer()
    rows = [stage.make_cache(), stage.make_cache()]
    for cache in rows:
        for tokens in device.warm_up_lengths():
            yield _runs_ahead(stage, made, cache, 1, tokens)
    lane = caches.merge(rows)
    yield _runs_ahead(stage, made, lane, 2, 1)
    copied = caches.extract(lane, 0)
    lane = caches.extend(caches.filter(lane, [1]), caches.merge([copied]))
    yield _runs_ahead(stage, made, lane, 2, 1)
    made.close()


def _runs_ahead(stage: Stage, made: Transfer, cache: Cache, rows: int, tokens: int) -> bool:
    """Whether the input was evaluated with the results and not before, also as far as landings can tell."""
    landing = made.landing(stage.spec.receives, rows, tokens)
    size = sum(records.state_bytes(tensor, rows, tokens) for tensor in stage.spec.receives)
    landing.fill(memoryview(bytes(size)))  # with zeros, which is a token of every vocabulary
    outputs = stage(landing.arrays, cache)
    early = landing.evaluated
    if stage.spec.is_tail:
        through_record(made, [mx.argmax(outputs[0][:, -1, :], axis=-1)], [TOKENS], rows, 1)
    else:
        through_record(made, outputs, stage.spec.hands_on, rows, tokens)
    return landing.evaluated and not early
