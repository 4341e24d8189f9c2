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
from collections.abc import Callable, Iterable, Iterator, Sequence

import mlx.core as mx
import structlog

from sealring.mesh.ring.spread import between
from sealring.node.engine import caches, device, records
from sealring.node.engine.caches import Cache
from sealring.node.engine.staging import ShardSpec, Stage, TensorSpec
from sealring.node.engine.staging.layout import TOKENS
from sealring.node.engine.transfer import Transfer, through_record, transfer
from sealring.v1 import control_pb2 as control

log = structlog.get_logger()

TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Rows of a decode step that are timed first. Those at which a device changes its kernels follow."""

TIMED_TOKENS = (1, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens of a chunk that are timed, with the longest that is allowed. Up to 64 a Mac's products rise in
stairs; between powers of two 6 alone lies well on one, as the least of a chunk beside few rows."""

LONG_ROWS = (1, 8)
"""Rows of a decode step that is timed behind the longest chunk that was."""

SECONDS = 3.0
"""Seconds that all timed steps may take, without first attempts: half are for rows, and the largest sizes are
left out. A fault is over only once this is. With 2 s a 70B model on two M4 Max lacks the step of 10 rows,
which costs as much as one of 32."""

LONG_ON_CPU, LONG_ON_GPU = 0.25, 1.0
"""Seconds: a step that would take longer, by what smaller ones took, is not timed. Without the length at
which a GPU is busy with one chunk no chunk would ever be as long."""

_CUT_TRIAL = (3, 5)
"""Tokens of two chunks of one row."""

_BATCH_TRIAL = (3, 5)
"""Tokens of two rows."""

_AGAIN = 2
"""How often all steps are timed again, while there are seconds left."""

_LONG_CONTEXT = 64
"""Tokens in caches from which a step behind them is timed: fewer cost nothing that could be seen."""

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
    chunks = [drawn_inputs(stage, tokens, tokens) for tokens in _CUT_TRIAL]
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
    following = [drawn_inputs(stage, 1, drawn) for drawn in _BATCH_TRIAL]
    alone, rows = [], []
    for tokens, token in zip(_BATCH_TRIAL, following, strict=True):
        caches_of_row = [stage.make_cache(), stage.make_cache()]
        for cache in caches_of_row:
            mx.eval(stage(drawn_inputs(stage, tokens, tokens), cache))
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


def drawn_inputs(stage: Stage, tokens: int, drawn: int) -> list[mx.array]:
    """Tensors of the stage state of one row, by the number `drawn`."""
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


def timed(
    stage: Stage,
    longest: int,
    rows: int,
    seconds: float = SECONDS,
    long: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[control.StepTime]:
    """Times of a warmed-up stage's steps: decode steps of up to `rows` rows, a prompt's first chunk of up to
    `longest` tokens, and decode steps behind as many tokens as the longest chunk that was timed.

    Steps of more than `long` seconds are left out, and those that do not fit into `seconds` in all, but for
    the smallest two of each kind.
    """
    if long is None:
        long = LONG_ON_CPU if device.rows_in_turn() else LONG_ON_GPU
    trial = _Trial(stage, long, clock)
    trial.time_rows(
        seconds / 2, _sizes(TIMED_ROWS, rows), [edge for edge in device.row_edges() if edge < rows]
    )
    trial.time_chunks(seconds / 2, _sizes(TIMED_TOKENS, min(longest, stage.positions)))
    trial.time_long(sorted({min(size, rows) for size in LONG_ROWS}))
    for _ in range(_AGAIN):
        trial.time_again()
    trial.close()
    return trial.found


def _sizes(sizes: Sequence[int], most: int) -> list[int]:
    return sorted({size for size in sizes if size < most} | {most})


Taken = dict[int, float]
"""Seconds of a step by its rows or tokens."""


class _Trial:
    """Steps of one stage that are timed, none of which is to take more than `most` seconds. `left` are the
    seconds to go."""

    def __init__(self, stage: Stage, most: float, clock: Callable[[], float]) -> None:
        self._stage, self._made, self._left = stage, transfer(), 0.0
        self._most, self._clock = most, clock
        self._begun = stage.make_cache()  # of a row of one token
        self._lane: Cache = []
        self._held = 0  # rows in the lane
        self._row: Cache = []
        self._context = 0  # tokens in the row
        self._decoding: Taken = {}
        self._chunks: Taken = {}
        self._behind: Taken = {}  # behind the row's tokens

    @property
    def found(self) -> list[control.StepTime]:
        """What came out."""
        return [
            *(_noted(rows, 1, took) for rows, took in sorted(self._decoding.items())),
            *(_noted(1, tokens, took) for tokens, took in sorted(self._chunks.items()) if tokens > 1),
            *(_noted(rows, 1, took, self._context) for rows, took in sorted(self._behind.items())),
        ]

    def time_rows(self, seconds: float, sizes: Sequence[int], edges: Sequence[int]) -> None:
        """Times decode steps of the sizes, then at the edges between them."""
        self._left += seconds
        _runs_ahead(self._stage, self._made, self._begun, 1, 1)
        self._time_each([*sizes, *edges], self._decode, self._decoding)
        self._lane, self._held = [], 0

    def time_chunks(self, seconds: float, sizes: Sequence[int]) -> None:
        self._left += seconds
        self._chunks[1] = self._decoding[1]
        self._time_each(sizes, self._chunk, self._chunks)

    def time_long(self, sizes: Sequence[int]) -> None:
        if self._context >= _LONG_CONTEXT:
            self._time_each(sorted(self._decoding.keys() & sizes), self._decode_behind, self._behind)

    def time_again(self) -> None:
        """Times every step again, the shortest first, and takes the least time: a moment in which others have
        the device makes a step slow however often it is tried then."""
        for taken, seconds in (
            (self._decoding, self._decode),
            (self._chunks, self._chunk),
            (self._behind, self._decode_behind),
        ):
            for size in sorted(taken):
                if self._left >= taken[size]:
                    taken[size] = min(taken[size], seconds(size, least=1))
            self._lane, self._held = [], 0

    def close(self) -> None:
        self._made.close()
        self._begun, self._row = [], []
        mx.clear_cache()

    def _decode(self, size: int, least: int = 0) -> float:
        more = [copy.deepcopy(self._begun) for _ in range(size - self._held)]
        self._lane = caches.recompose(self._lane, range(min(self._held, size)), more)
        self._held = size
        return self._time(lambda: self._lane, size, 1, least)

    def _chunk(self, size: int, least: int = 0) -> float:
        row: Cache = []

        def fresh() -> Cache:
            nonlocal row
            row = self._stage.make_cache()
            return row

        took = self._time(fresh, 1, size, least)
        if size > self._context:
            self._row, self._context = row, size
        return took

    def _decode_behind(self, size: int, least: int = 0) -> float:
        lane = caches.merge([copy.deepcopy(self._row) for _ in range(size)])
        return self._time(lambda: lane, size, 1, least)

    def _time_each(self, sizes: Iterable[int], seconds: Callable[[int], float], taken: Taken) -> None:
        """The smallest two in any case, and others unless by those that were timed they take too long."""
        for size in sizes:
            known = tuple(sorted(taken.items()))
            if size not in taken and (len(known) < 2 or between(known, size) <= min(self._most, self._left)):
                taken[size] = seconds(size)

    def _time(self, cache: Callable[[], Cache], rows: int, tokens: int, least: int) -> float:
        """Seconds of a step, the least of `least` attempts; 0: of as many as a first time takes. A GPU's are
        two, of which the first loads kernels, makes plans for the shape, and costs no seconds."""
        attempts: list[float] = []
        for _ in range(least or _first_times()):
            given = cache()
            begun = self._clock()
            _runs_ahead(self._stage, self._made, given, rows, tokens)
            attempts.append(self._clock() - begun)
        self._left -= sum(attempts[1:] or attempts)
        return min(attempts)


def _noted(rows: int, tokens: int, seconds: float, context: int = 0) -> control.StepTime:
    took = max(1, round(seconds * 1e6))
    return control.StepTime(rows=rows, tokens=tokens, microseconds=took, context=context)


def patience(times: Sequence[control.StepTime], longest: int) -> float:
    """Seconds after which a GPU that has not answered never will, by the times of `timed`; CPUs always
    answer."""
    if device.rows_in_turn():
        return math.inf
    last = next((time for time in reversed(times) if time.rows == 1 and not time.context), None)
    if last is None:
        return _STUCK
    # No line through two short chunks, which read all weights and take alike: a long one computes for longer.
    return max(_STUCK, _SLOWER * last.microseconds / 1e6 * max(1.0, longest / last.tokens))


def _first_times() -> int:
    """Attempts of a step that is timed first."""
    return 1 if mx.default_device() == mx.cpu else 2


def _steps(stage: Stage, longest: int) -> Iterator[bool]:
    """Whether each of the steps ran ahead of its input."""
    made = transfer()
    most = min(stage.computed_as(longest), stage.positions)
    for tokens in (tokens for tokens in device.accelerator().lengths if tokens <= most):
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
    if not device.rows_in_turn():  # there is no kernel to build
        inputs = [mx.zeros((2, 1, *one.tail), getattr(mx, one.dtype)) for one in stage.spec.receives]
        turned = mx.array([1, 0], mx.uint32)  # as rows whose places are in another order
        outputs = stage([array[turned] for array in inputs], lane)
        mx.eval([array[turned] for array in outputs])
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
