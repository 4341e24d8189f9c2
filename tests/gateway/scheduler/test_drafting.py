from __future__ import annotations

from collections import Counter

import pytest

from sealring.gateway.scheduler.drafting import DEPTHS, Depth

SECONDS = dict(zip(DEPTHS, (1.0, 1.3, 1.8), strict=True))


def spent(depth: Depth, tokens: int, right: int) -> tuple[float, Counter[int]]:
    """Seconds for an answer of which so many drafts of each step are right, and its steps by depth."""
    seconds, steps, said = 0.0, Counter[int](), 0
    depth.begin()
    while said < tokens:
        drafts = depth.wanted(tokens - said - 2)
        brought = 1 + min(right, drafts)
        depth.measure(drafts, brought, SECONDS[drafts])
        seconds, said = seconds + SECONDS[drafts], said + brought
        steps[drafts] += 1
    return seconds, steps


def test_wrong_drafts_cost_next_to_nothing() -> None:
    seconds, steps = spent(Depth(), 400, right=0)
    assert 400 / seconds > 0.97
    assert steps[0] > 390


def test_right_drafts_go_as_deep_as_it_pays() -> None:
    seconds, _ = spent(Depth(), 400, right=7)
    assert 400 / seconds > 2.5
    seconds, steps = spent(Depth(), 400, right=3)
    assert 400 / seconds > 1.8
    assert steps[3] > steps[7]


def test_an_answer_that_stops_repeating_goes_on_without() -> None:
    depth = Depth()
    spent(depth, 200, right=7)
    seconds, _ = spent(depth, 400, right=0)
    assert 400 / seconds > 0.9
    seconds, _ = spent(depth, 400, right=7)
    assert 400 / seconds > 2


@pytest.mark.parametrize("most", [-5, 0, 2, 3, 6, 7])
def test_no_more_is_wanted_than_may_be(most: int) -> None:
    depth = Depth()
    while depth.wanted(7) != 7:
        depth.measure(depth.wanted(7), 1 + depth.wanted(7), 1.0)
    assert depth.wanted(most) == max(each for each in DEPTHS if each <= max(most, 0))


def test_a_fast_step_that_brings_nothing_more_is_no_reason_to_guess() -> None:
    depth = Depth()
    for _ in range(200):
        drafts = depth.wanted(7)
        depth.measure(drafts, 1, 0.1 if drafts else 1.0)
        assert depth._at == 0
