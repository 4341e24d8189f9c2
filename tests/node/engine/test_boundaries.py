"""Failures at the boundary of a stage: what does not fit its record, and what the device says."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from patience import PATIENCE_SECONDS
from stagering import Carrying, Prompts, Ring, compute_thread, config_of, prompt_of, stages_of

from sealring.mesh.errors import EpochEnded, InvalidInput, StageFailed
from sealring.mesh.ring import Composition
from sealring.node.engine import (
    Allowance,
    Prefixes,
    RowParameters,
    StageEpoch,
    device,
    params,
    seat_of,
    threads,
)
from sealring.node.engine.staging import Stage, random_stage
from sealring.node.engine.warm_up import warm_up
from sealring.v1 import control_pb2 as control


class Widened:
    """A stage whose outputs are not what it said."""

    def __init__(self, stage: Stage) -> None:
        self.spec, self.make_cache, self.positions = stage.spec, stage.make_cache, stage.positions
        self.computed_as = stage.computed_as
        self._stage = stage

    def __call__(self, inputs: list[mx.array], cache: Any) -> list[mx.array]:
        return [array.astype(mx.complex64) for array in self._stage(inputs, cache)]


def test_what_does_not_fit_its_record_is_found_before_anything_serves(llama: dict[str, Any]) -> None:
    stage: Any = Widened(random_stage(llama, 0, 2, seed=0))
    with pytest.raises(InvalidInput) as caught:
        warm_up(stage, 512)
    assert caught.value.reason == "BAD_RECORD"


@pytest.fixture(scope="module")
def stage() -> Stage:
    return random_stage(config_of("llama"), 0, 5, seed=0)


def epoch_of(stage: Stage, faults: list[BaseException]) -> StageEpoch:
    return StageEpoch(
        1,
        Composition(epoch=1, max_rows=4, prefill_chunk=8),
        stage,
        partial(seat_of, stage, channel=None, prompts=Prompts({})),
        allowance=Allowance(1, 1, 1 << 20),
        prefixes=Prefixes(control.PREFIX_SUPPORT_UNSPECIFIED),
        on_fault=faults.append,
    )


def fault_of(stage: Stage, error: BaseException) -> BaseException:
    """What an epoch reports that meets this error."""
    faults: list[BaseException] = []
    epoch = epoch_of(stage, faults)
    epoch.fail(error)
    epoch.close()
    (fault,) = faults
    return fault


METAL = "[METAL] Command buffer execution failed: "
LACKING = "no memory left for a step in layers 0 to 4"


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (ValueError("secret"), "STAGE_FAILED", "llama failed in layers 0 to 4 (ValueError)"),
        (MemoryError(), "OUT_OF_MEMORY", LACKING),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), "OUT_OF_MEMORY", LACKING),
        (
            RuntimeError(METAL + "Insufficient Memory (00000008:kIOGPU...OutOfMemory)"),
            "OUT_OF_MEMORY",
            LACKING,
        ),
        (RuntimeError("[malloc] Unable to allocate 8589934592 bytes."), "OUT_OF_MEMORY", LACKING),
        (
            RuntimeError(METAL + "GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"),
            "GPU_RESET",
            "Timeout",
        ),
        (
            RuntimeError(METAL + "victim (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)"),
            "GPU_RESET",
            "InnocentVictim",
        ),
        (RuntimeError(METAL + "Other"), "STAGE_FAILED", f"RuntimeError: {METAL}Other"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else type(value).__name__,
)
def test_a_failure_is_named_by_what_failed(stage: Stage, error: Exception, reason: str, words: str) -> None:
    """In the device's words, which have seen no prompt; those of a model's code may quote one."""
    fault = fault_of(stage, error)
    assert isinstance(fault, StageFailed)
    assert (fault.reason, fault.__cause__) == (reason, error)
    assert words in fault.message
    assert "secret" not in str(fault)


def test_a_named_end_stays_what_it_is(stage: Stage) -> None:
    error = EpochEnded("the data channel was closed")
    assert fault_of(stage, error) is error


def test_a_fault_of_the_device_costs_one_epoch() -> None:
    """Launches behind the failed one fail as well, and leave an error for the next wait on that thread."""
    stages, rows = stages_of("llama", 1), {1: (prompt_of("llama", 1, 4), RowParameters())}
    ring = Ring(stages, Prompts(rows))
    ring.epochs[0].fail(RuntimeError("[METAL] Command buffer execution failed"))

    def launch() -> None:
        mx.async_eval(mx.linalg.inv(mx.zeros((64, 64)), stream=mx.cpu))  # type: ignore[no-untyped-call]

    compute_thread(0).submit(launch).result(PATIENCE_SECONDS)
    ring.close()
    again = Ring(stages, Prompts(rows), number=2)
    chunk = control.Chunk(row=1, start=0, end=4, prompt_tokens=4, params_bytes=params.BLOCK)
    try:
        again.announce(control.Step(number=1, prefill=control.Prefill(chunks=[chunk])))
        again.wait_for(1)
    finally:
        again.close()


@pytest.mark.parametrize("ended", [True, False])
def test_memory_that_the_outbox_may_still_read_is_not_freed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    freed: list[bool] = []
    made: Any = SimpleNamespace(close=lambda: freed.append(True))
    device.register(Carrying(made))
    try:
        epoch = epoch_of(stage, [])
    finally:
        device.register(device.Accelerator())
    with monkeypatch.context() as slow:
        if not ended:
            slow.setattr(threads.Outbox, "join", lambda *_: False)
        epoch.close()
    assert freed == [True] * ended
