from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest

from sealring.mesh.errors import DeadlineExceeded, EpochEnded
from sealring.mesh.ring import Eviction, ResolvedStep
from sealring.node.engine.feedback import LocalFeedback, RingFeedback


def step(number: int, *rows: int) -> ResolvedStep:
    return ResolvedStep(number, bytes(32), (), (), 0, rows, rows)


def test_tokens_stay_on_the_device_in_a_ring_of_one() -> None:
    feedback = LocalFeedback()
    feedback.launched(step(1, 4, 5), mx.array([40, 50], mx.uint32))
    feedback.launched(step(2, 6), mx.array([60], mx.uint32))
    assert feedback.inputs((4, 5)).tolist() == [[40], [50]]
    assert feedback.inputs((6, 5)).tolist() == [[60], [50]]
    assert feedback.inputs((4,)).tolist() == [[40]]
    assert feedback.inputs((5, 4, 6)).dtype == mx.uint32
    feedback.change(Eviction(4, None, 0))
    with pytest.raises(KeyError):
        feedback.inputs((4,))


def test_tokens_are_waited_for_until_their_step_arrives() -> None:
    feedback = RingFeedback(5.0)
    feedback.launched(step(1, 4, 5), None)
    feedback.launched(step(2, 6), None)
    threading.Timer(0.1, lambda: feedback.arrived(step(1, 4, 5), [40, 50])).start()
    assert feedback.last((5, 4)) == np.array([50, 40], np.uint32).tobytes()
    feedback.arrived(step(2, 6), [60])
    assert feedback.last((4, 6)) == np.array([40, 60], np.uint32).tobytes()


def test_tokens_of_a_row_that_has_gone_are_dropped() -> None:
    feedback = RingFeedback(5.0)
    feedback.launched(step(1, 4, 5), None)
    feedback.change(Eviction(4, None, 0))
    feedback.arrived(step(1, 4, 5), [40, 50])
    assert feedback.last((5,)) == np.array([50], np.uint32).tobytes()
    with pytest.raises(KeyError):
        feedback.last((4,))


def test_tokens_that_do_not_come_are_overdue() -> None:
    feedback = RingFeedback(0.05)
    feedback.launched(step(1, 4), None)
    with pytest.raises(DeadlineExceeded):
        feedback.last((4,))


def test_the_end_wakes_a_thread_that_waits() -> None:
    feedback = RingFeedback(30.0)
    feedback.launched(step(1, 4), None)
    threading.Timer(0.1, feedback.end).start()
    with pytest.raises(EpochEnded):
        feedback.last((4,))


def test_only_tokens_of_rows_that_are_awaited_are_kept() -> None:
    feedback = RingFeedback(5.0)
    feedback.launched(step(1, 4), None)
    feedback.arrived(step(1, 4, 5), [40, 50])
    feedback.launched(step(1, 5), None)
    with pytest.raises(KeyError):
        feedback.last((5,))
    feedback.end()
    assert feedback.last((4,)) == np.array([40], np.uint32).tobytes(), "what has come is there"
