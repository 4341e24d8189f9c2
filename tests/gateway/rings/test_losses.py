"""Lost records, and records that are only slow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.gateway.rings.losses import LOST_SECONDS, LossWatch

TICK = 0.5


def look(watch: LossWatch, rank: int, now: float, sent: int = 0, received: int = 0, waiting: float = 0.0):
    return watch.heard(rank, sent=sent, received=received, waiting_seconds=waiting, now=now)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_record_that_was_sent_and_does_not_come_is_lost(size: int, rank: int) -> None:
    watch, after = LossWatch(size), (rank + 1) % size
    found, now = None, 100.0
    while found is None:
        assert now < 100.0 + LOST_SECONDS + 2 * TICK
        assert look(watch, rank, now, sent=7, received=3, waiting=0.0) is None
        found = look(watch, after, now, sent=3, received=6, waiting=now - 100.0)
        now += TICK
    assert found == rank
    assert now - 100.0 >= LOST_SECONDS


def test_what_is_lost_does_not_get_younger_with_what_is_sent_after_it() -> None:
    watch = LossWatch(2)
    look(watch, 0, 100.0, sent=1)
    look(watch, 0, 100.0 + LOST_SECONDS - TICK, sent=2)
    assert look(watch, 1, 100.0 + LOST_SECONDS, waiting=LOST_SECONDS) == 0


def test_a_sender_that_computes_has_lost_nothing() -> None:
    watch = LossWatch(2)
    for second in range(600):
        assert look(watch, 0, second, sent=7) is None
        assert look(watch, 1, second, received=7, waiting=second) is None


def test_a_receiver_that_computes_has_lost_nothing() -> None:
    """It does not wait for the record: the record waits for it."""
    watch = LossWatch(2)
    for second in range(600):
        assert look(watch, 0, second, sent=9) is None
        assert look(watch, 1, second, received=7, waiting=0.0) is None


def test_a_record_that_left_a_moment_ago_is_not_lost_though_it_was_long_waited_for() -> None:
    watch = LossWatch(2)
    look(watch, 0, 0.0, sent=4)
    look(watch, 1, 0.0, received=4)
    assert look(watch, 1, 100.0, received=4, waiting=100.0) is None
    assert look(watch, 0, 100.1, sent=5) is None
    assert look(watch, 1, 100.2, received=4, waiting=100.2) is None
    assert look(watch, 1, 100.9, received=5, waiting=0.0) is None
    assert look(watch, 1, 110.0, received=5, waiting=9.0) is None


def test_bytes_that_trickle_in_are_no_loss() -> None:
    watch = LossWatch(2)
    for second in range(100):
        assert look(watch, 0, second, sent=1) is None
        assert look(watch, 1, second, received=0, waiting=1.5) is None


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 2.9), st.floats(0.0, 4.0)), min_size=1, max_size=200)
)
def test_a_ring_whose_records_take_less_than_the_limit_loses_none(
    steps: list[tuple[int, float, float]],
) -> None:
    """Records travel one after the other round a ring of three; each takes `way` after `work`."""
    watch, now = LossWatch(3), 0.0
    sent, received, waits_since = [0] * 3, [0] * 3, [0.0] * 3
    rank = 0
    for looks, way, work in steps:
        now += work
        sent[rank] += 1
        left = now
        for part in range(looks + 1):
            at = left + way * part / (looks + 1)
            for one in range(3):
                figures = {"sent": sent[one], "received": received[one], "waiting": at - waits_since[one]}
                assert look(watch, one, at, **figures) is None
        now = left + way
        rank = (rank + 1) % 3
        received[rank] += 1
        waits_since[rank] = now
        assert look(watch, rank, now, sent=sent[rank], received=received[rank]) is None


def test_a_record_is_lost_after_so_long_on_its_way_and_waited_for() -> None:
    for later, waiting, lost in (
        (LOST_SECONDS, LOST_SECONDS, 0),
        (LOST_SECONDS - 0.01, LOST_SECONDS, None),
        (LOST_SECONDS, LOST_SECONDS - 0.01, None),
    ):
        watch = LossWatch(2)
        look(watch, 0, 0.0, sent=1)
        assert look(watch, 1, later, waiting=waiting) == lost
