"""`sealring bench`: what is shown and written of a benchmark, here of one that measures nothing."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands.bench import _frame
from sealring.cli.terminal.exit_codes import CHECK_FAILED

frame = _frame()
everything = importlib.import_module("bench.everything")
Check = importlib.import_module("bench.verdict").Check

pytestmark = pytest.mark.usefixtures("signals")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures the number that its option gives; a target is 2."""
    found = frame.Benchmark(
        "example",
        "an example",
        lambda parser: parser.add_argument("--value", type=float, default=3.0),
        lambda options: {"value": options.value},
        lambda result: [frame.Table("out", ["value"], [[result["value"]]])],
        lambda result: [Check("value", [result["value"]], 2.0, at_least=True)],
        quick=("--value", "5"),
    )
    choose(monkeypatch, found)
    return found


def choose(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(frame, "find", lambda name: found)


def test_a_table_and_the_verdict_of_each_target_are_shown(here: Any, example: Any) -> None:
    done = here("bench", "example")
    assert "example: an example" in done.err
    assert done.out.startswith("out\n")
    target, verdict = done.out.splitlines()[-2:]
    assert target.split() == ["target", "worst", "wanted", "rounds"]
    assert verdict.split() == ["value", "3.00", ">=", "2", "1", "open"]
    assert done.status == 0


def test_runs_options_and_the_quick_way(here: Any, example: Any) -> None:
    assert here("bench", "example", "--times", "3").out.splitlines()[-1].split()[-2:] == ["3", "met"]
    assert "5.00" in here("bench", "example", "--quick").out
    assert "4.00" in here("bench", "example", "--quick", "--value", "4").out, "a given one counts"
    assert here("bench", "example", "--times", "0").status == 2


def test_measurements_are_printed_or_written_where_it_was_said(
    here: Any, example: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(frame, "write_png", lambda report, path: drawn.append(path))
    assert here("bench", "example", "--json", "-").data["data"] == {"value": 3.0}
    assert (drawn, list(home.iterdir())) == ([], [])
    here("bench", "example", "--json", "one.json", "--png", "one.png", "--out", "all")
    for file in (home / "one.json", home / "all" / "example.json"):
        assert json.loads(file.read_text())["data"] == {"value": 3.0}
    assert drawn == [Path("one.png"), Path("all/example.png")]


@pytest.mark.parametrize(
    ("gate", "value", "status"), [(True, "1", CHECK_FAILED), (True, "2", 0), (False, "1", 0)]
)
def test_only_a_gate_that_fails_fails_the_command(
    here: Any, example: Any, monkeypatch: pytest.MonkeyPatch, gate: bool, value: str, status: int
) -> None:
    choose(monkeypatch, dataclasses.replace(example, gate=gate))
    done = here("bench", "example", "--value", value)
    assert done.status == status
    assert ("failed: example" in done.err) == bool(status)


def test_benchmarks_are_listed_by_themselves(here: Any) -> None:
    shown = here("bench").out.splitlines()
    assert [line.split()[0] for line in shown[1:]] == list(frame.MODULES)


@pytest.mark.parametrize("good", [True, False])
def test_all_of_them_fail_the_command_if_one_did(
    here: Any, monkeypatch: pytest.MonkeyPatch, home: Path, good: bool
) -> None:
    asked: list[Any] = []

    def run_all(*, quick: bool, out: Path | None, say: Any) -> list[Any]:
        asked.append((quick, out))
        outcomes = [("one", "done", 1.0), ("two", "done" if good else "failed", 2.0)]
        return [everything.Outcome(name, outcome, seconds, 60.0) for name, outcome, seconds in outcomes]

    monkeypatch.setattr(everything, "run_all", run_all)
    done = here("bench", "all", "--quick", "--out", "there")
    assert asked == [(True, Path("there"))]
    assert "3 s altogether" in done.out
    assert (done.status, "failed: two" in done.err) == ((0, False) if good else (CHECK_FAILED, True))
    for other in (("--json", "x"), ("--png", "x"), ("--value", "3")):
        assert here("bench", "all", *other).status == 2
