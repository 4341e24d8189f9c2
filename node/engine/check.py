"""Checks that a model cut into stages computes what the whole model computes.

The whole model is mlx-lm's own, called as mlx-lm calls it. Both sides go through one schedule: prompts of
different lengths prefilled in two chunks, rows joined into a batch, one admitted later, one evicted, one
taken out and put back. All logits are compared, and each side goes on with its own greedy tokens. Each row is
compared with the whole model running that row alone, too.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine import nvidia
from sealring.node.engine.apart import answer
from sealring.node.engine.check_report import about, cuts_of
from sealring.node.engine.check_runs import (
    Run,
    Staged,
    Whole,
    allowed,
    comparable,
    follow_alone,
    follow_long,
    follow_schedule,
    largest_difference,
    long_prompt,
    random_prompts,
    rounding,
)
from sealring.node.engine.configuration import check_fields
from sealring.node.engine.staging import Stage, random_model, random_stage
from sealring.node.engine.staging.anatomy import dissect, not_runnable
from sealring.node.engine.staging.bounds import reach_of
from sealring.node.engine.staging.skeleton import build_skeleton
from sealring.node.engine.weights import load_lazily, load_stage, read_config

_MAX_ROWS = 64


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
    """The largest difference of logits; None if one was not a number."""
    same: bool
    """Whether the difference is zero or, on a GPU, within rounding (`check_runs.allowed`)."""
    tokens_equal: bool
    tokens_compared: int
    alone_tokens_equal: bool
    """Whether each row's tokens are those of mlx-lm with the whole model and that row alone."""
    alone_max_abs_diff: float | None
    """The largest difference of logits in that comparison, up to where a row's tokens differ."""
    alone_equal: bool
    """Whether that is rounding: no more than half of a float's digits. If not, a row's answer depends on
    what else runs, which is so where mlx-lm batches an architecture wrongly."""
    reach: int = 0
    """The largest of the lengths that the model's arguments name, in tokens: windows, chunks, pools, keys."""
    longest: int = 0
    """Tokens of the longest prompt that was compared."""
    wrong_cuts: tuple[int, ...] = ()
    """Layers in front of which a cut is wrong, of the cuts that were compared."""

    @property
    def right(self) -> bool:
        """Whether the stages may serve: they compute the whole model, and each row as if it were alone."""
        return self.same and self.tokens_equal and self.alone_equal


def check(
    path_or_config: str | Path | dict[str, Any],
    *,
    splits: Sequence[int] | None = None,
    stages: int | None = None,
    rows: int = 3,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    adapter: str = "",
    seconds: float = 0.0,
) -> CheckReport:
    """Compares the whole model with its stages, with real weights for a model folder, else with random ones.

    `path_or_config`: a model folder, a config.json, `file.json#key` for one of several configurations in a
    file, or a configuration. `splits`: layers per stage; `stages`: as many stages of about the same size.
    Without either there is a cut of each kind that the model has.
    `dtype` is that of random weights. `adapter` is the folder of an adapter for a model's folder.
    `seconds`: how long the whole model may compute a prompt that is longer than its windows and the like; 0
    leaves that out.

    Raises InvalidInput, ModelError.
    """
    if not 1 <= rows <= _MAX_ROWS:
        raise InvalidInput(f"rows must be 1 to {_MAX_ROWS}", hint="choose fewer rows", param="rows")
    nvidia.register()  # the states between stages travel as in an engine
    source = _source(path_or_config, seed, dtype, Path(adapter) if adapter else None)
    model = source.whole()
    anatomy = dissect(build_skeleton(source.config), source.config["model_type"])
    count = len(anatomy.layers)
    if splits is None and stages is None and (cuts := cuts_of(anatomy)):
        splits = [end - start for start, end in pairwise([0, *cuts, count])]
    ranges = ranges_of(count, splits=splits, stages=stages)
    prompts = random_prompts(rows, anatomy.logits.tail[0], seed)
    reach = reach_of(model)
    long, chunks = long_prompt(reach, anatomy.logits.tail[0], seed)
    whole = Whole(model, anatomy.adapter)
    try:
        expected = follow_schedule(prompts, whole)
    except (RuntimeError, ValueError) as error:
        raise not_runnable(source.config["model_type"], error) from error
    with anatomy.adapter.unrounded(model):
        together = follow_schedule(prompts, whole) if anatomy.adapter.rounds else expected
        alone = follow_alone(prompts, whole, [len(expected.tokens[row]) for row in range(rows)])
    far, chunks = follow_long(long, whole, chunks, seconds) if seconds else ([], [])
    del model, whole
    mx.clear_cache()

    def compare(ranges: Sequence[tuple[int, int]]) -> tuple[Run, float | None]:
        staged = Staged([source.stage(lo, hi) for lo, hi in ranges])
        run = follow_schedule(prompts, staged)
        return run, largest_difference(
            [*expected.logits, *far], [*run.logits, *follow_long(long, staged, chunks)[0]]
        )

    def same(difference: float | None) -> bool:
        return difference is not None and difference <= allowed(expected)

    got, difference = compare(ranges)
    wrong = [] if same(difference) else [lo for lo, _ in ranges[1:]]
    if len(wrong) > 1:
        wrong = [cut for cut in wrong if not same(compare([(0, cut), (cut, count)])[1])]
    apart = largest_difference(*comparable(together, alone))
    return CheckReport(
        model_type=source.config["model_type"],
        layers=count,
        stages=[list(one) for one in ranges],
        rows=rows,
        seed=seed,
        weights=source.kind,
        exact=difference == 0.0,
        max_abs_diff=difference,
        same=same(difference),
        tokens_equal=expected.tokens == got.tokens,
        tokens_compared=sum(map(len, got.tokens.values())),
        alone_tokens_equal=together.tokens == alone.tokens,
        alone_max_abs_diff=apart,
        alone_equal=apart is not None and apart <= rounding(alone),
        reach=reach,
        longest=max(sum(chunks), *(prompt.shape[1] for prompt in prompts)),
        wrong_cuts=tuple(wrong),
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


def main() -> int:
    """`python -m sealring.node.engine.check PATH OPTIONS`, options as JSON. Prints the report."""
    forbid_core_files()
    path, options = sys.argv[1:]

    def report() -> dict[str, Any]:
        found = check(path, **json.loads(options))
        known = about(Path(path), configuration_of(path))
        return dataclasses.asdict(found) | {"right": found.right} | known

    return answer(report)


@dataclass(frozen=True)
class _Source:
    config: dict[str, Any]
    kind: str
    whole: Callable[[], nn.Module]
    stage: Callable[[int, int], Stage]


def _source(
    path_or_config: str | Path | dict[str, Any], seed: int, dtype: mx.Dtype, adapter: Path | None
) -> _Source:
    if isinstance(path_or_config, dict):
        return _random_source(path_or_config, seed, dtype)
    path = Path(path_or_config)
    if path.is_dir():
        model, config = load_lazily(path, adapter=adapter)
        return _Source(
            config, "real", lambda: model, lambda lo, hi: load_stage(path, lo, hi, adapter=adapter)
        )
    return _random_source(configuration_of(path_or_config), seed, dtype)


def configuration_of(path: str | Path) -> dict[str, Any]:
    """The configuration of a model's folder, of a config.json, or of `file.json#key`. Raises ModelError."""
    if Path(path).is_dir():
        return read_config(Path(path))
    name, _, key = str(path).partition("#")
    config = read_configurations(Path(name))
    if key:
        if key not in config:
            raise ModelError(
                f"{name} has no configuration {key}", reason="MODEL_NOT_FOUND", hint="check the key"
            )
        config = config[key]
    if not isinstance(config, dict):
        raise ModelError(f"{name} is not a JSON object", reason="BAD_MODEL_CONFIG", hint="give a config.json")
    check_fields(Path(name).name, config)
    return config


def read_configurations(file: str | Path) -> dict[str, Any]:
    """A JSON file that holds a configuration, or several by key. Raises ModelError."""
    path = Path(file)
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"there is no model folder or configuration {path}",
            reason="MODEL_NOT_FOUND",
            hint="check the path",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not JSON", reason="BAD_MODEL_CONFIG", hint="give a config.json"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} is not a JSON object", reason="BAD_MODEL_CONFIG", hint="give a config.json")
    return found


def _random_source(config: dict[str, Any], seed: int, dtype: mx.Dtype) -> _Source:
    return _Source(
        config,
        "random",
        lambda: random_model(config, seed=seed, dtype=dtype),
        lambda lo, hi: random_stage(config, lo, hi, seed=seed, dtype=dtype),
    )


if __name__ == "__main__":
    sys.exit(main())
