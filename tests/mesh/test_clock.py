from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from sealring.mesh.clock import BELIEVED_SECONDS, AwakeClock, PausableClock, SteadyClock


def test_a_pause_of_the_process_itself_counts_little() -> None:
    now = 100.0
    clock = AwakeClock(lambda: now, step=2.0)
    for passed, counted in ((0.5, 0.5), (1.5, 2.0), (60.0, 4.0), (0.25, 4.25)):
        now += passed
        assert clock() == counted


def test_a_clock_counts_only_while_it_runs() -> None:
    now = 100.0
    clock = PausableClock(lambda: now)
    for act, shown in ((None, 0.0), (clock.run, 1.0), (clock.run, 2.0), (clock.pause, 2.0), (clock.run, 3.0)):
        if act is not None:
            act()
        now += 1
        assert clock() == shown


def test_nothing_goes_by_a_clock_that_jumps_when_it_is_set() -> None:
    """The raw clock is the default of no clock argument."""
    root = Path(__file__).parents[2]
    packages = ("mesh", "edge", "coordinator", "node", "gateway", "doctor", "cli")
    files = [file for package in packages for file in (root / package).rglob("*.py")]
    raw = [file for file in files if re.search(r"\w+: Clock = time\.time\b", file.read_text("utf-8"))]
    assert [str(file.relative_to(root)) for file in raw if file.name != "clock.py"] == []


class Machine:
    """One whose wall clock can be set."""

    def __init__(self) -> None:
        self.running, self.ahead = 100.0, 1e9
        self.clock = SteadyClock(lambda: self.running + self.ahead, lambda: self.running)

    def shown(self, *, after: float = 0.0, step: float = 0.0) -> float:
        """What its clock shows, less what it should."""
        self.running += after
        self.ahead += step
        return self.clock() - 1e9 - self.running


def test_a_clock_that_is_set_for_seconds_is_not_followed_and_named() -> None:
    machine = Machine()
    with capture_logs() as logs:
        for step in (3600.0, -3600.0):
            assert machine.shown(step=step) == 0
            assert machine.shown(after=8) == 0
            assert machine.shown(step=-step) == 0
    shown = [(line["event"], line.get("seconds", line.get("believed_seconds"))) for line in logs]
    assert shown == [
        ("clock_stepped", 3600),
        ("clock_step_over", 0),
        ("clock_stepped", -3600),
        ("clock_step_over", 0),
    ]


def test_a_clock_that_stays_as_it_was_set_is_believed() -> None:
    machine = Machine()
    assert machine.shown(after=1e6, step=-3600) == 0
    assert machine.shown(after=BELIEVED_SECONDS - 1) == 0
    assert machine.shown(after=1) == -3600


def test_a_clock_that_comes_back_to_what_it_showed_before_is_followed_at_once() -> None:
    machine = Machine()
    assert machine.shown(step=3600) == 0
    assert machine.shown(after=BELIEVED_SECONDS) == 3600
    assert machine.shown(after=40) == 3600
    assert machine.shown(step=-3600) == 0
    assert machine.shown(step=3600) == 0, "that time was wrong"


def test_a_clock_that_is_set_again_and_again_is_believed_a_minute_after_the_last_time() -> None:
    machine = Machine()
    assert machine.shown(step=3600) == 0
    assert machine.shown(after=BELIEVED_SECONDS - 1, step=3600) == 0
    assert machine.shown(after=BELIEVED_SECONDS - 1) == 0, "7200 s were shown for less than a minute"
    assert machine.shown(step=-10800) == 0
    assert machine.shown(after=BELIEVED_SECONDS - 1) == 0
    assert machine.shown(after=1) == -3600


@given(st.lists(st.tuples(st.floats(0, 90), st.sampled_from((-7200, -3600, 0, 0, 3600, 7200))), max_size=20))
def test_a_time_is_believed_once_it_was_shown_for_a_minute_or_had_been_believed(
    looks: list[tuple[float, int]],
) -> None:
    """Seconds between looks at a clock, and by how many it is set meanwhile."""
    machine = Machine()
    ahead, since, believed, former = 0, machine.running, 0, 0
    for after, step in looks:
        shown = round(machine.shown(after=after, step=step))
        if step:
            ahead, since = ahead + step, machine.running
        lasted = machine.running - since >= BELIEVED_SECONDS
        assert shown in ({ahead} if lasted else {believed, former})
        if shown != believed:
            believed, former = shown, believed


def test_drift_is_followed_at_once() -> None:
    machine = Machine()
    assert [machine.shown(after=86400, step=4.0) for _ in range(4)] == [4.0, 8.0, 12.0, 16.0]
