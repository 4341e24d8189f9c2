"""A ring whose parts are killed or stopped: answers pause, and go on as if nothing had happened."""

import pytest
from cases import SHORT
from harness import EACH, FEW, suffer
from ringtest import CLUSTER

pytestmark = CLUSTER
SWEEP = {"kill engine 2, prefill", "kill carrier 1, decode", "stop engine 0 120, decode"}
SWEEP |= {"stop carrier 2 120, decode"}
"""Members whose engine or carrier is killed or frozen are tested with two daemons in every run
(`tests/node/daemon/test_faults.py`), and one engine more by the first case here."""


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, marks=[pytest.mark.sweep] * (one.name in SWEEP), id=one.name) for one in SHORT],
)
async def test_nothing_is_lost_or_left(place, one):
    place.kinds = EACH if one == SHORT[0] else FEW
    outcome = await suffer(place, one)
    assert outcome.good, outcome
