"""The simulation serves every request, and rings do not beat what they are modelled on."""

import pytest

from bench import scheduler
from bench.simulated_ring import Costs, SimulatedRing


@pytest.mark.parametrize("stages", [1, 2, 7])
def test_every_request_is_answered_in_simulated_time(stages):
    found = scheduler.at_once(stages, 16, 40, 8)
    assert found["simulated_tokens_per_second"] > 0
    assert 0 < found["stages_busy"] <= 1


def test_more_stages_are_faster_while_links_are_cheap():
    one, four = (scheduler.at_once(stages, 16, 60, 8) for stages in (1, 4))
    assert four["simulated_tokens_per_second"] > one["simulated_tokens_per_second"]


def test_a_loaded_ring_stays_loaded():
    assert scheduler.loaded(2, 20)["rows_per_step"] > 60


def test_plans_are_made_by_the_real_planner():
    assert scheduler.planning(4, 8)["nodes"] == 32


def test_a_ring_of_many_is_chosen_by_the_gateways_own_code():
    assert scheduler.routing(40)["rings"] == 40


def test_a_lane_more_than_stages_pays_where_rows_are_computed_in_turn():
    def rate(rows, spare):
        ring = SimulatedRing(3, rows, rows, Costs(step_ms=24.0, row_ms=40.0, token_us=500.0), spare)
        assert ring.lanes == 3 + spare
        for number in range(rows):
            scheduler.submit(ring, number, 256)
        ring.run()
        return ring.sampled / ring.now

    for rows, least in ((4, 1.2), (7, 1.1), (16, 1.05), (24, 0.98)):
        assert rate(rows, True) / rate(rows, False) > least
