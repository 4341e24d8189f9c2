from __future__ import annotations

import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.ring import MAX_SPANS
from sealring.node.wire.timelog import TimeLog, process_trace, span
from sealring.v1 import trace_pb2


@given(count=st.integers(0, 40), length=st.integers(2, 12))
def test_the_last_entries_are_kept_in_order(count: int, length: int) -> None:
    log = TimeLog(2, length)
    for number in range(count):
        log.add(number, number * 10)
    found, lost = log.entries()
    kept = min(count, length - 1)  # the oldest may be half overwritten while another thread reads
    assert found[-kept:] == [(number, number * 10) for number in range(count - kept, count)] if kept else True
    assert [one[0] for one in found] == list(range(count - len(found), count))
    assert lost == (len(found) < count)


def test_a_reader_never_sees_half_an_entry() -> None:
    log, stop = TimeLog(3, 16), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            log.add(number, number, number)
            number += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2000):
            found, _ = log.entries()
            firsts = [one[0] for one in found]
            assert all(len(set(one)) == 1 for one in found)
            assert firsts == list(range(firsts[0], firsts[0] + len(firsts))) if firsts else True
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(before)


def test_what_was_over_before_is_left_out() -> None:
    spans = [span(trace_pb2.ACTIVITY_SEAL, step, 100 * step, 100 * step + 50, step) for step in range(1, 6)]
    trace = process_trace(spans, 225, [])
    assert [one.step for one in trace.spans] == [2, 3, 4, 5]
    assert trace.since == 225
    assert process_trace(spans, 225, [310]).since == 310


def test_a_clock_that_does_not_move_on_gives_no_negative_time() -> None:
    assert span(trace_pb2.ACTIVITY_SEND, 1, 100, 90).duration == 0


@pytest.mark.parametrize("surplus", [0, 5])
def test_an_answer_has_a_limit_and_keeps_the_newest(surplus: int) -> None:
    spans = [span(trace_pb2.ACTIVITY_OPEN, n, n, n + 1) for n in range(MAX_SPANS + surplus)]
    trace = process_trace(reversed(spans), 0, [])
    assert len(trace.spans) == MAX_SPANS
    assert trace.since == surplus
    assert min(one.start for one in trace.spans) == surplus
