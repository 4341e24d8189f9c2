"""Warms a loaded stage up, and finds out meanwhile whether its code evaluates arrays while it is called.

A decode step's graph is built before its input arrives (docs/decisions/0008). A model that evaluates an array
in the middle of its call, as some mixtures of experts do to route tokens, would compute with the buffer's old
content. A receive buffer knows whether it was evaluated, so one call of each kind shows it. An epoch checks
every step that it builds ahead as well, so none is missed silently.

How long steps take is timed as well, for the scheduler to plan by (gateway.scheduler.facts).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence

import mlx.core as mx
import structlog

from sealring.node.engine import device, records
from sealring.node.engine.staging import ShardSpec, Stage, TensorSpec, caches
from sealring.node.engine.staging.caches import Cache
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.engine.transfer import Transfer, through_record, transfer
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

TIMED_ROWS, TIMED_TOKENS = 16, (1, 4, 8, 16, 32, 128, 512)
"""Rows of a decode step, and tokens of chunks, that are timed; of these also the longest that is allowed."""

LONG = 0.25
"""Seconds: a chunk that would take longer, by what the two before took, is not timed. After a fault all
answers wait for this, and the table goes on in the same line."""

_CUT_TRIAL = (3, 5)
"""Tokens of two chunks of one row."""

_BATCH_TRIAL = (3, 5)
"""Tokens of two rows."""

_ROUNDING = 0.05
"""Part of the largest logit by which products in half precision may differ after some tens of layers."""

_STUCK, _SLOWER = 4.0, 20.0
"""Seconds without an answer after which a device is stuck, and how many times as long as the longest chunk of
a prompt's beginning. A later chunk takes longer, since it looks back at more, and others use the device."""


def warm_up(stage: Stage, longest: int) -> None:
    """Runs some tokens, so that the first requests do not wait for kernels to be compiled or loaded: of two
    rows alone, and of a lane that they join and leave. What is handed on is made a record, as in an epoch.
    No chunk has more tokens than one of `longest` is computed as.

    Then `stage.awaits_input`, `stage.cuts` and `stage.batches` are known. Raises what mlx raises on what it
    cannot compute on this machine.
    """
    if not device.rows_in_turn():  # there a pass more costs what any token does
        stage.cuts = cuts(stage)
        if stage.batches and stage.gpu_code and not batches(stage):
            stage.batches = False
            log.warning("rows_differ_in_batches", model_type=stage.spec.model_type)
    ahead = list(_steps(stage, longest))
    mx.clear_cache()
    stage.awaits_input = not all(ahead)
    if stage.awaits_input:
        log.info("stage_awaits_input", model_type=stage.spec.model_type)


def cuts(stage: Stage) -> bool:
    """Whether a chunk's last token has the same logits if only its own are made.

    False if a model's code looks at the other tokens behind its layers, and at a rank of a tensor ring, whose
    sums take all ranks.
    """
    if not stage.spec.is_tail or isinstance(stage.spec, ShardSpec):
        return False
    chunks = [_inputs(stage, tokens, tokens) for tokens in _CUT_TRIAL]
    whole, cut = stage.make_cache(), stage.make_cache()
    stage.cuts = True
    try:
        for chunk in chunks:
            expected, found = stage(chunk, whole)[0][:, -1, :], stage.last_logits(chunk, cut)
            if found.shape != expected.shape or not _alike(found, expected):
                return False
    except Exception as error:  # a model's own code may raise anything on one token for several
        log.info("stage_makes_all_logits", model_type=stage.spec.model_type, why=type(error).__name__)
        return False
    finally:
        stage.cuts = False
    return True


def batches(stage: Stage) -> bool:
    """Whether two rows of different lengths have the same results in a batch as alone, but for rounding.

    Taken as true at a rank of a tensor ring, which cannot try alone.
    """
    if isinstance(stage.spec, ShardSpec):
        return True
    following = [_inputs(stage, 1, drawn) for drawn in _BATCH_TRIAL]
    alone, rows = [], []
    for tokens, token in zip(_BATCH_TRIAL, following, strict=True):
        caches_of_row = [stage.make_cache(), stage.make_cache()]
        for cache in caches_of_row:
            mx.eval(stage(_inputs(stage, tokens, tokens), cache))
        alone.append(stage(token, caches_of_row[0]))
        rows.append(caches_of_row[1])
    both = [mx.concatenate(list(arrays)) for arrays in zip(*following, strict=True)]
    together = stage(both, caches.merge(rows))
    return all(
        _alike(found[place : place + 1], expected)
        for place, own in enumerate(alone)
        for found, expected in zip(together, own, strict=True)
        if mx.issubdtype(expected.dtype, mx.floating)
    )


def _inputs(stage: Stage, tokens: int, drawn: int) -> list[mx.array]:
    return [_drawn(tensor, tokens, drawn) for tensor in stage.spec.receives]


def _drawn(tensor: TensorSpec, tokens: int, drawn: int) -> mx.array:
    """A tensor of the stage state that is not zero, for zeros are the same everywhere; numbers are tokens."""
    shape, dtype = (1, tokens, *tensor.tail), getattr(mx, tensor.dtype)
    key = mx.random.key(drawn)
    if mx.issubdtype(dtype, mx.floating):
        return mx.random.normal(shape, key=key).astype(dtype)
    return mx.random.randint(0, 2, shape, key=key).astype(dtype)


def _alike(found: mx.array, expected: mx.array) -> bool:
    """Whether arrays are equal but for rounding: one row's product may add up in another order than
    several."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    furthest = mx.abs(found - expected).max()
    return bool((furthest <= _ROUNDING * mx.abs(expected).max()).item())


def timed(stage: Stage, longest: int, long: float = LONG) -> list[control.StepTime]:
    """Times of a warmed-up stage's steps: of one row, of several, and of a prompt's first chunk.

    Chunks have up to `longest` tokens, fewer if one would take more than `long` seconds.
    """
    made = transfer()
    found: list[control.StepTime] = []
    for tokens in sorted({tokens for tokens in TIMED_TOKENS if tokens < longest} | {longest}):
        if _expected(found, tokens) > long:
            break
        took = min(_seconds(stage, made, stage.make_cache(), 1, tokens) for _ in range(_times()))
        found.append(_step_time(1, tokens, took))
    row = stage.make_cache()
    _runs_ahead(stage, made, row, 1, 1)
    lane = caches.merge([row, *(copy.deepcopy(row) for _ in range(TIMED_ROWS - 1))])
    took = min(_seconds(stage, made, lane, TIMED_ROWS, 1) for _ in range(1 + _times()))
    made.close()
    mx.clear_cache()
    return [*found, _step_time(TIMED_ROWS, 1, took)]


def patience(times: Sequence[control.StepTime], longest: int) -> float:
    """Seconds after which a GPU that has not answered never will, by the times of `timed`; CPUs always
    answer."""
    if device.rows_in_turn():
        return math.inf
    last = next((time for time in reversed(times) if time.rows == 1), None)
    if last is None:
        return _STUCK
    # No line through two short chunks, which read all weights and take alike: a long one computes for longer.
    return max(_STUCK, _SLOWER * last.microseconds / 1e6 * max(1.0, longest / last.tokens))


def _expected(found: Sequence[control.StepTime], tokens: int) -> float:
    """Seconds of a chunk on the line through the last two that were timed; 0 before there are two."""
    if len(found) < 2:
        return 0.0
    before, last = found[-2:]
    each = max(0, last.microseconds - before.microseconds) / (last.tokens - before.tokens)
    return (last.microseconds + each * (tokens - last.tokens)) / 1e6


def _times() -> int:
    """Attempts of a measurement: a GPU loads kernels and makes plans at a new shape, and wakes slowly."""
    return 1 if mx.default_device() == mx.cpu else 5


def _seconds(stage: Stage, made: Transfer, cache: Cache, rows: int, tokens: int) -> float:
    begun = time.perf_counter()
    _runs_ahead(stage, made, cache, rows, tokens)
    return time.perf_counter() - begun


def _step_time(rows: int, tokens: int, seconds: float) -> control.StepTime:
    return control.StepTime(rows=rows, tokens=tokens, microseconds=max(1, round(seconds * 1e6)))


def _steps(stage: Stage, longest: int) -> Iterator[bool]:
    """Whether each of the steps ran ahead of its input."""
    made = transfer()
    most = min(stage.computed_as(longest), stage.positions)
    for tokens in (tokens for tokens in device.warm_up_lengths() if tokens <= most):
        yield _runs_ahead(stage, made, stage.make_cache(), 1, tokens)
    rows = [stage.make_cache(), stage.make_cache()]
    for cache in rows:
        for tokens in (2, 1):
            yield _runs_ahead(stage, made, cache, 1, tokens)
    lane = caches.merge(rows)
    yield _runs_ahead(stage, made, lane, 2, 1)
    copied = caches.extract(lane, 0)
    lane = caches.recompose(lane, [1], [copied])
    yield _runs_ahead(stage, made, lane, 2, 1)
    made.close()


def _runs_ahead(stage: Stage, made: Transfer, cache: Cache, rows: int, tokens: int) -> bool:
    """Whether the input was evaluated with the results and not before, by its receive buffer."""
    buffer = made.receive_buffer(stage.spec.receives, rows, tokens)
    size = sum(records.state_bytes(tensor, rows, tokens) for tensor in stage.spec.receives)
    buffer.fill(memoryview(bytes(size)))  # with zeros, which is a token of every vocabulary
    if stage.spec.makes_logits:
        logits = stage.last_logits(buffer.arrays, cache)
        early = buffer.evaluated
        through_record(made, [mx.argmax(logits, axis=-1)], [TOKENS], rows, 1)
    else:
        outputs = stage(buffer.arrays, cache)
        early = buffer.evaluated
        through_record(made, outputs, stage.spec.hands_on, rows, tokens)
    return buffer.evaluated and not early
