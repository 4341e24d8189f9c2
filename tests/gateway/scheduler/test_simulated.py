"""Rings in simulated time serve every request, and are no faster than what they are modelled on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulatedring import STAIRS, Costs, SimulatedRing


def served(ring: SimulatedRing, requests: int, tokens: int) -> float:
    """Tokens per second of `requests` requests at once."""
    for number in range(requests):
        ring.ask(f"r{number}", 64, tokens)
    ring.run()
    assert len(ring.ended) == requests
    return ring.tokens(0, ring.now) / ring.now


def test_a_lane_more_than_stages_pays_where_rows_are_computed_in_turn() -> None:
    """Four rows in lanes of 2, 1 and 1 would make rounds of three steps of two rows."""
    costs = Costs(step_ms=24.0, row_ms=40.0, token_us=500.0)
    three = 4 / (3 * costs.decode(2) / 3)
    assert served(SimulatedRing(3, costs, 4), 4, 256) > 1.15 * three


@pytest.mark.parametrize(("rows", "gain"), [(8, 1.0), (12, 1.05), (20, 1.25), (64, 1.0)])
def test_rows_are_served_faster_than_by_as_many_lanes_as_stages_on_stairs(rows: int, gain: float) -> None:
    """But for the prompts, which nothing decodes beside."""
    costs = replace(STAIRS, prefill_ms=1.0, token_us=1.0)
    two = rows / (costs.decode(rows // 2) + 2 * costs.link_ms / 1e3)
    assert served(SimulatedRing(2, costs, rows), rows, 400) > 0.95 * gain * two
