from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sealring.node.engine.threads import PACE_STEPS, TRACE_LENGTH, StepTimes, step_us
from sealring.node.engine.trace import engine_trace
from sealring.node.wire.timelog import TimeLog
from sealring.v1 import trace_pb2

SECOND = 1_000_000_000


def spans(*steps: StepTimes, copied: TimeLog | None = None) -> list[tuple[str, int, float, float]]:
    trace = engine_trace(steps, copied, 0)
    return [
        (
            trace_pb2.Activity.Name(one.activity).removeprefix("ACTIVITY_").lower(),
            one.step,
            one.start / SECOND,
            (one.start + one.duration) / SECOND,
        )
        for one in trace.spans
    ]


def test_a_graph_built_before_its_input_came() -> None:
    assert spans(StepTimes(7, started=1, built=2, fed=5, launched=6, ready=8, sent=9)) == [
        ("build", 7, 1, 2),
        ("wait", 7, 2, 5),
        ("launch", 7, 5, 6),
        ("compute", 7, 6, 8),
        ("copy_out", 7, 8, 9),
    ]


def test_a_graph_built_as_its_input_came_waited_for_nothing() -> None:
    assert spans(StepTimes(7, started=1, built=2, fed=2, launched=6, ready=8, sent=9))[:3] == [
        ("build", 7, 1, 2),
        ("wait", 7, 2, 2),
        ("launch", 7, 2, 6),
    ]


def test_a_graph_built_after_its_input_came() -> None:
    assert spans(StepTimes(7, started=1, fed=2, built=4, launched=6, ready=8, sent=9))[:4] == [
        ("wait", 7, 1, 2),
        ("build", 7, 2, 4),
        ("launch", 7, 4, 6),
        ("compute", 7, 6, 8),
    ]


def test_the_device_works_on_one_launch_after_the_other() -> None:
    first = StepTimes(1, started=1, built=1, fed=1, launched=2, ready=10, sent=11)
    second = StepTimes(2, started=2, built=3, fed=3, launched=4, ready=15, sent=16)
    computed = [one for one in spans(first, second) if one[0] == "compute"]
    assert computed == [("compute", 1, 2, 10), ("compute", 2, 10, 15)]


def test_a_parameter_record_is_only_sent() -> None:
    assert spans(StepTimes(3, started=1, ready=2, sent=3)) == [("copy_out", 3, 2, 3)]


def test_records_taken_in_have_their_step() -> None:
    copied = TimeLog(3)
    copied.add(5, 2 * SECOND, 3 * SECOND)
    assert spans(copied=copied) == [("copy_in", 5, 2, 3)]


def test_work_of_no_step_is_in_the_trace_from_when_on_its_log_is_whole() -> None:
    log = TimeLog(3, length=2)
    for begin in (1, 2, 3):
        log.add(begin * SECOND, (begin + 1) * SECOND, 256)
    trace = engine_trace([], None, 0, {trace_pb2.ACTIVITY_RECALL: log})
    assert [(one.step, one.start, one.duration) for one in trace.spans] == [(0, 3 * SECOND, SECOND)]
    assert trace.since == 3 * SECOND


def test_it_says_from_when_on_nothing_is_missing() -> None:
    step = StepTimes(1, started=4, built=4, fed=4, launched=5, ready=6, sent=7)
    assert engine_trace([step], None, 17).since == 17
    assert engine_trace([step] * TRACE_LENGTH, None, 17).since == 6 * SECOND


def test_a_result_that_was_sent_after_the_next_step_had_started_is_not_after_since() -> None:
    """The first step is forgotten; its result left while the second one was computed."""
    forgotten = StepTimes(1, started=1, built=1, fed=1, launched=2, ready=4, sent=5)
    second = StepTimes(2, started=3, built=3, fed=3, launched=3, ready=6, sent=7)
    trace = engine_trace([second] * TRACE_LENGTH, None, 0)
    assert trace.since >= forgotten.sent * SECOND


@given(st.lists(st.floats(0.001, 1e6), min_size=6, max_size=6))
def test_no_order_of_times_breaks_it(times: list[float]) -> None:
    assert all(end >= begin for _, _, begin, end in spans(StepTimes(1, *times)))


def test_what_a_step_takes_is_that_of_the_last_decode_steps_without_what_they_waited_for() -> None:
    times = [StepTimes(n, n - 0.5, fed=float(n), ready=n + 0.002, decode=True) for n in range(1, 300)]
    assert step_us(times) in range(1990, 2010)
    assert step_us(times[:PACE_STEPS]) == 0
    queued = [StepTimes(n, 0.0, fed=0.0, ready=n * 0.003, decode=True) for n in range(1, 300)]
    assert step_us(queued) in range(2990, 3010), "in the device's queue behind others"
    assert step_us([StepTimes(n, 0.0, fed=1.0, ready=2.0) for n in range(300)]) == 0, "prompts"
