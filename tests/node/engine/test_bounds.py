"""Bounds on the memory that a gateway may take of a member."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sealring.mesh.errors import ResourceExhausted
from sealring.mesh.ring import Composition
from sealring.node.engine import Allowance, Prefixes, StageEpoch, params, seat_of
from sealring.node.engine.epoch import MAX_STEPS_AHEAD
from sealring.node.engine.staging import random_stage
from sealring.node.engine.text import STUCK_SECONDS, FileTokenizer, Front, LoadedTokenizer
from sealring.node.engine.vision.viewing import FolderSight
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import inference_pb2 as inference

MODEL = Path(__file__).parents[3] / "examples" / "demo_model" / "model"


class Channel:
    """Takes announcements and brings nothing."""

    def __init__(self) -> None:
        self.expected = 0

    def expect(self, header: object) -> None:
        self.expected += 1

    def shut(self) -> None: ...

    def close(self) -> None: ...


def test_a_gateway_that_does_not_wait_for_answers_ends_the_epoch(
    llama: dict[str, Any],
) -> None:
    faults: list[BaseException] = []
    channel: Any = Channel()
    stage = random_stage(llama, 3, 5, seed=0)
    epoch = StageEpoch(
        1,
        Composition(epoch=1, max_rows=4, prefill_chunk=8),
        stage,
        partial(seat_of, stage, channel=channel, prompts=None),
        allowance=Allowance(1, 1, 1 << 30),
        prefixes=Prefixes(control.PREFIX_SUPPORT_UNSPECIFIED),
        on_fault=faults.append,
    )
    chunk = control.Chunk(row=1, start=0, end=4, prompt_tokens=4, params_bytes=params.BLOCK)
    epoch.announce(control.Step(number=1, prefill=control.Prefill(chunks=[chunk])))
    admit = control.Change(admit=control.Admit(row=1, lane=0))
    for number in range(2, MAX_STEPS_AHEAD + 1):
        changes = [admit] if number == 2 else []
        assert epoch.announce(control.Step(number=number, changes=changes, decode=control.Decode(lane=0)))
    assert not faults
    announced = channel.expected
    assert epoch.announce(control.Step(number=MAX_STEPS_AHEAD + 1, decode=control.Decode(lane=0))) is None
    (fault,) = faults
    assert isinstance(fault, ResourceExhausted)
    assert fault.reason == "TOO_MANY_STEPS"
    assert channel.expected == announced
    epoch.close()


def test_a_front_that_does_not_come_back_from_a_prompt_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    front = Front(
        MODEL, 64, 512, lambda event: answered.set(), FolderSight(MODEL, sees=False), clock=lambda: now[0]
    )
    front.reader.wait_loaded()
    busy, done, answered = threading.Event(), threading.Event(), threading.Event()

    def encode(tokenizer: object, text: str) -> list[int]:
        busy.set()
        done.wait(60)
        return [1]

    for kind in (FileTokenizer, LoadedTokenizer):
        monkeypatch.setattr(kind, "encode_text", encode)
    front.reader.open(engine.OpenEngineRow(row=1, prompt=inference.Prompt(text="x")))
    assert busy.wait(60)
    assert not front.reader.stuck
    now[0] = 100 * STUCK_SECONDS
    assert not front.reader.stuck, "the machine slept"
    for _ in range(int(STUCK_SECONDS) - 2):
        now[0] += 1
        assert not front.reader.stuck
    now[0] += 1
    assert front.reader.stuck
    done.set()
    assert answered.wait(60)
    front.stop()
