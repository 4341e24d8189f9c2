"""Ratios where a system gave nothing to compare with."""

from bench import peers
from bench.verdict import MISSED, OPEN


def test_a_rival_that_answers_nothing_misses_the_targets_and_breaks_nothing():
    one = {
        "tokens_per_second": 2.0,
        "rounds": [2.0],
        "steady_tokens_per_second": 2.0,
        "ttft_ms": {"p50": 1, "p95": 2},
        "gap_ms": {},
        "ttft_p95_ms": [2.0],
        "failed_by_round": [0],
    }
    none = {"rounds": [0.0], "ttft_ms": {"count": 0}, "ttft_p95_ms": [None], "failed_by_round": [16]}
    dead = one | {"tokens_per_second": 0.0} | none
    found = {peers.ALONE: one, peers.PIPELINE: dead, peers.OURS: one, f"{peers.OURS}, 8 requests/s": one}
    result = {"options": {"requests": 16}, "systems": found}
    assert peers.against(result) == {peers.ALONE: 1.0}
    assert [check.verdict for check in peers.checks(result)] == [OPEN, OPEN, MISSED]
    assert peers.tables(result)[0].rows[1][-1] is None


def test_without_the_ring_of_two_or_the_pipeline_there_is_nothing_to_compare() -> None:
    one = {"rounds": [2.0], "ttft_p95_ms": [2.0], "failed_by_round": [0]}
    for name in (peers.OURS, peers.SERVER):
        result = {"options": {"requests": 16}, "systems": {name: one}}
        assert peers.against(result) == {}
        assert [check.name for check in peers.checks(result)] == ["failed requests"]
