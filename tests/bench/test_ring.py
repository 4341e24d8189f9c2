"""A tiny ring of real engines and carriers under the benchmark makes the tokens of mlx-lm's generator."""

from pathlib import Path

import pytest

from bench import ring, ring_processes
from bench.frame import find, parse
from bench.models import SHAPES, configuration
from bench.verdict import MET, MISSED

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> ring.Result:
    return ring.run(parse(find("ring"), ["--shape", "4x64", "--steps", "8", "--warm", "2", *arguments]))


@pytest.mark.timeout(600)
def test_a_ring_sealed_or_not_makes_the_tokens_of_one_process() -> None:
    result = run("--runs", "2x2,2/1x3@40", "--baseline", "4,3@40", "--unsealed")
    assert result["same_tokens"] == 1.0
    assert {one["name"] for one in result["runs"]} == {
        "one process, 4 rows",
        "one process, 3 rows, 40 tokens",
        "2 stages, 2 x 2 rows",
        "2 stages, 2 x 2 rows, unsealed",
        "2 stages, 1 x 3 rows, 40 tokens",
        "2 stages, 1 x 3 rows, unsealed, 40 tokens",
    }
    assert result["ratios"]["2 stages, 2 x 2 rows / 2 stages, 2 x 2 rows, unsealed"] > 0
    assert "2 stages, 1 x 3 rows, 40 tokens / one process, 4 rows" not in result["ratios"]
    stage = next(one for one in result["runs"] if one["name"] == "2 stages, 2 x 2 rows")["stages"][0]
    assert stage["fed-launched"] > 0
    assert ring.checks(result) == []


def test_targets_are_checked_where_they_apply() -> None:
    name = "2 stages, 2 x 32 rows / one process, 64 rows"
    met, missed = ({"shape": shape, "rounds": {name: [0.87] * 3}} for shape in ("8b", "70b"))
    assert [one.verdict for one in ring.checks(met)] == [MET]
    assert [one.verdict for one in ring.checks(missed)] == [MISSED]


@pytest.mark.parametrize(
    ("shape", "split"),
    [("8b", [32]), ("8b", [17, 15]), ("8b", [9, 9, 8, 6]), ("70b", [9, 8, 8, 7]), ("4x64", [2, 2])],
)
def test_the_output_head_counts_as_layers(shape: str, split: list[int]) -> None:
    assert ring_processes.split_layers(configuration(SHAPES[shape]), len(split)) == split


def test_nothing_outside_the_benchmark_knows_a_carrier_that_does_not_seal() -> None:
    sources = [
        path
        for part in ("mesh", "node", "gateway", "coordinator", "cli")
        for path in ROOT.glob(f"{part}/**/*.py")
    ]
    assert sources
    assert [path for path in sources if "ring_carrier" in path.read_text()] == []
