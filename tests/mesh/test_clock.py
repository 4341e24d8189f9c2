from __future__ import annotations

from sealring.mesh.clock import AwakeClock


def test_a_pause_of_the_process_itself_counts_little() -> None:
    now = 100.0
    clock = AwakeClock(lambda: now, step=2.0)
    for passed, counted in ((0.5, 0.5), (1.5, 2.0), (60.0, 4.0), (0.25, 4.25)):
        now += passed
        assert clock() == counted
