"""A time that a test module reads at its import is days old when its tests run."""

import time

from sealring.mesh.clock import wall_clock

IMPORTED = time.time()
TWO_DAYS = 2 * 86400


def test_a_time_taken_at_import_is_old() -> None:
    assert time.time() - IMPORTED >= TWO_DAYS


def test_a_clock_bound_at_import_is_right() -> None:
    before = time.time()
    assert before <= wall_clock() <= time.time()
