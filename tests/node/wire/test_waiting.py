import os
import select
import threading
from itertools import count

import pytest

from sealring.node.wire import waiting


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for descriptor in ends:
        os.close(descriptor)


@pytest.mark.parametrize("spin", [0.0, 0.02])
def test_what_comes_is_seen_while_awake_and_while_asleep(pipe, monkeypatch, spin):
    monkeypatch.setattr(waiting, "spin_seconds", spin)
    poll = select.poll()
    poll.register(pipe[0], select.POLLIN)
    assert waiting.wait(poll, 0.05) == []
    for pause in (0.0, 0.005, 0.1):
        writer = threading.Timer(pause, os.write, (pipe[1], b"x"))
        writer.start()
        assert waiting.wait(poll) == [(pipe[0], select.POLLIN)]
        writer.join()
        assert os.read(pipe[0], 2) == b"x"


class Quiet:
    """Nothing ever comes; each look takes 5 ms of its clock."""

    def __init__(self):
        self.timeouts = []
        self.monotonic = map((0.005).__mul__, count()).__next__

    def poll(self, timeout):
        self.timeouts.append(timeout)
        return []


@pytest.mark.parametrize(("timeout", "slept"), [(0.5, 500), (None, None), (0.01, 10)])
def test_waiting_awake_is_bounded(monkeypatch, timeout, slept):
    quiet = Quiet()
    monkeypatch.setattr(waiting, "spin_seconds", 0.02)
    monkeypatch.setattr(waiting, "time", quiet)
    assert waiting.wait(quiet, timeout) == []
    *awake, asleep = quiet.timeouts
    assert asleep == slept
    assert set(awake) == {0}
    assert len(awake) <= 4


@pytest.mark.parametrize(("count", "cores"), [(7, 7), (None, 1)])
def test_cores_are_counted_where_nobody_tells_which_may_be_used(monkeypatch, count, cores):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert waiting.cores() == cores


@pytest.mark.parametrize(("platform", "seconds"), [("linux", waiting.SPIN_SECONDS), ("darwin", 0.0)])
def test_a_mac_does_not_wait_awake(monkeypatch, platform, seconds):
    """Its cores share a power limit with the GPU."""
    monkeypatch.setattr(waiting.sys, "platform", platform)
    monkeypatch.setattr(waiting, "cores", lambda: 24)
    assert waiting.default_spin_seconds() == seconds
