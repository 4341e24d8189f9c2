"""Pauses between attempts to reach the coordinator."""

from __future__ import annotations

from sealring.mesh.rpc.backoff import Backoff


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_stream_that_held() -> None:
    backoff = Backoff()
    expected = [0.2, 0.4, 0.8, 1.6, 3.2, 4.0, 4.0]
    for pause in expected:
        assert 0.5 * pause <= backoff.after(0.1) <= 1.5 * pause
    assert 0.1 <= backoff.after(60.0) <= 0.3
    assert 0.2 <= backoff.after(0.1) <= 0.6


def test_pauses_without_spread_are_exact() -> None:
    backoff = Backoff(1.0, 3.0, steady=10.0, spread=0.0)
    assert [backoff.after(9.9) for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    assert backoff.after(10.0) == 1.0
