from __future__ import annotations

import os
import select
import threading
import time
from functools import partial
from itertools import accumulate

import pytest

from sealring.mesh.system.power import Power
from sealring.node.wire import waiting
from sealring.node.wire.waiting import AWAKE_SECONDS, Rhythm, polled

WAKE, LOOK = 100e-6, 5e-6
"""Seconds that a thread takes to wake, and that one look takes."""


class Records:
    """A clock, and records that come at given times, each taken by one wait."""

    def __init__(self, *intervals: float) -> None:
        self.now = 0.0
        self.due = list(accumulate(intervals))
        self.looks: list[int] = []
        """Looks without sleep, by wait."""
        self.late: list[float] = []

    def wait(self, rhythm: Rhythm, timeout: float | None = None) -> bool:
        self.looks.append(0)
        found = rhythm.wait(self.sleep, timeout)
        if found:
            self.late.append(self.now - self.due.pop(0))
            self.now += 0.2e-3  # the thread's own work
        return found

    def sleep(self, seconds: float | None) -> bool:
        next_one = self.due[0] if self.due else float("inf")
        if seconds == 0:
            self.looks[-1] += 1
            self.now += LOOK
        elif next_one > self.now:
            until = float("inf") if seconds is None else self.now + seconds
            self.now = min(until, next_one) + WAKE
        return next_one <= self.now


def rhythm_of(records: Records, *, awake: bool = True) -> Rhythm:
    return Rhythm(awake=lambda: awake, clock=lambda: records.now)


@pytest.mark.parametrize("step", [0.003, 0.02, 0.0457])
def test_a_record_that_is_due_is_awaited_awake_and_not_for_long(step: float) -> None:
    records = Records(*(step * (1 + part) for part in [0.003, -0.002, 0.001, 0.004, -0.003] * 4))
    rhythm = rhythm_of(records)
    while records.due:
        records.wait(rhythm)
    assert max(records.late[4:]) < 2 * LOOK < min(records.late[:2])
    assert max(records.looks) * LOOK < 2 * AWAKE_SECONDS + 0.001 + LOOK


@pytest.mark.parametrize(
    ("intervals", "awake"),
    [([0.01, 0.02, 0.013, 0.04, 0.02, 0.033], True), ([0.5] * 6, True), ([0.02] * 6, False)],
)
def test_nothing_is_looked_for_that_is_not_due_or_where_it_may_not_be(
    intervals: list[float], awake: bool
) -> None:
    records = Records(*intervals)
    rhythm = rhythm_of(records, awake=awake)
    while records.due:
        records.wait(rhythm)
    assert not any(records.looks)


@pytest.mark.parametrize("timeout", [0.005, 0.0202, 2.0])
def test_after_the_last_record_a_wait_ends_in_time_and_asleep(timeout: float) -> None:
    records = Records(*[0.02] * 6)
    rhythm = rhythm_of(records)
    while records.due:
        records.wait(rhythm)
    begun = records.now
    assert not records.wait(rhythm, timeout)
    assert timeout <= records.now - begun < timeout + 4 * WAKE
    assert records.looks[-1] * LOOK < 2 * AWAKE_SECONDS + 0.001 + LOOK
    records.now += 1
    assert not records.wait(rhythm, timeout)
    assert records.looks[-1] == 0


@pytest.mark.parametrize("awake", [True, False])
def test_descriptors_are_polled(awake: bool) -> None:
    reading, writing = os.pipe()
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    rhythm = Rhythm(awake=lambda: awake)
    assert rhythm.wait(partial(polled, poll), 0.01) == []

    def write() -> None:
        for _ in range(8):
            time.sleep(0.004)
            os.write(writing, b"x")

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(8):
        assert rhythm.wait(partial(polled, poll)) == [(reading, select.POLLIN)]
        assert os.read(reading, 1) == b"x"
    writer.join()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("cores", "saved", "awake"), [(64, False, True), (64, True, False), (2, False, False)]
)
def test_no_process_waits_awake_with_few_cores_or_to_save_power(
    monkeypatch: pytest.MonkeyPatch, cores: int, saved: bool, awake: bool
) -> None:
    monkeypatch.setattr(waiting, "full_speed_cores", lambda: cores)
    monkeypatch.setattr(waiting, "power", lambda clock: Power(False, low=saved))
    assert waiting.may_be_awake() == awake
