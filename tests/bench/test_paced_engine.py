"""Results of a paced stage: when the product has them, by a clock that only sleeping moves."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import mlx.core as mx
import pytest

from bench.paced.engine import HookedTransfer, PacedEngine
from bench.paced.figures import StageTime, figures
from bench.paced.node import Pace
from bench.paced.pacing import PacedDevice
from sealring.node.engine.staging import Stage, StageSpec
from sealring.node.engine.staging.layout import TOKENS
from sealring.testing import ManualClock

KNOWN = figures()
HEAD = StageSpec("llama", 4, 0, 2, (TOKENS,), (TOKENS,))


@pytest.fixture
def time() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def make(tmp_path: Path, time: ManualClock):
    def made(slower: float = 1.0, *, shaped: bool = False) -> PacedEngine:
        pace = Pace("m4max", "llama-70b-4bit", "tb5", slower, shaped=shaped, reports=str(tmp_path))
        return PacedEngine(pace, PacedDevice(time, time.advance))

    return made


def half(rows: int, tokens: int) -> float:
    return StageTime(KNOWN.machines["m4max"], KNOWN.models["llama-70b-4bit"], 0.5, False).step(
        rows, tokens, 0
    )


def test_results_are_ready_after_the_macs_time_and_its_wait(make, time):
    engine = make()
    engine.built(HEAD, 4, 1, 0)
    results = HookedTransfer(engine).send_buffer([mx.zeros((4, 1, 8))])
    assert results.pending
    assert time.now == 100.0
    results.wait()
    assert time.now == pytest.approx(100 + half(4, 1) + KNOWN.completion)


def test_a_second_step_is_ready_a_steps_time_after_the_first(make, time):
    engine, found = make(), []
    for _ in range(2):
        engine.built(HEAD, 1, 1, 0)
        found.append(HookedTransfer(engine).send_buffer([mx.zeros((1, 1, 8))]))
        assert found[-1].pending
    for results in found:
        results.wait()
    assert time.now == pytest.approx(100 + 2 * half(1, 1) + KNOWN.completion)


@pytest.mark.parametrize("shaped", [False, True])
def test_a_record_takes_the_real_models_bytes_and_what_the_network_does_not_delay(make, time, shaped):
    engine = make(shaped=shaped)
    engine.built(HEAD, 1, 512, 0)
    results = HookedTransfer(engine).send_buffer([mx.zeros((1, 512, 8))])
    assert results.pending
    results.wait()
    ready = time.now
    engine.carry()
    link, size = KNOWN.links["tb5"], 2 * 8192 * 512
    way = size / link.bytes_per_second + link.wakeups + (0.0 if shaped else link.seconds)
    assert time.now - ready == pytest.approx(way)
    engine.carry()  # a record that no step has made
    assert time.now - ready == pytest.approx(way)


def test_a_slower_run_multiplies_all_of_it(make, time):
    engine = make(3.0)
    engine.built(HEAD, 1, 1, 0)
    results = HookedTransfer(engine).send_buffer([mx.zeros((1, 1, 8))])
    assert results.pending
    results.wait()
    engine.carry()
    link = KNOWN.links["tb5"]
    once = half(1, 1) + KNOWN.completion + link.seconds + link.wakeups + 2 * 8192 / link.bytes_per_second
    assert time.now == pytest.approx(100 + 3 * once)


def test_what_is_timed_at_load_has_no_link(make, time):
    engine = make()
    engine.built(HEAD, 1, 1, 0)
    engine.eval(mx.zeros(1))
    assert time.now == pytest.approx(100 + half(1, 1) + KNOWN.completion)
    engine.eval(mx.zeros(1))
    assert time.now == pytest.approx(100 + half(1, 1) + KNOWN.completion)


def test_it_stands_in_for_a_stages_call_with_all_arguments() -> None:
    product, ours = (list(signature(each).parameters) for each in (Stage.__call__, PacedEngine.call))
    assert ours[1:] == ["stage", *product[1:]]
