"""Failures at the boundary of a stage: what does not fit its record, and what the device says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from patience import PATIENCE_SECONDS
from stagering import Prompts, Ring, compute_thread, prompt_of, stages_of

from sealring.mesh.errors import EpochEnded, InvalidInput, StageFailed
from sealring.node.engine import params, threads
from sealring.node.engine.epoch import Allowance, StageEpoch
from sealring.node.engine.params import RowParameters
from sealring.node.engine.prefixes import Prefixes
from sealring.node.engine.staging import Stage, random_stage
from sealring.node.engine.transfer import register
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


def epoch_of(stage: Stage, faults: list[BaseException]) -> StageEpoch:
    return StageEpoch(
        1,
        stage,
        prefill_chunk=8,
        max_rows=4,
        allowance=Allowance(1, 1, 1 << 20),
        channel=None,
        prompts=Prompts({}),
        prefixes=Prefixes(control.PREFIX_SUPPORT_UNSPECIFIED),
        on_fault=faults.append,
    )


def test_a_failure_of_the_models_code_is_named_as_one(llama: dict[str, Any]) -> None:
    faults: list[BaseException] = []
    epoch = epoch_of(random_stage(llama, 0, 5, seed=0), faults)
    error = ValueError("words of a prompt")
    epoch.fail(error)
    epoch.close()
    (fault,) = faults
    assert isinstance(fault, StageFailed)
    assert fault.__cause__ is error
    assert "words" not in str(fault)
    assert "llama failed in layers 0 to 4 (ValueError)" in fault.message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
        RuntimeError(
            "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU...OutOfMemory)"
        ),
        RuntimeError("[malloc] Unable to allocate 8589934592 bytes."),
    ],
)
def test_a_step_without_memory_is_named_as_one(llama: dict[str, Any], error: Exception) -> None:
    faults: list[BaseException] = []
    epoch = epoch_of(random_stage(llama, 0, 5, seed=0), faults)
    epoch.fail(error)
    epoch.close()
    (fault,) = faults
    assert isinstance(fault, StageFailed)
    assert fault.reason == "OUT_OF_MEMORY"
    assert "no memory left for a step in layers 0 to 4" in fault.message


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        ("GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", "GPU_RESET", "Timeout"),
        (
            "victim of GPU error/recovery (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
            "GPU_RESET",
            "InnocentVictim",
        ),
        ("Other", "STAGE_FAILED", "RuntimeError: [METAL] Command buffer execution failed: Other"),
    ],
)
def test_metals_words_are_reported(llama: dict[str, Any], said: str, reason: str, words: str) -> None:
    faults: list[BaseException] = []
    epoch = epoch_of(random_stage(llama, 0, 5, seed=0), faults)
    epoch.fail(RuntimeError(f"[METAL] Command buffer execution failed: {said}"))
    epoch.close()
    (fault,) = faults
    assert isinstance(fault, StageFailed)
    assert fault.reason == reason
    assert words in fault.message


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


def test_a_named_end_stays_what_it_is(llama: dict[str, Any]) -> None:
    faults: list[BaseException] = []
    epoch = epoch_of(random_stage(llama, 0, 5, seed=0), faults)
    error = EpochEnded("the data channel was closed")
    epoch.fail(error)
    epoch.close()
    assert faults == [error]


@pytest.mark.parametrize("ended", [True, False])
def test_memory_that_the_outbox_may_still_read_is_not_freed(
    llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    freed: list[bool] = []
    made: Any = SimpleNamespace(close=lambda: freed.append(True))
    stage = random_stage(llama, 0, 5, seed=0)
    register(lambda: made)
    try:
        epoch = epoch_of(stage, [])
    finally:
        register(None)
    with monkeypatch.context() as slow:
        if not ended:
            slow.setattr(threads.Outbox, "join", lambda *_: False)
        epoch.close()
    assert freed == [True] * ended
