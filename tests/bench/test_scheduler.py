"""The scheduler is timed under the load that is asked for."""

from bench import scheduler


def test_as_many_run_and_wait_as_are_asked_for():
    found = scheduler.measure(2, 32, 50, 900)  # longer than answers
    assert found["rows_per_step_mean"] > 8
    assert found["microseconds_p50"] > 0
