"""A device that burns seconds of a processor: its order, and waits that end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bench.paced.processor import BusyDevice, native_seconds


def test_work_is_done_in_order_and_takes_processors_seconds():
    device, before = BusyDevice(), time.process_time()
    moments = []
    for _ in range(3):
        device.build(0.01)
        moments.append(device.launch())
    assert moments == sorted(set(moments))
    device.wait(moments[-1])
    assert time.process_time() - before >= 0.03


def test_nothing_is_waited_for_that_was_not_launched():
    device = BusyDevice()
    device.build(0.001)
    device.wait(device.launch() + 1000.0)


def test_what_was_done_already_is_taken_off_the_next_work():
    device = BusyDevice()
    device.build(-0.5)
    assert device.launch() == 0.0
    device.build(0.6)
    assert 0.05 < device.launch() < 0.2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux counts for each thread")
def test_threads_of_python_are_not_counted():
    spun, end = threading.Event(), threading.Event()

    def spin() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        spun.set()
        end.wait()

    before = native_seconds()
    thread = threading.Thread(target=spin)
    thread.start()
    spun.wait()
    found = native_seconds() - before
    end.set()
    thread.join()
    assert found < 0.05
