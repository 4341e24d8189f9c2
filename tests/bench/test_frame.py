"""The frame of the benchmarks, and that every benchmark fits it."""

import argparse
import json

import pytest

from bench import frame
from bench.summaries import percentile, summary
from bench.verdict import MET, MISSED, OPEN, Check
from sealring.mesh.errors import NotFound


@pytest.mark.parametrize("name", frame.MODULES)
def test_every_benchmark_has_its_name_options_and_a_quick_way(name):
    benchmark = frame.find(name)
    assert benchmark.name == name
    assert benchmark.summary
    options = frame.parse(benchmark, benchmark.quick)
    assert isinstance(options, argparse.Namespace)


def test_unknown_benchmarks_are_refused_with_those_that_there_are():
    with pytest.raises(NotFound) as caught:
        frame.find("nothing")
    assert "together" in caught.value.hint


def test_a_report_says_what_was_measured_on_what_and_which_targets_were_met(tmp_path):
    benchmark = frame.Benchmark(
        "example",
        "an example",
        lambda parser: parser.add_argument("--value", type=float, default=1.0),
        lambda options: {"value": options.value},
        lambda result: [],
        lambda result: [Check("value", [result["value"]], 2.0, at_least=True)],
    )
    report = frame.measure(benchmark, ["--value", "3"])
    assert report["checks"][0]["verdict"] == OPEN
    three = frame.measure(benchmark, ["--value", "3"], times=3)
    assert three["checks"][0]["rounds"] == [3.0] * 3
    assert three["checks"][0]["verdict"] == MET
    assert three["command"] == "python -m bench example --times 3 --value 3"
    assert len(three["earlier"]) == 2
    assert report["command"] == "python -m bench example --value 3"
    assert report["machine"]["cores"] >= 1
    assert frame.measure(benchmark, [])["checks"][0]["verdict"] == MISSED
    frame.write_json(report, tmp_path / "deep" / "report.json")
    assert json.loads((tmp_path / "deep" / "report.json").read_text()) == report
    pytest.importorskip("matplotlib")
    frame.write_png(report, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_percentiles_are_of_nearest_rank():
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.95) == 95
    assert percentile([7.0], 0.5) == 7
    assert summary(values) == {
        "count": 100,
        "mean": 50.5,
        "p50": 50.0,
        "p95": 95.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert summary([]) == {"count": 0}
