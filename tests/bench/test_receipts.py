"""Receipts' cost: ratios of what was measured, and the work of head and tail that really signs."""

from __future__ import annotations

from typing import Any

from bench import receipts
from bench.verdict import MET, MISSED


def found(ratio: float, own: float) -> dict[str, Any]:
    turns = {"without": {"cpu_s": 4.0, "s": 10.0}, "with": {"cpu_s": 4.0 * ratio, "s": 10.0}}
    return {
        "tokens_a_round": 1000,
        "answer": 100,
        "rounds": [turns] * 3,
        "own": {"token_us": own / 2, "answer_us": own / 2 * 100},
    }


def test_a_share_of_more_than_half_a_percent_misses_the_target() -> None:
    # an answer's token takes 4,000 us
    assert [receipts.checks(found(1.02, own))[0].verdict for own in (19.0, 21.0)] == [MET, MISSED]
    by_turns, alone = receipts.tables(found(1.006, 21.0))
    assert by_turns.rows[0] == [1, 4000.0, 4024.0, 1.006, 100.0, 100.0]
    assert alone.rows == [[10.5, 1050.0]]


def test_own_work_is_that_of_an_answer_which_both_have_signed() -> None:
    own = receipts.own_work(3)
    assert min(own["token_us"], own["answer_us"]) > 0
