"""Rings in simulated time serve every request, and are no faster than what they are modelled on."""

from __future__ import annotations

from simulatedring import Costs, SimulatedRing

from sealring.gateway.scheduler.request import Request
from sealring.v1 import inference_pb2 as inference


def served(ring: SimulatedRing, requests: int, tokens: int) -> float:
    """Tokens per second of `requests` requests at once."""
    for number in range(requests):
        ring.submit(Request(f"r{number}", "k", tokens, inference.Envelope()))
    ring.run()
    assert ring.finished == requests
    return ring.sampled / ring.now


def test_a_lane_more_than_stages_pays_where_rows_are_computed_in_turn() -> None:
    costs = Costs(step_ms=24.0, row_ms=40.0, token_us=500.0)
    for rows, least in ((4, 1.2), (24, 0.97)):
        plain, spare = (SimulatedRing(3, rows, rows, costs, in_turn) for in_turn in (False, True))
        assert (plain.lanes, spare.lanes) == (3, 4)
        assert served(spare, rows, 256) / served(plain, rows, 256) > least
