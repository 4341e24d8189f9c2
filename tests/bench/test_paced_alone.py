"""The prompt with the least left goes first where several come together."""

import pytest

from bench.paced.alone import Alone, together


def test_prompts_that_come_apart_take_what_they_take_alone():
    assert together([(5.0, Alone(1.0, 1.5)), (0.0, Alone(2.0, 3.0))]) == [1.0, 1.0]


def test_of_two_equal_prompts_the_later_one_waits_until_the_stage_is_free():
    """It waits for 0.75 s of the other's, and its own way through the other stages adds nothing."""
    assert together([(0.0, Alone(1.0, 1.5)), (0.25, Alone(1.0, 1.5))]) == pytest.approx([1.0, 1.5])


def test_a_short_prompt_does_not_wait_for_a_long_one():
    long, short = (0.0, Alone(10.0, 10.0)), (4.0, Alone(1.0, 1.0))
    assert together([long, short]) == pytest.approx([1.1, 1.0])
    assert together([long, (9.5, Alone(1.0, 1.0))]) == pytest.approx([1.0, 1.5]), "less was left"
