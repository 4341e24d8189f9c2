"""Checks that a model cut into stages computes what the whole model computes.

The whole model is mlx-lm's own, called as mlx-lm calls it. Both sides go through one schedule: prompts of
different lengths prefilled in two chunks, rows joined into a batch, one admitted later, one evicted, one taken
out and put back. All logits are compared, and each side goes on with its own greedy tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mesh.errors import InvalidInput, ModelError
from node.engine.staging import Stage, caches, random_model, random_stage
from node.engine.staging.anatomy import dissect, full_cache
from node.engine.staging.skeleton import build_skeleton
from node.engine.weights import load_lazily, load_stage

_MAX_ROWS = 64
_FIRST_CHUNK = 2
_DECODE_STEPS = 9
_ADMIT_AT, _EVICT_AT, _EXTRACT_AT = 2, 4, 6


@dataclass(frozen=True)
class CheckReport:
    """The outcome. `exact` means that every logit of every step is the same float."""

    model_type: str
    layers: int
    stages: list[list[int]]
    rows: int
    seed: int
    weights: str
    exact: bool
    max_abs_diff: float | None
    """None where a logit was not a number."""
    tokens_equal: bool
    tokens_compared: int


def check(
    path_or_config: str | Path | dict[str, Any],
    *,
    splits: Sequence[int] | None = None,
    stages: int | None = None,
    rows: int = 3,
    seed: int = 0,
) -> CheckReport:
    """Compares the whole model with its stages, with real weights for a model folder, else with random ones.

    `path_or_config`: a model folder, a config.json, `file.json#key` for one of several configurations in a
    file, or a configuration. `splits`: layers per stage; `stages`: as many stages of about the same size.

    Raises InvalidInput, ModelError.
    """
    if not 1 <= rows <= _MAX_ROWS:
        raise InvalidInput(f"rows must be 1 to {_MAX_ROWS}", hint="choose fewer rows", param="rows")
    source = _source(path_or_config, seed)
    model = source.whole()
    anatomy = dissect(build_skeleton(source.config), source.config["model_type"])
    count = len(anatomy.layers)
    ranges = ranges_of(count, splits=splits, stages=stages)
    prompts = _prompts(rows, anatomy.logits.tail[0], seed)
    expected = _follow(prompts, _Whole(model))
    del model
    mx.clear_cache()
    got = _follow(prompts, _Staged([source.stage(lo, hi) for lo, hi in ranges]))
    difference = _largest_difference(expected.logits, got.logits)
    return CheckReport(
        model_type=source.config["model_type"],
        layers=count,
        stages=[list(one) for one in ranges],
        rows=rows,
        seed=seed,
        weights=source.kind,
        exact=difference == 0.0,
        max_abs_diff=None if math.isnan(difference) else difference,
        tokens_equal=expected.tokens == got.tokens,
        tokens_compared=len(expected.tokens),
    )


def ranges_of(
    layers: int, *, splits: Sequence[int] | None = None, stages: int | None = None
) -> list[tuple[int, int]]:
    """The layer ranges for layers per stage, or for a number of stages of about the same size."""
    if splits is not None:
        if stages is not None and stages != len(splits):
            raise InvalidInput("stages and split disagree", hint="give one of them", param="split")
        if any(size < 1 for size in splits) or sum(splits) != layers:
            raise InvalidInput(
                f"a split into {','.join(map(str, splits))} layers does not fit {layers} layers",
                hint=f"give positive numbers that sum to {layers}",
                param="split",
            )
        sizes = list(splits)
    else:
        stages = min(2, layers) if stages is None else stages
        if not 1 <= stages <= layers:
            raise InvalidInput(
                f"{layers} layers cannot make {stages} stages",
                hint=f"choose 1 to {layers} stages",
                param="stages",
            )
        sizes = [layers // stages + (number < layers % stages) for number in range(stages)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True)
class _Source:
    config: dict[str, Any]
    kind: str
    whole: Callable[[], nn.Module]
    stage: Callable[[int, int], Stage]


def _source(path_or_config: str | Path | dict[str, Any], seed: int) -> _Source:
    if isinstance(path_or_config, dict):
        return _random_source(path_or_config, seed)
    name, _, key = str(path_or_config).partition("#")
    path = Path(name)
    if path.is_dir():
        model, config = load_lazily(path)
        return _Source(config, "real", lambda: model, lambda lo, hi: load_stage(path, lo, hi))
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"there is no model folder or configuration {path.name}",
            reason="MODEL_NOT_FOUND",
            hint="check the path",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path.name} is not JSON", reason="BAD_MODEL_CONFIG", hint="give a config.json"
        ) from error
    if key:
        if not isinstance(config, dict) or key not in config:
            raise ModelError(
                f"{path.name} has no configuration {key}", reason="MODEL_NOT_FOUND", hint="check the key"
            )
        config = config[key]
    if not isinstance(config, dict):
        raise ModelError(
            f"{path.name} is not a JSON object", reason="BAD_MODEL_CONFIG", hint="give a config.json"
        )
    return _random_source(config, seed)


def _random_source(config: dict[str, Any], seed: int) -> _Source:
    return _Source(
        config,
        "random",
        lambda: random_model(config, seed=seed),
        lambda lo, hi: random_stage(config, lo, hi, seed=seed),
    )


class _Whole:
    """mlx-lm's model as it is."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def new_cache(self) -> list[Any]:
        return [full_cache(self._model)]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        (own,) = cache
        if not isinstance(own, caches.RowByRow):
            return self._model(tokens, cache=own)
        return mx.concatenate([self._model(tokens[row : row + 1], cache=one) for row, one in enumerate(own)])


class _Staged:
    """The stages, each given what the one before it hands on."""

    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def new_cache(self) -> list[Any]:
        return [stage.make_cache() for stage in self._stages]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        state = [tokens]
        for stage, own in zip(self._stages, cache, strict=True):
            state = stage(state, own)
            mx.eval(state)
        return state[0]


@dataclass
class _Trace:
    logits: list[mx.array]
    tokens: list[int]

    def note(self, logits: mx.array) -> mx.array:
        """Keeps the logits; returns the greedy tokens, [rows, 1]."""
        mx.eval(logits)
        self.logits.append(logits)
        chosen = mx.argmax(logits[:, -1].astype(mx.float32), axis=-1)
        self.tokens.extend(chosen.tolist())
        return chosen[:, None].astype(mx.uint32)


def _follow(prompts: list[mx.array], machine: _Whole | _Staged) -> _Trace:
    """Runs the schedule. A machine's cache is a list with one cache per stage."""
    trace = _Trace([], [])
    waiting = [_prefill(prompt, machine, trace) for prompt in prompts]
    late = [waiting.pop()] if len(waiting) > 1 else []
    batch = _per_stage(caches.merge, *[cache for cache, _ in waiting])
    tokens = mx.concatenate([token for _, token in waiting])
    for step in range(_DECODE_STEPS):
        if step == _ADMIT_AT and late:
            joining = _per_stage(caches.merge, late[0][0])
            batch = [caches.extend(a, b) for a, b in zip(batch, joining, strict=True)]
            tokens = mx.concatenate([tokens, late[0][1]])
        if step == _EVICT_AT and len(tokens) > 1:
            keep = list(range(1, len(tokens)))
            batch = [caches.filter(own, keep) for own in batch]
            tokens = tokens[mx.array(keep)]
        if step == _EXTRACT_AT:
            last = len(tokens) - 1
            alone = [caches.extract(own, last) for own in batch]
            rest = [caches.filter(own, list(range(last))) for own in batch]
            batch = [caches.extend(a, b) for a, b in zip(rest, _per_stage(caches.merge, alone), strict=True)]
        tokens = trace.note(machine(tokens, batch))
    return trace


def _prefill(prompt: mx.array, machine: _Whole | _Staged, trace: _Trace) -> tuple[list[Any], mx.array]:
    cache = machine.new_cache()
    token = prompt[:, :0]
    for chunk in (prompt[:, :_FIRST_CHUNK], prompt[:, _FIRST_CHUNK:]):
        token = trace.note(machine(chunk, cache))
    return cache, token


def _per_stage(operation: Callable[[Sequence[Any]], Any], *rows: list[Any]) -> list[Any]:
    return [operation(own) for own in zip(*rows, strict=True)]


def _prompts(rows: int, vocabulary: int, seed: int) -> list[mx.array]:
    """Random prompts of different lengths, uint32 [1, length]."""
    key = mx.random.key(seed)
    lengths = [_FIRST_CHUNK + 1 + (5 * row + 2) % 11 for row in range(rows)]
    return [
        mx.random.randint(0, vocabulary, (1, length), key=one).astype(mx.uint32)
        for one, length in zip(mx.random.split(key, rows), lengths, strict=True)
    ]


def _largest_difference(expected: list[mx.array], got: list[mx.array]) -> float:
    largest = 0.0
    for one, two in zip(expected, got, strict=True):
        difference = mx.max(mx.abs(one.astype(mx.float32) - two.astype(mx.float32))).item()
        if not math.isfinite(difference):
            return math.nan
        largest = max(largest, difference)
    return largest
