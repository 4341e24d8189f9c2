"""The ten scenarios and how their outcome is judged."""

import pytest

from bench import frame, scenarios
from bench.sealed import Measured
from bench.verdict import MISSED
from sealring.client import Completion, Ring, Usage


def measured(**milliseconds):
    ring = Ring("ring-0", "demo", 10, 1, b"", (), clear_links=False)
    segments = {name: value / 1e3 for name, value in milliseconds.items()}
    return Measured(segments, "", Completion("3", "stop", Usage(20, 2), "demo", "r", ring))


GOOD = {"encrypt": 1, "ttft": 50, "total_e2e": 60}


def report(many):
    return scenarios.judged(scenarios.SCENARIOS[0], ["demo"], many, 2.0)


def test_the_table_is_that_of_the_published_benchmark():
    assert len(scenarios.SCENARIOS) == 10
    assert sum(one.requests for one in scenarios.SCENARIOS) == 450
    heavy = scenarios.SCENARIOS[-1]
    assert (heavy.concurrency, heavy.prompt_bytes) == (100, 10_240)


@pytest.mark.parametrize("size", [0, 10_240])
def test_prompts_end_with_their_question_and_have_their_size(size):
    text = scenarios.prompt(7, size)
    assert text.endswith("What is 7+8? Answer with just the number.")
    assert len(text.encode()) == size or not size


def test_quick_segments_pass():
    found = report([measured(**GOOD)] * 3)
    assert found["passed"]
    assert found["segments_ms"]["encrypt"]["count"] == 3


def test_a_slow_segment_fails():
    assert not report([measured(**(GOOD | {"encrypt": 6}))] * 3)["passed"]


def test_a_missing_segment_fails():
    rest = {name: value for name, value in GOOD.items() if name != "encrypt"}
    found = report([measured(**rest)])
    assert not found["passed"]
    broken = [one["assertion"] for one in found["assertions"] if not one["passed"]]
    assert broken == ["encrypt:mean<=5ms", "encrypt:p95<=50ms"]


def test_a_failed_request_fails():
    found = report([measured(**GOOD), Measured(error="QUEUE_FULL")])
    assert not found["passed"]
    assert found["errors"] == {"QUEUE_FULL": 1}
    assert any(
        one.name.endswith("failed requests") and one.verdict == MISSED
        for one in scenarios.checks({"scenarios": [found]})
    )


def test_a_share_of_a_scenario_still_fills_its_rings():
    heavy, first = scenarios.SCENARIOS[-1], scenarios.SCENARIOS[0]
    assert heavy.shared(1.0) == heavy
    assert heavy.shared(0.1).requests == 12
    assert first.shared(0.5).requests == 15
    assert first.shared(0.01).requests == 4
    for bad in ("0", "1.5", "-1"):
        with pytest.raises(SystemExit):
            frame.parse(frame.find("scenarios"), ["--share", bad])
