"""Steps and ends of an epoch; the modules beside this one show that its tokens are right."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_SECONDS
from schedules import make_steps
from stagering import (
    CHUNK,
    SEED,
    Carrying,
    Prompts,
    Ring,
    compute_thread,
    config_of,
    expected,
    prompt_of,
    run,
    run_on,
    sampling,
    stages_of,
)

from sealring.mesh.errors import DeadlineExceeded, EpochEnded, Internal, InvalidInput, ResourceExhausted
from sealring.node.engine import Allowance, RowParameters, SharedSendBuffer, StageEpoch, device, params
from sealring.node.engine.staging import Stage, random_stage
from sealring.node.engine.transfer import SendBuffer, SharedTransfer
from sealring.node.wire.channel import Kind
from sealring.v1 import control_pb2 as control
from sealring.v1 import trace_pb2


@pytest.mark.parametrize("family", ["llama", "dbrx"])
def test_a_graph_is_built_ahead_unless_that_evaluates(family: str) -> None:
    lengths = {1: (3, 9), 2: (30, 6), 3: (27, 5)}
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in lengths.items()}
    ring = Ring(stages_of(family, 2), Prompts(rows))
    steps = make_steps(random.Random(1), lengths, 1)
    decodes = {step.number for step in steps if step.HasField("decode")}
    try:
        for step in steps:
            ring.announce(step)
        ring.wait_for(max(decodes))
        for epoch in ring.epochs:
            found = [times.built <= times.fed for times in epoch.trace if times.step in decodes]
            assert found
            assert set(found) == {family == "llama"}
    finally:
        ring.close()


class SlowTransfer(SharedTransfer):
    """A device whose results come while `ready` is set; `built` counts the graphs that have results."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.ready.set()
        self.built = threading.Semaphore(0)

    def send_buffer(self, arrays: Sequence[mx.array]) -> SendBuffer:
        ready = self.ready

        class Late(SharedSendBuffer):
            def wait(self) -> list[memoryview]:
                assert ready.wait(PATIENCE_SECONDS)
                return super().wait()

        self.built.release()
        return Late(arrays)


@pytest.fixture
def slow() -> Iterator[SlowTransfer]:
    made = SlowTransfer()
    device.register(Carrying(made))
    yield made
    made.ready.set()
    device.register(device.Accelerator())


def test_the_next_chunk_is_built_and_rows_step_on_while_one_is_computed(slow: SlowTransfer) -> None:
    tokens = {1: prompt_of("llama", 1, 1), 2: prompt_of("llama", 2, 24)}
    prompts = Prompts({row: (prompt, RowParameters()) for row, prompt in tokens.items()})
    ring = Ring(stages_of("llama", 1), prompts)
    epoch = ring.epochs[0]

    def execute(step: control.Step) -> Future[None]:
        resolved = epoch.announce(step)
        assert resolved is not None
        slow.built = threading.Semaphore(0)
        return compute_thread(0).submit(epoch.execute, resolved)

    def chunk(number: int, start: int) -> control.Step:
        first, last = params.BLOCK if start == 0 else 0, 24
        made = control.Chunk(row=2, start=start, end=start + 8, prompt_tokens=last, params_bytes=first)
        return control.Step(number=number, prefill=control.Prefill(chunks=[made]))

    try:
        execute(prefill(1, tokens=1)).result(PATIENCE_SECONDS)
        ring.wait_for(1)
        slow.ready.clear()
        execute(chunk(2, 0)).result(PATIENCE_SECONDS)
        decode = control.Step(number=3, changes=[admit(1)], decode=control.Decode(lane=0))
        execute(decode).result(PATIENCE_SECONDS)
        second = execute(chunk(4, 8))
        assert slow.built.acquire(timeout=PATIENCE_SECONDS)
        with pytest.raises(TimeoutError):  # the device holds the intermediate results of one chunk
            second.result(0.2)
        assert epoch.steps == 3
        slow.ready.set()
        second.result(PATIENCE_SECONDS)
        execute(chunk(5, 16)).result(PATIENCE_SECONDS)
        execute(decode_step(6)).result(PATIENCE_SECONDS)
        ring.wait_for(6)
        for row in tokens:
            wanted = expected("llama", tuple(tokens[row]))
            assert prompts.answers[row] == wanted[: 3 if row == 1 else 1]
    finally:
        slow.ready.set()
        ring.close()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stage_that_evaluates_though_its_trial_said_no_ends_the_epoch(rank: int) -> None:
    """Nothing wrong comes out, and the epoch after it goes."""
    lengths = {1: (3, 9), 2: (30, 6), 3: (27, 5)}
    rows = {row: (prompt_of("dbrx", row, length), RowParameters()) for row, (length, _) in lengths.items()}
    steps = make_steps(random.Random(1), lengths, 1)
    stages = stages_of("dbrx", 3)
    assert all(stage.awaits_input for stage in stages)
    stages[rank].awaits_input = False
    ring = Ring(stages, Prompts(rows))
    try:
        for step in steps:
            ring.announce(step)
        ring.wait_for_fault()
    finally:
        ring.close()
    (fault,) = ring.faults
    assert isinstance(fault, Internal)
    assert fault.reason == "EVALUATED_EARLY"
    assert stages[rank].awaits_input
    answers = run("dbrx", 3, steps, rows).answers
    for row, (_, tokens) in lengths.items():
        wanted = expected("dbrx", tuple(rows[row][0]), tokens)
        assert answers[row][:tokens] == wanted
        assert ring.prompts.answers[row] == wanted[: len(ring.prompts.answers[row])]


def test_records_are_announced_in_order_and_parameters_pass_through() -> None:
    prompts = Prompts({1: (prompt_of("llama", 1, 12), RowParameters())})
    ring = Ring(stages_of("llama", 3), prompts)
    try:
        chunks = [(0, 8, params.BLOCK), (8, 12, 0)]
        for number, (start, end, size) in enumerate(chunks, start=1):
            chunk = control.Chunk(row=1, start=start, end=end, prompt_tokens=12, params_bytes=size)
            ring.announce(control.Step(number=number, prefill=control.Prefill(chunks=[chunk])))
        ring.wait_for(2)
    finally:
        ring.close()
    width = config_of("llama")["hidden_size"]
    forward = [
        (Kind.SAMPLING, 1, "uint8", (params.BLOCK,)),
        (Kind.ACTIVATIONS, 1, "float32", (1, 8, width)),
        (Kind.ACTIVATIONS, 2, "float32", (1, 4, width)),
    ]
    seen = [[(h.kind, h.step, h.dtype, h.shape) for h in link.seen] for link in ring.links]
    assert seen == [forward, forward, [(Kind.TOKENS, 2, "uint32", (1,))]]


def test_half_precision_states_cross_links_unchanged() -> None:
    config = config_of("llama")

    def make(lo: int, hi: int) -> Stage:
        return random_stage(config, lo, hi, seed=SEED, dtype=mx.bfloat16)

    edges = [(0, 2), (2, 4), (4, 5)]
    three = [
        compute_thread(rank).submit(make, *edge).result(PATIENCE_SECONDS) for rank, edge in enumerate(edges)
    ]
    one = [compute_thread(0).submit(make, 0, 5).result(PATIENCE_SECONDS)]
    lengths = {1: (9, 6), 2: (4, 6)}
    steps = make_steps(random.Random(3), lengths, 1)
    rows = {row: (prompt_of("llama", row, length), RowParameters()) for row, (length, _) in lengths.items()}
    answers = [run_on(stages, steps, rows).answers for stages in (one, three)]
    assert answers[0] == answers[1]
    del three, one
    gc.collect()


def prefill(number: int, *, row: int = 1, tokens: int = 4, size: int = params.BLOCK) -> control.Step:
    chunk = control.Chunk(row=row, start=0, end=tokens, prompt_tokens=tokens, params_bytes=size)
    return control.Step(number=number, prefill=control.Prefill(chunks=[chunk]))


def admit(row: int, lane: int = 0) -> control.Change:
    return control.Change(admit=control.Admit(row=row, lane=lane))


@contextmanager
def lonely(rank: int, **options: Any) -> Iterator[tuple[Ring, StageEpoch]]:
    """A member of a ring of three whose neighbours say nothing."""
    ring = Ring(stages_of("llama", 3), Prompts({1: ([1, 2, 3, 4], RowParameters())}), **options)
    try:
        yield ring, ring.epochs[rank]
    finally:
        ring.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_record_that_does_not_come_ends_the_epoch(rank: int) -> None:
    with lonely(rank, deadline=0.2) as (ring, epoch):
        steps = [prefill(1), control.Step(number=2, changes=[admit(1)], decode=control.Decode(lane=0))]
        for step in steps:
            resolved = epoch.announce(step)
            assert resolved is not None
            compute_thread(rank).submit(epoch.execute, resolved).result(PATIENCE_SECONDS)
            if epoch.over:
                break
        (fault,) = ring.faults
        assert isinstance(fault, DeadlineExceeded)
        assert fault.reason == "RECORD_OVERDUE"
        assert epoch.announce(control.Step(number=3)) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_end_wakes_a_compute_loop_that_waits(rank: int) -> None:
    with lonely(rank) as (ring, epoch):
        first = epoch.announce(prefill(1))
        second = epoch.announce(control.Step(number=2, changes=[admit(1)], decode=control.Decode(lane=0)))
        assert first is not None
        assert second is not None
        compute_thread(rank).submit(epoch.execute, first)
        waiting = compute_thread(rank).submit(epoch.execute, second)
        assert ring.links[rank - 1].awaited.wait(PATIENCE_SECONDS)
        assert not waiting.done()
        epoch.end()
        waiting.result(PATIENCE_SECONDS)
        assert not ring.faults


@settings(max_examples=5, deadline=None, derandomize=True)
@given(choices=st.randoms(use_true_random=False), size=st.integers(1, 3), after=st.integers(0, 15))
def test_an_epoch_may_end_at_any_time(choices: random.Random, size: int, after: int) -> None:
    lengths = {row: (choices.randint(1, 20), choices.randint(1, 9)) for row in range(1, 6)}
    rows = {row: (prompt_of("llama", row, length), RowParameters()) for row, (length, _) in lengths.items()}
    ring = Ring(stages_of("llama", size), Prompts(rows))
    steps = make_steps(choices, lengths, 2)
    for step in steps:
        ring.announce(step)
    for step in sampling(steps)[:after][-1:]:
        ring.wait_for(step)
    ring.close()
    assert not ring.faults
    assert not [thread for thread in threading.enumerate() if thread.name in ("outbox", "inbox")]
    for row, (_, tokens) in lengths.items():
        got = ring.prompts.answers[row][:tokens]
        assert got == expected("llama", tuple(rows[row][0]))[: len(got)]


def test_the_end_of_a_channel_is_a_fault() -> None:
    with lonely(1) as (ring, epoch):
        resolved = epoch.announce(prefill(1))
        assert resolved is not None
        ring.links[0].records.put(None)
        compute_thread(1).submit(epoch.execute, resolved).result(PATIENCE_SECONDS)
        (fault,) = ring.faults
        assert isinstance(fault, EpochEnded)


@pytest.mark.parametrize(
    "step",
    [
        prefill(2),
        prefill(1, tokens=CHUNK + 1),
        control.Step(number=1, decode=control.Decode(lane=0)),
        control.Step(number=1, changes=[admit(1)]),
    ],
)
def test_a_step_that_does_not_follow_ends_the_epoch(step: control.Step) -> None:
    ring = Ring(stages_of("llama", 1), Prompts({}))
    try:
        assert ring.epochs[0].announce(step) is None
        (fault,) = ring.faults
        assert isinstance(fault, InvalidInput)
        assert ring.epochs[0].announce(prefill(1)) is None
        assert len(ring.faults) == 1
    finally:
        ring.close()


@pytest.mark.parametrize("step", [prefill(1, tokens=3), prefill(1, tokens=5), prefill(1, size=512)])
def test_a_chunk_that_does_not_fit_its_row_ends_the_epoch(step: control.Step) -> None:
    ring = Ring(stages_of("llama", 1), Prompts({1: ([1, 2, 3, 4], RowParameters())}))
    try:
        ring.announce(step)
        compute_thread(0).submit(lambda: None).result(PATIENCE_SECONDS)
        (fault,) = ring.faults
        assert isinstance(fault, InvalidInput)
        assert fault.reason == "BAD_STEP"
    finally:
        ring.close()


def decode_step(number: int) -> control.Step:
    return control.Step(number=number, decode=control.Decode(lane=0))


def keep_step(number: int) -> control.Step:
    keep = control.Keep(prefix=number, row=1, tokens=4)
    return control.Step(number=number, changes=[control.Change(keep=keep)])


@pytest.mark.parametrize("hostile", [decode_step, keep_step], ids=["decodes for ever", "keeps for ever"])
def test_a_gateway_that_asks_for_more_memory_than_is_offered_ends_the_epoch(hostile: Any) -> None:
    """Each member goes by its own offer, not by the gateway's figures."""
    prompts = Prompts({1: ([1, 2, 3, 4], RowParameters())})
    ring = Ring(stages_of("llama", 1), prompts, allowance=Allowance(10, 8, 160))
    try:
        ring.announce(prefill(1))
        ring.announce(control.Step(number=2, changes=[admit(1)]))
        allowed = 2
        while not ring.faults:
            allowed += 1
            assert allowed < 30
            ring.announce(hostile(allowed))
        (fault,) = ring.faults
        assert isinstance(fault, ResourceExhausted)
        assert fault.reason == "KV_BUDGET"
        held = 4 + (allowed - 2 if hostile is decode_step else 4 * (allowed - 2))
        assert 10 * held + 8 > 180 >= 10 * (held - (1 if hostile is decode_step else 4)) + 8
    finally:
        ring.close()


def held() -> int:
    """Bytes of MLX's arrays, once the compute thread has done what it was given."""
    found: int = compute_thread(0).submit(mx.get_active_memory).result(PATIENCE_SECONDS)
    return found


def test_rows_hold_memory_until_they_are_evicted_and_nothing_is_kept_of_them() -> None:
    lengths = dict.fromkeys((1, 2, 3), 4)
    prompts = Prompts({row: ([1, 2, 3, 4], RowParameters()) for row in lengths})
    stages = stages_of("llama", 1)
    mx.clear_cache()
    before = held()
    ring = Ring(stages, prompts)
    epoch = ring.epochs[0]
    try:
        for row in lengths:
            ring.announce(prefill(row, row=row))
        ring.wait_for(3)
        three = held() - before
        changes = [admit(1), admit(2), control.Change(evict=control.Evict(row=3))]
        ring.announce(control.Step(number=4, changes=changes, decode=control.Decode(lane=0)))
        ring.wait_for(4)
        assert three / 2 < held() - before <= three
        changes = [control.Change(evict=control.Evict(row=row)) for row in (1, 2)]
        ring.announce(control.Step(number=5, changes=changes))
        assert held() - before < three / 10
        assert prompts.forgotten == [3, 1, 2]
        assert epoch.steps == 5
        # a prompt of several tokens is filled up to its last one, then sampled; each has times of its own
        assert sorted(times.step for times in epoch.trace) == [1, 1, 2, 2, 3, 3, 4]
        assert all(t.started <= t.fed <= t.launched <= t.ready <= t.sent for t in epoch.trace)
    finally:
        ring.close()
    assert mx.get_cache_memory() < three / 10, "MLX keeps what an epoch has freed"


@pytest.mark.parametrize("size", [1, 2])
def test_every_step_that_computes_is_in_the_trace_of_every_member(size: int) -> None:
    rows = {1: (prompt_of("llama", 1, 21), RowParameters()), 2: (prompt_of("llama", 2, 5), RowParameters())}
    steps = make_steps(random.Random(4), {1: (21, 6), 2: (5, 6)}, 1)
    prompts = Prompts(rows)
    ring = Ring(stages_of("llama", size), prompts)
    try:
        for step in steps:
            ring.announce(step)
        working = [step.number for step in steps if step.WhichOneof("work")]
        ring.wait_for(working[-1])
        for epoch in ring.epochs:
            for activity in (trace_pb2.ACTIVITY_BUILD, trace_pb2.ACTIVITY_COMPUTE):
                found: set[int] = set()
                until = time.monotonic() + PATIENCE_SECONDS
                while working[-1] not in found and time.monotonic() < until:
                    found = {one.step for one in epoch.spans(0).spans if one.activity == activity}
                assert found == set(working)
    finally:
        ring.close()
