import os
import select
import threading
import time

import pytest

from node import waiting


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


def test_waiting_awake_is_bounded(pipe, monkeypatch):
    monkeypatch.setattr(waiting, "spin_seconds", 0.02)
    poll = select.poll()
    poll.register(pipe[0], select.POLLIN)
    before = time.thread_time()
    assert waiting.wait(poll, 0.5) == []
    assert time.thread_time() - before < 0.2
