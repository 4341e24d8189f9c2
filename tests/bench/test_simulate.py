"""The simulation serves every request, and rings do not beat what they are modelled on."""

import argparse

import pytest

from bench import simulate


@pytest.fixture
def options():
    parser = argparse.ArgumentParser()
    simulate.options(parser)
    return parser.parse_args(["--tokens", "8"])


@pytest.mark.parametrize("stages", [1, 2, 7])
def test_every_request_is_answered_in_simulated_time(options, stages):
    found = simulate.one_ring(stages, 16, 40, options)
    assert found["simulated_tokens_per_second"] > 0
    assert 0 < found["stages_busy"] <= 1


def test_more_stages_are_faster_while_links_are_cheap(options):
    one, four = (simulate.one_ring(stages, 16, 60, options) for stages in (1, 4))
    assert four["simulated_tokens_per_second"] > one["simulated_tokens_per_second"]


def test_plans_are_made_by_the_real_planner():
    assert simulate.planning(4, 8)["nodes"] == 32


def test_a_ring_of_many_is_chosen_by_the_gateways_own_code():
    found = simulate.routing(40)
    assert found["rings"] == 40


def test_a_lane_more_than_stages_pays_where_rows_are_computed_in_turn(options):
    for rows, least in ((4, 1.2), (7, 1.1), (16, 1.05), (24, 0.98)):
        plain, spare = (simulate.in_turn(rows, more, options) for more in (False, True))
        assert (plain["lanes"], spare["lanes"]) == (3, 4)
        ratio = spare["simulated_tokens_per_second"] / plain["simulated_tokens_per_second"]
        assert ratio > least
