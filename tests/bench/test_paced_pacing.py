"""The paced device and link, by a clock that only sleeping moves."""

from __future__ import annotations

import pytest

from bench.paced.pacing import PacedDevice, PacedLink
from sealring.testing import ManualClock


@pytest.fixture
def time():
    return ManualClock(100.0)


@pytest.fixture
def device(time):
    return PacedDevice(time, time.advance)


def test_launching_returns_at_once_and_results_are_ready_later(device, time):
    device.build(2.0)
    assert device.launch() == 102.0
    assert time.now == 100.0
    assert device.wait(102.0) == 0.0
    assert time.now == 102.0


def test_a_second_launch_queues_behind_the_first(device):
    device.build(2.0)
    device.launch()
    device.build(3.0)
    assert device.launch() == 105.0


def test_an_idle_device_starts_at_the_launch(device, time):
    device.build(2.0)
    device.launch()
    time.advance(10.0)
    device.build(1.0)
    time.advance(4.0)  # of building goes on: it is the launch that starts the work
    assert device.launch() == 115.0


def test_a_launch_starts_all_that_was_built_and_nothing_twice(device):
    device.build(1.0)
    device.build(1.0)
    assert device.launch() == device.launch() == 102.0
    assert device.busy == 2.0


def test_a_wait_says_by_how_much_it_is_late():
    time = ManualClock(100.0)
    device = PacedDevice(time, lambda seconds: time.advance(seconds + 0.25))
    assert device.wait(101.0) == 0.25
    assert device.wait(101.0) == 0.25  # results that were ready before


def test_records_follow_each_other_on_a_link_and_travel_together():
    link = PacedLink(seconds=10.0, bytes_per_second=100.0)
    assert link.arrival(0.0, 100) == 11.0
    assert link.arrival(0.5, 100) == 12.0
    assert link.arrival(50.0, 0) == 60.0
