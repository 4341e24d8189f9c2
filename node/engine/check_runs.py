"""The runs that `check` compares: one schedule of rows, followed by a whole model and by its stages."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.node.engine import caches
from sealring.node.engine.seats.results import states
from sealring.node.engine.staging import Stage
from sealring.node.engine.staging.adapters import Adapter
from sealring.node.engine.staging.anatomy import full_cache
from sealring.node.engine.transfer import through_record, transfer

FIRST_CHUNK = 2
"""Tokens of a prompt's first chunk."""

DECODE_STEPS = 7
ADMIT_AT, EVICT_AT, MOVE_AT = 1, 3, 5
"""Decode steps of the schedule, and the steps at which rows change."""


LONG_CHUNK, LONG_STEPS = 190, 3
"""Tokens of a chunk of a long prompt, which ends inside windows and pools; single tokens behind the last."""

COMPARED = 48
"""Tokens of a chunk at most of which logits are computed. Those of longer chunks would take most of a check
where a vocabulary is large; the token behind each shows what it left in the caches."""

MOST_TOKENS = 1 << 14


class Whole:
    """mlx-lm's model, unchanged for one row; several rows are computed as in a stage."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        if adapter.together:
            adapter.together(model)
        self._model = model
        self._batches = adapter.batches

    def new_cache(self) -> list[Any]:
        return [caches.for_one_row(full_cache(self._model), self._batches)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        (own,) = cache
        if not isinstance(own, caches.RowByRow):
            return self._call(tokens, own)
        return mx.concatenate([self._call(tokens[row : row + 1], one) for row, one in enumerate(own)])

    def advance(self, tokens: mx.array, cache: list[Any]) -> None:
        """Computes what the tokens leave in the caches, and no logits."""
        self(tokens, cache)
        mx.eval(states(cache))

    def _call(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


class Staged:
    """The stages, each on the state that the one before hands on in a record."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._transfer = transfer()

    def new_cache(self) -> list[Any]:
        return [stage.make_cache() for stage in self._stages]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self._logits(tokens, cache)
        mx.eval(logits)
        self._transfer.settle()
        return logits

    def advance(self, tokens: mx.array, cache: list[Any]) -> None:
        """Computes what the tokens leave in the caches, and no logits."""
        self._logits(tokens, cache)
        mx.eval(states(cache))
        self._transfer.settle()

    def _logits(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        rows, length = tokens.shape
        state = [tokens]
        for stage, own in zip(self._stages, cache, strict=True):
            outputs = stage(state, own)
            if stage.spec.is_tail:
                break
            tensors = stage.spec.hands_on
            payload = through_record(self._transfer, outputs, tensors, rows, length)
            buffer = self._transfer.receive_buffer(tensors, rows, length)
            buffer.fill(payload)
            state = buffer.arrays
        return outputs[0]


class Run:
    """The results of a run: all logits, and the last logits and greedy tokens by row."""

    def __init__(self) -> None:
        self.logits: list[mx.array] = []
        self.last: dict[int, list[mx.array]] = defaultdict(list)
        self.tokens: dict[int, list[int]] = defaultdict(list)

    def note(self, rows: Sequence[int], logits: mx.array) -> mx.array:
        """Keeps the logits of these rows; returns their greedy tokens, uint32 [rows, 1]."""
        mx.eval(logits)
        self.logits.append(logits)
        last = logits[:, -1].astype(mx.float32)
        chosen = mx.argmax(last, axis=-1).astype(mx.uint32)
        for place, row in enumerate(rows):
            self.last[row].append(last[place])
            self.tokens[row].append(_token(chosen[place]))
        return chosen[:, None]


def follow_schedule(prompts: Sequence[mx.array], machine: Whole | Staged) -> Run:
    """Prefills every prompt by itself, then decodes the rows together.

    The last row is admitted late, the first evicted early, and then one is taken out and put back. A
    machine's cache is a list with one cache per stage.
    """
    run = Run()
    waiting = [_prefill(row, prompt, machine, run) for row, prompt in enumerate(prompts)]
    rows = list(range(max(1, len(prompts) - 1)))
    batch = _per_stage(caches.merge, *[waiting[row][0] for row in rows])
    tokens = mx.concatenate([waiting[row][1] for row in rows])
    for step in range(DECODE_STEPS):
        if step == ADMIT_AT and len(rows) < len(prompts):
            cache, token = waiting[-1]
            batch = _recompose(batch, rows, [cache])
            tokens = mx.concatenate([tokens, token])
            rows.append(len(rows))
        if step == EVICT_AT and len(rows) > 1:
            rows = rows[1:]
            batch = _recompose(batch, range(1, len(tokens)), [])
            tokens = tokens[1:]
        if step == MOVE_AT:
            moved = [caches.extract(own, len(rows) - 1) for own in batch]
            batch = _recompose(batch, range(len(rows) - 1), [moved])
        tokens = run.note(rows, machine(tokens, batch))
    return run


def follow_long(
    prompt: mx.array, machine: Whole | Staged, chunks: Sequence[int], seconds: float = math.inf
) -> tuple[list[mx.array], list[int]]:
    """Computes a long prompt, uint32 [1, length], in chunks of these numbers of tokens. The logits of chunks
    of at most COMPARED tokens, and the chunks that were computed: fewer where `seconds` have passed before
    the end."""
    cache, found, done, end = machine.new_cache(), list[mx.array](), 0, time.monotonic() + seconds
    for number, chunk in enumerate(chunks, 1):
        tokens = prompt[:, done : done + chunk]
        done += chunk
        if chunk > COMPARED:
            machine.advance(tokens, cache)
            continue
        found.append(machine(tokens, cache))
        mx.eval(found[-1])
        if time.monotonic() > end:
            return found, list(chunks[:number])
    return found, list(chunks)


def long_prompt(reach: int, vocabulary: int, seed: int) -> tuple[mx.array, list[int]]:
    """A random prompt that is longer than `reach` tokens, uint32 [1, length], and its chunks: long ones with
    a single token behind each, and a shorter one with single tokens behind it."""
    longer = min(reach, MOST_TOKENS) + LONG_CHUNK // 2 - COMPARED
    chunks = [each for done in range(0, longer, LONG_CHUNK) for each in (min(LONG_CHUNK, longer - done), 1)]
    chunks += [COMPARED] + [1] * LONG_STEPS
    shape = (1, sum(chunks))
    return mx.random.randint(0, vocabulary, shape, key=mx.random.key(seed)).astype(mx.uint32), chunks


def follow_alone(prompts: Sequence[mx.array], machine: Whole, lengths: Sequence[int]) -> Run:
    """Computes each row alone, for `lengths` tokens."""
    run = Run()
    for row, prompt in enumerate(prompts):
        cache, token = _prefill(row, prompt, machine, run)
        while len(run.tokens[row]) < lengths[row]:
            token = run.note([row], machine(token, cache))
    return run


def random_prompts(rows: int, vocabulary: int, seed: int) -> list[mx.array]:
    """Random prompts of different lengths, one of a single token, uint32 [1, length]."""
    lengths = [1 if row == 1 else FIRST_CHUNK + 1 + (5 * row + 2) % 11 for row in range(rows)]
    return [
        mx.random.randint(0, vocabulary, (1, length), key=key).astype(mx.uint32)
        for key, length in zip(mx.random.split(mx.random.key(seed), rows), lengths, strict=True)
    ]


def largest_difference(one: Sequence[mx.array], two: Sequence[mx.array]) -> float | None:
    """The largest difference between two lists of logits; None if one is not a number."""
    largest = 0.0
    for left, right in zip(one, two, strict=True):
        difference = mx.max(mx.abs(left.astype(mx.float32) - right.astype(mx.float32))).item()
        assert isinstance(difference, float)
        if not math.isfinite(difference):
            return None
        largest = max(largest, difference)
    return largest


def comparable(one: Run, two: Run) -> tuple[list[mx.array], list[mx.array]]:
    """The last logits of each row in two runs, up to the first whose greedy tokens differ."""
    found: tuple[list[mx.array], list[mx.array]] = ([], [])
    for row, tokens in one.tokens.items():
        pairs = zip(tokens, two.tokens[row], strict=True)
        same = next((place for place, (left, right) in enumerate(pairs) if left != right), len(tokens))
        for run, logits in zip((one, two), found, strict=True):
            logits += run.last[row][: same + 1]
    return found


def rounding(run: Run) -> float:
    """How far logits may be from the same ones rounded otherwise: half of their digits."""
    largest = max(float(mx.max(mx.abs(logits)).item()) for rows in run.last.values() for logits in rows)  # type: ignore[arg-type]
    return math.sqrt(mx.finfo(run.logits[0].dtype).eps) * largest


def allowed(run: Run) -> float:
    """How far stages may be from the whole model: not at all on a CPU, and `rounding` on a GPU. Libraries of
    GPUs choose a product's kernel by where its arrays lie, and kernels add up in different orders."""
    return 0.0 if mx.default_device() == mx.cpu else rounding(run)


def _prefill(row: int, prompt: mx.array, machine: Whole | Staged, run: Run) -> tuple[list[Any], mx.array]:
    """The row's cache after its prompt, in two chunks, and its first token; the first chunk's is kept too."""
    cache = machine.new_cache()
    first, rest = prompt[:, :FIRST_CHUNK], prompt[:, FIRST_CHUNK:]
    token = run.note([row], machine(first, cache))
    return cache, run.note([row], machine(rest, cache)) if rest.size else token


def _per_stage(operation: Any, *rows: list[Any]) -> list[Any]:
    return [operation(own) for own in zip(*rows, strict=True)]


def _recompose(batch: list[Any], keep: Sequence[int], rows: Sequence[list[Any]]) -> list[Any]:
    own = zip(*rows, strict=True) if rows else [()] * len(batch)
    return [caches.recompose(mine, keep, theirs) for mine, theirs in zip(batch, own, strict=True)]


def _token(chosen: mx.array) -> int:
    token = chosen.item()
    assert isinstance(token, int)
    return token
