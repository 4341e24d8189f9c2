"""A ring whose parts are killed or stopped: answers pause, and go on as if nothing had happened."""

import pytest
from cases import SHORT
from harness import suffer
from ringtest import CLUSTER

pytestmark = CLUSTER


@pytest.mark.parametrize("one", SHORT, ids=lambda one: one.name)
async def test_nothing_is_lost_or_left(place, one):
    place.few = one != SHORT[0]
    outcome = await suffer(place, one)
    assert outcome.good, outcome
