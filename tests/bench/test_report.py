"""The table of targets is what the committed measurements say."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from bench import frame, report, speculate
from bench.verdict import MET, MISSED, OPEN
from sealring.mesh.errors import ConfigError

CHECK = {"name": "a target", "rounds": [1.0, 1.1, 1.2], "target": 2.0, "at_least": False}
EARLIER: dict[str, Any] = {
    "date": "2026-11-21",
    "figures": [
        CHECK | {"command": "python -m bench x", "said": "long ago"},
        CHECK | {"name": "another", "rounds": [2.1], "command": "python -m bench y", "said": "once"},
    ],
}
MEASURED: dict[str, Any] = {
    "bench": "x",
    "command": "python -m bench x -- --rounds 3",
    "commit": "abcdef0",
    "date": "2026-11-23T10:00:00+00:00",
    "machine": {"cores": 4, "processor": "P", "load_before": 0.1},
    "checks": [CHECK],
}


def test_what_was_measured_takes_the_place_of_a_figure_without_data() -> None:
    only_earlier = report.rows([], EARLIER)
    assert [(row.check.name, row.verdict) for row in only_earlier] == [
        ("a target", OPEN),
        ("another", MISSED),
    ]
    found = report.rows([MEASURED], EARLIER)
    assert [(row.check.name, row.verdict) for row in found] == [("a target", MET), ("another", MISSED)]
    assert "| a target | ≤ 2 | 1.2 | met |" in report.table(found)
    assert "2026-11-23, abcdef0, 4 cores of P, load 0.1 before" in report.table(found, report.ALL_COLUMNS)


def test_a_fault_is_met_after_three_rounds_without_a_loss() -> None:
    good = {"pause": 0.5, "back": 2.0, "lost": 0, "wrong": 0, "left": [], "errors": {}}
    good |= {"broken": "", "lacking": ""}
    lost = good | {"lost": 2, "errors": {"RING_DOWN": 2}, "pause": 3.0}
    measured = [
        [{"cases": {"a": good, "b": good, "c": good | {"lacking": "no root"}}} for _ in range(3)],
        [{"cases": {"a": good}}, {"cases": {"a": lost}}],
    ]
    first, second = (report.faults(runs).splitlines()[2:] for runs in measured)
    assert first == [
        "| a | nothing | 0.5 | 2 | 0 | 0 |  | 3 | met |",
        "| b | nothing | 0.5 | 2 | 0 | 0 |  | 3 | met |",
        "| c |  |  |  |  |  |  | 0 | open |",
    ]
    assert second == ["| a | RING_DOWN | 3 | 2 | 2 | 0 |  | 2 | missed |"]


def test_the_page_holds_what_the_measurements_say() -> None:
    for file, text in report.made().items():
        page = file.read_text()
        assert report.put(page, text) == page, "run: python -m bench report"
    with pytest.raises(ConfigError):
        report.put(page.replace(report.END, ""), "")


def test_the_table_has_no_targets_that_their_bench_does_not_measure_any_more() -> None:
    """And those of GPUs are marked, as the page says."""
    found = report.rows(report.reports(), json.loads((report.FOLDER / "data" / report.EARLIER).read_text()))
    names = [row.check.name for row in found if "bench speculate" in row.command]
    drafts = {name.removesuffix(" (one GPU)").removesuffix(" (GPU)") for name in names}
    assert drafts == set(speculate.SHOWN.values()) | set(speculate.DRAFTED_SHOWN.values())
    for row in found:
        if "--gpus" in row.command:
            assert "GPU" in row.check.name


def test_committed_measurements_are_of_clean_trees_and_say_nothing_of_the_workplace() -> None:
    for one in report.reports():
        assert frame.find(one["bench"]).name == one["bench"]
        assert not one["commit"].endswith("+")
        machine = copy.copy(one["machine"])
        assert not set(machine) - set(frame.machine()) - {"load_before", "load_after"}
