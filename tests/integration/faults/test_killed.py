"""A ring whose parts are killed or stopped: answers pause, and go on as if nothing had happened."""

import pytest
from cases import SHORT, case
from harness import suffer
from ringtest import CLUSTER

pytestmark = CLUSTER


@pytest.mark.parametrize("one", SHORT, ids=lambda one: one.name)
async def test_nothing_is_lost_or_left(place, one):
    place.few = one != SHORT[0]
    outcome = await suffer(place, one)
    assert outcome.good, outcome


async def test_a_killed_carrier_costs_no_weights(place):
    place.few = True
    await place.ready()
    engine = (await place.process(("engine", "1"))).pid
    outcome = await suffer(place, case("decode", "kill carrier 1"))
    assert outcome.good, outcome
    assert (await place.process(("engine", "1"))).pid == engine
