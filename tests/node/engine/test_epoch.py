"""Rings of real stages in one process, joined by queues: what they generate is what mlx-lm generates."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.composition import Chunk, Composition, Keeping, ResolvedStep
from mesh.errors import DeadlineExceeded, EpochEnded, Internal, InvalidInput, ResourceExhausted
from mesh.records import Kind, RecordHeader
from node.engine import params
from node.engine.eagerness import awaits_input
from node.engine.epoch import Allowance, Epoch
from node.engine.logprobs import Asking, TokenLogprobs, asking_of
from node.engine.params import RowParameters
from node.engine.prefixes import support
from node.engine.staging import Stage, random_model, random_stage
from sealring.v1 import control_pb2 as control
from sealring.v1 import trace_pb2

SEED = 7
CHUNK = 8
MAX_ROWS = 64

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 96, "vocab_size": 300},
    "qwen2": {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300},
    "qwen3": {"vocab_size": 300},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "vocab_size": 300,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": {"vocab_size": 300},
    "mixtral": {},
    "mamba2": {"vocab_size": 300},
    "deepseek_v3": {"vocab_size": 300},
    "dbrx": {"num_hidden_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 300},
}
QUANTIZED = ["qwen3:8", "qwen3:4", "gemma3_text:8", "llama:sliding:4"]
"""Families whose caches are kept in so many bits."""


@cache
def compute_thread(rank: int) -> ThreadPoolExecutor:
    """Of one member, for all tests: mlx's streams, and what is built on them, belong to the thread."""
    return ThreadPoolExecutor(1, f"compute-{rank}", initializer=partial(mx.set_default_device, mx.cpu))


class Link:
    """A directed edge: what is sent comes out in order."""

    def __init__(self) -> None:
        self.records: SimpleQueue[tuple[RecordHeader, bytes] | None] = SimpleQueue()
        self.seen: list[RecordHeader] = []


class MemoryReceived:
    def __init__(self, header: RecordHeader, data: bytes) -> None:
        self.header = header
        self.data = memoryview(data)

    def release(self) -> None:
        self.data.release()


class MemoryChannel:
    """As node.channel.EngineChannel, and as strict about what was announced."""

    def __init__(self, outgoing: Link, incoming: Link) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._expected: deque[RecordHeader] = deque()

    def send(self, header: RecordHeader, *buffers: memoryview | bytes) -> None:
        payload = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        assert len(payload) == header.length
        self._outgoing.seen.append(header)
        self._outgoing.records.put((header, payload))

    def expect(self, header: RecordHeader) -> None:
        self._expected.append(header)

    def receive(self, timeout: float | None = None) -> MemoryReceived:
        try:
            record = self._incoming.records.get(timeout=timeout)
        except Empty:
            raise TimeoutError from None
        if record is None:
            raise EpochEnded("the data channel was closed")
        header, payload = record
        assert header == self._expected.popleft()
        return MemoryReceived(header, payload)

    def shut(self) -> None:
        self._incoming.records.put(None)

    def close(self) -> None:
        self.shut()


class Prompts:
    """The head's text side without text."""

    def __init__(self, rows: dict[int, tuple[list[int], RowParameters]]) -> None:
        self._rows = rows
        self.answers: dict[int, list[int]] = {row: [] for row in rows}
        self.logprobs: dict[int, list[TokenLogprobs]] = {row: [] for row in rows}
        self.steps: list[int] = []
        self.without_tokens: list[int] = []
        self.forgotten: list[int] = []
        self.reused: list[int] = []
        self.delivered = threading.Condition()

    def prompt(self, row: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array(self._rows[row][0], np.uint32)

    def parameters(self, row: int) -> bytes:
        return params.encode(self._rows[row][1])

    def prefilled(self, row: int) -> None: ...

    def forget(self, row: int) -> None:
        self.forgotten.append(row)

    def keep(self, keeping: Keeping) -> None: ...

    def reuse(self, chunk: Chunk) -> None:
        self.reused.append(chunk.start)

    def drop(self, prefix: int) -> None: ...

    def asking(self, rows: Sequence[int]) -> Asking:
        return asking_of(self._rows[row][1].logprobs for row in rows)

    def deliver(self, step: ResolvedStep, tokens: list[int], logprobs: Mapping[int, TokenLogprobs]) -> None:
        with self.delivered:
            (self.steps if step.sampled else self.without_tokens).append(step.number)
            for index, (row, token) in enumerate(zip(step.sampled, tokens, strict=True)):
                self.answers[row].append(token)
                if index in logprobs:
                    self.logprobs[row].append(logprobs[index])
            self.delivered.notify_all()


class Ring:
    """Epochs of all members of a ring, each with a thread that computes."""

    def __init__(
        self,
        stages: list[Stage],
        prompts: Prompts,
        *,
        deadline: float = 30.0,
        allowance: Allowance = Allowance(1, 1, 1 << 40),
    ) -> None:
        size = len(stages)
        links = [Link() for _ in stages]
        self.links = links
        self.faults: list[BaseException] = []
        self.prompts = prompts
        self.epochs = [
            Epoch(
                1,
                stage,
                prefill_chunk=CHUNK,
                max_rows=MAX_ROWS,
                allowance=allowance,
                channel=MemoryChannel(links[rank], links[rank - 1]) if size > 1 else None,
                prompts=prompts if rank == 0 else None,
                on_fault=self.faults.append,
                deadline=deadline,
            )
            for rank, stage in enumerate(stages)
        ]

    def announce(self, step: control.Step) -> None:
        for rank, epoch in enumerate(self.epochs):
            resolved = epoch.announce(step)
            if resolved is not None:
                compute_thread(rank).submit(epoch.execute, resolved)

    def wait_for(self, step: int) -> None:
        until = time.monotonic() + 50
        with self.prompts.delivered:
            while step not in self.prompts.steps and not self.faults:
                assert time.monotonic() < until
                self.prompts.delivered.wait(0.2)
        assert not self.faults, self.faults

    def close(self) -> None:
        for epoch in self.epochs:
            epoch.end()
        for rank, epoch in enumerate(self.epochs):
            compute_thread(rank).submit(epoch.close).result(20)


def make_steps(
    choices: random.Random,
    rows: dict[int, tuple[int, int]],
    lanes: int,
    cancelled: set[int] | None = None,
    sizes: Mapping[int, int] | None = None,
    parks: bool = False,
) -> list[control.Step]:
    """A whole run: rows (prompt tokens, tokens to generate) come, are prefilled, decoded and evicted.

    What happens when is up to `choices`. Rows may be stepped more often than needed, as by a gateway that
    announces ahead. With `cancelled` some rows leave at any time, and are put there. `sizes` are those of the
    rows' parameter records, where they are not of one block. With `parks` rows leave their lanes for others.
    """
    waiting = sorted(rows)
    done: dict[int, int] = {}
    ready: list[int] = []
    lane_rows: dict[int, list[int]] = {}
    generated = dict.fromkeys(rows, 0)
    finished: set[int] = set()
    changes: list[control.Change] = []
    steps: list[control.Step] = []
    admitted: set[int] = set()  # by the changes of the next step
    parked = 0

    def add(**work: Any) -> None:
        nonlocal parked
        steps.append(control.Step(number=len(steps) + 1, changes=changes, **work))
        changes.clear()
        admitted.clear()
        parked = 0

    def evict(row: int) -> None:
        changes.append(control.Change(evict=control.Evict(row=row)))

    while waiting or done or ready or lane_rows:
        actions = (
            ["prefill"] * bool(waiting or done) + ["admit"] * bool(ready) + ["decode"] * 3 * bool(lane_rows)
        )
        actions += ["evict"] * any(row in finished for members in lane_rows.values() for row in members)
        if cancelled is not None and (done or lane_rows) and choices.random() < 0.1:
            row = choices.choice([*done, *(row for members in lane_rows.values() for row in members)])
            cancelled.add(row)
            done.pop(row, None)
            remaining = {lane: [m for m in members if m != row] for lane, members in lane_rows.items()}
            lane_rows = {lane: members for lane, members in remaining.items() if members}
            evict(row)
            continue
        settled = [
            (lane, row) for lane, members in lane_rows.items() for row in members if row not in admitted
        ]
        actions += ["park"] * (parks and bool(settled))
        action = choices.choice(actions)
        if action == "park":
            lane, row = choices.choice(settled)
            changes.insert(parked, control.Change(park=control.Park(row=row)))
            parked += 1
            lane_rows[lane].remove(row)
            if not lane_rows[lane]:
                del lane_rows[lane]
            ready.append(row)
        elif action == "prefill":
            going_on = choices.randint(0 if waiting else 1, len(done)) if done else 0
            chunks = [(row, done[row]) for row in choices.sample(sorted(done), going_on)]
            while waiting and (not chunks or choices.random() < 0.4):
                chunks.append((waiting.pop(0), 0))
            sent = []
            for row, start in chunks:
                total = rows[row][0]
                end = min(total, start + choices.randint(1, CHUNK))
                sent.append(
                    control.Chunk(
                        row=row,
                        start=start,
                        end=end,
                        prompt_tokens=total,
                        params_bytes=(sizes or {}).get(row, params.BLOCK) if start == 0 else 0,
                    )
                )
                done[row] = end
                if end == total:
                    del done[row]
                    ready.append(row)
                    generated[row] = 1
            add(prefill=control.Prefill(chunks=sent))
        elif action == "admit":
            for row in choices.sample(ready, choices.randint(1, len(ready))):
                ready.remove(row)
                if rows[row][1] <= 1:
                    evict(row)
                    continue
                lane = choices.randrange(lanes)
                lane_rows.setdefault(lane, []).append(row)
                admitted.add(row)
                changes.append(control.Change(admit=control.Admit(row=row, lane=lane)))
        elif action == "decode":
            lane = choices.choice(sorted(lane_rows))
            add(decode=control.Decode(lane=lane))
            for row in lane_rows[lane]:
                generated[row] += 1
                if generated[row] >= rows[row][1]:
                    finished.add(row)
        else:
            lane, row = choices.choice(
                [(lane, row) for lane, members in lane_rows.items() for row in members if row in finished]
            )
            lane_rows[lane].remove(row)
            if not lane_rows[lane]:
                del lane_rows[lane]
            evict(row)
    if changes:
        add()
    return steps


@pytest.fixture(scope="module", autouse=True)
def _free_in_the_threads_that_made() -> Iterator[None]:
    """Else mlx aborts when the interpreter ends."""
    yield
    stages_of.cache_clear()
    gc.collect()
    for rank in range(3):
        compute_thread(rank).submit(mx.synchronize).result(20)
        compute_thread(rank).submit(mx.clear_streams).result(20)
        compute_thread(rank).shutdown()


@cache
def config_of(family: str) -> dict[str, Any]:
    archs = json.loads((Path(__file__).parents[2] / "data" / "archs.json").read_bytes())
    family, _ = kv_bits_of(family)
    found: dict[str, Any] = archs[family] | FAMILIES.get(family, {})
    return found


def kv_bits_of(family: str) -> tuple[str, int]:
    name, _, bits = family.rpartition(":")
    return (name, int(bits)) if family in QUANTIZED else (family, 0)


@cache
def stages_of(family: str, size: int) -> list[Stage]:
    config = config_of(family)
    layers = config["num_hidden_layers"]
    edges = [layers * rank // size for rank in range(size + 1)]

    def make(lo: int, hi: int) -> Stage:
        stage = random_stage(config, lo, hi, seed=SEED, kv_bits=kv_bits_of(family)[1])
        stage.awaits_input = awaits_input(stage)
        return stage

    made = [compute_thread(rank).submit(make, *edges[rank : rank + 2]) for rank in range(size)]
    return [stage.result(30) for stage in made]


@cache
def whole(family: str) -> Any:
    model = random_model(config_of(family), seed=SEED)
    mx.eval(model.parameters())
    return model


@cache
def generate_step() -> Callable[..., Iterator[tuple[Any, Any]]]:
    import mlx_lm

    mlx_lm.stream_generate  # noqa: B018  # the whole package, should only the light one be there
    function: Callable[..., Iterator[tuple[Any, Any]]] = importlib.import_module(
        "mlx_lm.generate"
    ).generate_step
    return function


@cache
def expected(family: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """By mlx-lm alone, on the whole model."""
    caches = quantized_prompt_cache(family) if family in QUANTIZED else None
    steps = generate_step()(mx.array(prompt), whole(family), max_tokens=tokens, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def quantized_prompt_cache(family: str) -> list[Any]:
    """mlx-lm's own quantized cache in the place of each plain one."""
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

    name, bits = kv_bits_of(family)
    group_size = 64 if config_of(family).get("head_dim", 32) % 64 == 0 else 32
    made = make_prompt_cache(whole(family))
    plain = [type(cache) is KVCache for cache in made]
    assert any(plain), name
    return [
        QuantizedKVCache(group_size, bits) if is_plain else cache
        for cache, is_plain in zip(made, plain, strict=True)
    ]


def prompt_of(family: str, number: int, length: int) -> list[int]:
    choices = random.Random(number * 1000 + length)
    return [choices.randrange(config_of(family)["vocab_size"]) for _ in range(length)]


def run(
    family: str, size: int, steps: list[control.Step], rows: dict[int, tuple[list[int], RowParameters]]
) -> Prompts:
    return run_on(stages_of(family, size), steps, rows)


def run_on(
    stages: list[Stage], steps: list[control.Step], rows: dict[int, tuple[list[int], RowParameters]]
) -> Prompts:
    prompts = Prompts(rows)
    ring = Ring(stages, prompts)
    try:
        for step in steps:
            ring.announce(step)
        sampled = [step.number for step in steps if step.WhichOneof("work")]
        composition = Composition(epoch=1, max_rows=MAX_ROWS, prefill_chunk=CHUNK)
        expected_steps = [step.number for step in map(composition.apply, steps) if step.sampled]
        assert sampled
        if expected_steps:
            ring.wait_for(expected_steps[-1])
        assert prompts.steps == expected_steps
        rest = {step.number for step in steps} - set(expected_steps)
        last = expected_steps[-1] if expected_steps else 0
        assert {step for step in prompts.without_tokens if step < last} == {n for n in rest if n < last}
    finally:
        ring.close()
    assert not ring.faults
    return prompts


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", [*FAMILIES, *QUANTIZED])
def test_greedy_tokens_are_those_of_mlx_lm(family: str, size: int) -> None:
    lengths = {
        row: (length, tokens)
        for row, (length, tokens) in enumerate(
            [(3, 12), (17, 5), (1, 9), (30, 14), (8, 1), (9, 7), (2, 20), (23, 3)], start=1
        )
    }
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in lengths.items()}
    steps = make_steps(random.Random(size), lengths, size)
    answers = run(family, size, steps, rows).answers
    for row, (_, tokens) in lengths.items():
        assert answers[row][:tokens] == expected(family, tuple(rows[row][0]), 21)[:tokens], row


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", [*FAMILIES, *QUANTIZED])
def test_rows_that_change_lanes_get_the_tokens_of_mlx_lm(family: str, size: int) -> None:
    lengths = dict(enumerate([(3, 20), (17, 18), (1, 19), (30, 14), (9, 21), (2, 20)], start=1))
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in lengths.items()}
    steps = make_steps(random.Random(size), lengths, 3, parks=True)
    assert sum(change.HasField("park") for step in steps for change in step.changes) > 10
    answers = run(family, size, steps, rows).answers
    for row, (_, tokens) in lengths.items():
        assert answers[row][:tokens] == expected(family, tuple(rows[row][0]), 21)[:tokens], row


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


@pytest.mark.parametrize("rank", [0, 1, 2])
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
        until = time.monotonic() + 30
        while not ring.faults and time.monotonic() < until:
            time.sleep(0.01)
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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "mamba2", "qwen3:4"])
def test_choices_are_what_rows_of_their_own_would_be(family: str, size: int) -> None:
    """Copies of a row are rows with seeds that follow on its own, wherever they are stepped."""
    prompt, tokens = prompt_of(family, 3, 13), 6
    one = RowParameters(temperature=1.3)
    if size > 1:
        one = RowParameters(
            temperature=1.3,
            repetition_penalty=1.5,
            repetition_context_size=9,
            prompt_tail=tuple(prompt[-9:]),
            presence_penalty=0.5,
            frequency_penalty=1.5,
        )
    seeds = ((1 << 64) - 2, (1 << 64) - 1, 0, 1)
    sampling = [dataclasses.replace(one, seed=seed) for seed in seeds]
    alone = {}
    for number, parameters in enumerate(sampling, start=1):
        steps = make_steps(random.Random(number), {1: (13, tokens)}, 1)
        alone[number] = run(family, size, steps, {1: (prompt, parameters)}).answers[1][:tokens]
    assert len({tuple(answer) for answer in alone.values()}) > 1

    steps = []
    for start, end in ((0, 8), (8, 13)):
        step = control.Step(number=len(steps) + 1)
        size_of, choices = (params.BLOCK, 4) if start == 0 else (0, 0)
        step.prefill.chunks.add(
            row=1, start=start, end=end, prompt_tokens=13, params_bytes=size_of, choices=choices
        )
        steps.append(step)
    for turn in range(2 * tokens):
        step = control.Step(number=len(steps) + 1)
        if turn < 2:
            for row in (1, 3) if turn == 0 else (4, 2):
                step.changes.add().admit.CopyFrom(control.Admit(row=row, lane=turn))
        step.decode.lane = turn % 2
        steps.append(step)
    rows = dict.fromkeys(range(1, 5), (prompt, sampling[0]))
    answers = run(family, size, steps, rows).answers
    assert {row: answer[:tokens] for row, answer in answers.items()} == alone


class PrefixSteps:
    """A run in which prefixes of rows are kept, dropped and reused at any time that the composition allows.

    `texts` are prompts with the tokens that follow them, so that a prefix may reach into an answer.
    """

    def __init__(
        self, choices: random.Random, prompts: dict[int, list[int]], texts: dict[int, list[int]], exact: bool
    ) -> None:
        self.choices, self.prompts, self.texts, self.exact = choices, prompts, texts, exact
        self.steps: list[control.Step] = []
        self.waiting = sorted(prompts)
        self.held: dict[int, int] = {}
        self.lanes: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}
        self.prefixes = 0

    def make(self) -> list[control.Step]:
        while self.waiting or self.held:
            step = control.Step(number=len(self.steps) + 1)
            self._keep_and_drop(step)
            self._move(step)
            self._work(step)
            self.steps.append(step)
        return self.steps

    def _keep_and_drop(self, step: control.Step) -> None:
        for row in list(self.held):
            if self.choices.random() < 0.3 and self.held[row] <= len(self.texts[row]):
                self.prefixes += 1
                tokens = self.held[row] if self.exact else self.choices.randint(1, self.held[row])
                step.changes.add().keep.CopyFrom(control.Keep(prefix=self.prefixes, row=row, tokens=tokens))
                self.kept[self.prefixes] = self.texts[row][:tokens]
        for prefix in list(self.kept):
            if self.choices.random() < 0.1:
                step.changes.add().drop.prefix = prefix
                del self.kept[prefix]

    def _move(self, step: control.Step) -> None:
        laned = {row for rows in self.lanes.values() for row in rows}
        for row in list(self.held):
            over = self.held[row] >= len(self.texts[row])
            if over or self.choices.random() < 0.03:
                step.changes.add().evict.row = row
                del self.held[row]
                lanes = {lane: [each for each in rows if each != row] for lane, rows in self.lanes.items()}
                self.lanes = {lane: rows for lane, rows in lanes.items() if rows}
            elif row not in laned and self.held[row] == len(self.prompts[row]):
                lane = self.choices.randrange(2)
                step.changes.add().admit.CopyFrom(control.Admit(row=row, lane=lane))
                self.lanes.setdefault(lane, []).append(row)

    def _work(self, step: control.Step) -> None:
        if self.lanes and self.choices.random() < 0.6:
            step.decode.lane = self.choices.choice(sorted(self.lanes))
            for row in self.lanes[step.decode.lane]:
                self.held[row] += 1
            return
        for row in [row for row in self.held if self.held[row] < len(self.prompts[row])]:
            self._chunk(step, row, self.held[row], 0, 0)
        if self.waiting:
            row = self.waiting.pop(0)
            self._chunk(step, row, *self._reuse(self.prompts[row]), params.BLOCK)

    def _reuse(self, prompt: list[int]) -> tuple[int, int]:
        found = [(0, 0)]
        for prefix, tokens in self.kept.items():
            common = 0
            while common < min(len(tokens), len(prompt) - 1) and tokens[common] == prompt[common]:
                common += 1
            if common and (common == len(tokens) or not self.exact):
                found.append((common if self.exact else self.choices.randint(1, common), prefix))
        return max(found)

    def _chunk(self, step: control.Step, row: int, start: int, prefix: int, size: int) -> None:
        total = len(self.prompts[row])
        end = min(total, start + self.choices.randint(1, CHUNK))
        step.prefill.chunks.add(
            row=row, start=start, end=end, prompt_tokens=total, params_bytes=size, prefix=prefix
        )
        self.held[row] = end


PREFIX_FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "mamba2", "qwen3:4"]


def check_prefixes(family: str, tails: list[tuple[int, int]], choices: random.Random, size: int) -> int:
    """Rows share a system prompt, or go on with the answer of an earlier one. Returns the tokens reused."""
    prompts: dict[int, list[int]] = {}
    texts: dict[int, list[int]] = {}
    for row, (turn, length) in enumerate(tails, start=1):
        begin = prompt_of(family, 0, 14) if row < 3 or not turn else texts[row - turn]
        prompts[row] = begin + prompt_of(family, row, length)
        texts[row] = prompts[row] + expected(family, tuple(prompts[row]), 5)
    stages = stages_of(family, size)
    allowed = compute_thread(0).submit(lambda: support(stages[0].make_cache())).result(10)
    assert (allowed == control.PREFIX_SUPPORT_ANY) == (family in TRIMMABLE)
    steps = PrefixSteps(choices, prompts, texts, allowed != control.PREFIX_SUPPORT_ANY).make()
    done = run_on(stages, steps, {row: (prompt, RowParameters()) for row, prompt in prompts.items()})
    for row, got in done.answers.items():
        assert got[:5] == texts[row][len(prompts[row]) :][: len(got)]
    return sum(done.reused)


TRIMMABLE = {"llama", "qwen3", "mixtral", "deepseek_v3", "qwen3:4"}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("family", PREFIX_FAMILIES)
def test_kept_prefixes_are_reused(family: str, size: int) -> None:
    tails = [(0, 3), (0, 2), (1, 4), (0, 1), (2, 1), (0, 6), (1, 2), (0, 2)]
    reused = check_prefixes(family, tails, random.Random(7), size)
    assert reused >= 10


@pytest.mark.parametrize("family", PREFIX_FAMILIES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=4, max_size=8),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
)
def test_a_row_that_begins_with_a_kept_prefix_gives_the_same_tokens(
    family: str, tails: list[tuple[int, int]], choices: random.Random, size: int
) -> None:
    check_prefixes(family, tails, choices, size)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
    lanes=st.integers(1, 4),
    family=st.sampled_from(["llama", "gpt_oss", "gemma3_text", "qwen3:8", "qwen3:4"]),
)
def test_any_schedule_gives_the_same_tokens(
    lengths: list[tuple[int, int]], choices: random.Random, size: int, lanes: int, family: str
) -> None:
    numbered = dict(enumerate(lengths, start=1))
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in numbered.items()}
    cancelled: set[int] = set()
    answers = run(family, size, make_steps(choices, numbered, lanes, cancelled, parks=True), rows).answers
    for row, (_, tokens) in numbered.items():
        got = answers[row][:tokens]
        assert len(got) == tokens or row in cancelled
        assert got == expected(family, tuple(rows[row][0]), 21)[: len(got)]


def sampled_rows(
    family: str, lengths: dict[int, tuple[int, int]]
) -> dict[int, tuple[list[int], RowParameters]]:
    rows = {}
    for row, (length, _) in lengths.items():
        parameters = RowParameters(temperature=1.0, top_p=0.95, top_k=40 * (row % 2), min_p=0.01, seed=row)
        rows[row] = (prompt_of(family, row, length), parameters)
    return rows


def test_a_seed_gives_the_same_tokens_in_any_batch_lane_and_ring() -> None:
    lengths = {1: (5, 9), 2: (12, 7), 3: (3, 11), 4: (20, 5)}
    rows = sampled_rows("llama", lengths)
    alone = {}
    for row, length in lengths.items():
        steps = make_steps(random.Random(0), {1: length}, 1)
        alone[row] = run("llama", 1, steps, {1: rows[row]}).answers[1][: length[1]]
    assert len({tuple(tokens[:5]) for tokens in alone.values()}) == len(alone)
    for size in (1, 2, 3):
        answers = run(
            "llama", size, make_steps(random.Random(size + 5), lengths, 2, parks=True), rows
        ).answers
        for row, (_, tokens) in lengths.items():
            assert answers[row][:tokens] == alone[row], (size, row)


def demanding_rows(
    family: str, lengths: dict[int, tuple[int, int]]
) -> dict[int, tuple[list[int], RowParameters]]:
    """Every third row asks for nothing, the others for penalties, biases and log-probabilities."""
    rows = {}
    for row, (length, _) in lengths.items():
        prompt = prompt_of(family, row, length)
        size = 4 + row
        parameters = RowParameters(
            temperature=0.0 if row % 2 else 1.0,
            seed=row,
            repetition_penalty=1.5,
            repetition_context_size=size,
            prompt_tail=tuple(prompt[-size:]),
            presence_penalty=0.5 * (row % 4 - 1),
            frequency_penalty=0.75,
            logit_bias=tuple((token, 2.0) for token in range(70 * (row % 2))),
            logprobs=(0, None, 3, 20)[row % 4],
        )
        rows[row] = (prompt, parameters if row % 3 else RowParameters(temperature=1.0 * (row % 2), seed=row))
    return rows


def raw_logits(family: str, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of the whole model, after each token; float64 [tokens, vocabulary]."""
    logits = whole(family)(mx.array([tokens]))[0].astype(mx.float32)
    return np.array(logits).astype(np.float64)


def adjusted_by_hand(
    logits: np.ndarray[Any, np.dtype[np.float64]], row: RowParameters, prompt: list[int], answer: list[int]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    adjusted = logits.copy()
    for token, bias in row.logit_bias:
        adjusted[token] += bias
    for token in set([*prompt, *answer][-row.repetition_context_size :] if row.repeats else []):
        adjusted[token] *= row.repetition_penalty if adjusted[token] < 0 else 1 / row.repetition_penalty
    for token in set(answer):
        adjusted[token] -= answer.count(token) * row.frequency_penalty + row.presence_penalty
    return adjusted


def check_by_hand(
    family: str, prompt: list[int], row: RowParameters, answer: list[int], told: list[TokenLogprobs]
) -> None:
    """A row's answer against the whole model run over it once, one row, one token after the other."""
    logits = raw_logits(family, [*prompt, *answer])[len(prompt) - 1 : -1]
    assert len(told) == (0 if row.logprobs is None else len(answer))
    for index, token in enumerate(answer):
        adjusted = adjusted_by_hand(logits[index], row, prompt, answer[:index])
        if row.greedy:
            assert adjusted[token] >= adjusted.max() - 1e-3, index
        if row.logprobs is None:
            continue
        raw = logits[index] - np.logaddexp.reduce(logits[index])
        assert told[index].logprob == pytest.approx(raw[token], abs=1e-3)
        assert len(told[index].top) == row.logprobs
        for place, (each, logprob) in enumerate(told[index].top):
            assert logprob == pytest.approx(raw[each], abs=1e-3)
            assert logprob == pytest.approx(np.sort(raw)[::-1][place], abs=1e-3)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(2, 12)), min_size=2, max_size=7),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
    lanes=st.integers(1, 3),
    family=st.sampled_from(["llama", "gemma3_text"]),
)
def test_any_schedule_keeps_penalties_and_log_probabilities(
    lengths: list[tuple[int, int]], choices: random.Random, size: int, lanes: int, family: str
) -> None:
    numbered = dict(enumerate(lengths, start=1))
    rows = demanding_rows(family, numbered)
    cancelled: set[int] = set()
    sizes = {row: len(params.encode(parameters)) for row, (_, parameters) in rows.items()}
    steps = make_steps(choices, numbered, lanes, cancelled, sizes, parks=True)
    prompts = run(family, size, steps, rows)
    for row, length in numbered.items():
        prompt, parameters = rows[row]
        answer = prompts.answers[row]
        assert len(answer) >= length[1] or row in cancelled
        if answer:
            check_by_hand(family, prompt, parameters, answer, prompts.logprobs[row])
            steps = make_steps(random.Random(0), {1: (length[0], len(answer))}, 1, None, {1: sizes[row]})
            alone = run(family, 1, steps, {1: rows[row]})
            assert alone.answers[1][: len(answer)] == answer


def test_the_tokens_record_has_room_for_what_rows_ask_and_no_more() -> None:
    asks = {1: None, 2: 0, 3: 5}
    rows = {row: (prompt_of("llama", row, 4), RowParameters(logprobs=asked)) for row, asked in asks.items()}
    chunks = [
        control.Chunk(row=row, start=0, end=4, prompt_tokens=4, params_bytes=params.BLOCK) for row in rows
    ]
    joins = [control.Change(admit=control.Admit(row=row, lane=0)) for row in (3, 1, 2)]
    leaves = [control.Change(evict=control.Evict(row=3))]
    steps = [
        control.Step(number=1, prefill=control.Prefill(chunks=chunks[:1])),
        control.Step(number=2, prefill=control.Prefill(chunks=chunks[1:])),
        control.Step(number=3, changes=joins, decode=control.Decode(lane=0)),
        control.Step(number=4, changes=leaves, decode=control.Decode(lane=0)),
    ]
    ring = Ring(stages_of("llama", 2), Prompts(rows))
    try:
        for step in steps:
            ring.announce(step)
        ring.wait_for(4)
    finally:
        ring.close()
    seen = [(header.step, header.shape) for header in ring.links[1].seen]
    assert seen == [(1, (1,)), (2, (2 + 1 + 11,)), (3, (3 + 1 + 11,)), (4, (2 + 1,))]


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
    three = [compute_thread(rank).submit(make, *edge).result(30) for rank, edge in enumerate(edges)]
    one = [compute_thread(0).submit(make, 0, 5).result(30)]
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


@contextmanager
def lonely(rank: int, **options: Any) -> Iterator[tuple[Ring, Epoch]]:
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
            compute_thread(rank).submit(epoch.execute, resolved).result(10)
            if epoch.over:
                break
        (fault,) = ring.faults
        assert isinstance(fault, DeadlineExceeded)
        assert fault.reason == "RECORD_OVERDUE"
        assert epoch.announce(control.Step(number=3)) is None


def admit(row: int, lane: int = 0) -> control.Change:
    return control.Change(admit=control.Admit(row=row, lane=lane))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_end_wakes_a_compute_loop_that_waits(rank: int) -> None:
    with lonely(rank) as (ring, epoch):
        first = epoch.announce(prefill(1))
        second = epoch.announce(control.Step(number=2, changes=[admit(1)], decode=control.Decode(lane=0)))
        assert first is not None
        assert second is not None
        compute_thread(rank).submit(epoch.execute, first)
        waiting = compute_thread(rank).submit(epoch.execute, second)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        epoch.end()
        waiting.result(5)
        assert not ring.faults


@settings(max_examples=10, deadline=None, derandomize=True)
@given(choices=st.randoms(use_true_random=False), size=st.integers(1, 3), patience=st.floats(0, 0.1))
def test_an_epoch_may_end_at_any_time(choices: random.Random, size: int, patience: float) -> None:
    lengths = {row: (choices.randint(1, 20), choices.randint(1, 9)) for row in range(1, 6)}
    rows = {row: (prompt_of("llama", row, length), RowParameters()) for row, (length, _) in lengths.items()}
    ring = Ring(stages_of("llama", size), Prompts(rows))
    for step in make_steps(choices, lengths, 2):
        ring.announce(step)
    time.sleep(patience)
    ring.close()
    assert not ring.faults
    assert not [thread for thread in threading.enumerate() if thread.name in ("outbox", "inbox")]
    for row, (_, tokens) in lengths.items():
        got = ring.prompts.answers[row][:tokens]
        assert got == expected("llama", tuple(rows[row][0]), 21)[: len(got)]


def test_the_end_of_a_channel_is_a_fault() -> None:
    with lonely(1) as (ring, epoch):
        resolved = epoch.announce(prefill(1))
        assert resolved is not None
        ring.links[0].records.put(None)
        compute_thread(1).submit(epoch.execute, resolved).result(10)
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
        compute_thread(0).submit(lambda: None).result(10)
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
    """Whatever it reckons: each member goes by what it offers itself."""
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


def test_rows_hold_memory_until_they_go_and_evictions_are_told() -> None:
    lengths = dict.fromkeys((1, 2, 3), 4)
    prompts = Prompts({row: ([1, 2, 3, 4], RowParameters()) for row in lengths})
    ring = Ring(stages_of("llama", 1), prompts)
    epoch = ring.epochs[0]
    try:
        for row in lengths:
            ring.announce(prefill(row, row=row))
        ring.wait_for(3)
        three = compute_thread(0).submit(lambda: epoch.cache_bytes).result(10)
        changes = [admit(1), admit(2), control.Change(evict=control.Evict(row=3))]
        ring.announce(control.Step(number=4, changes=changes, decode=control.Decode(lane=0)))
        ring.wait_for(4)
        assert 0 < compute_thread(0).submit(lambda: epoch.cache_bytes).result(10) <= three
        changes = [control.Change(evict=control.Evict(row=row)) for row in (1, 2)]
        ring.announce(control.Step(number=5, changes=changes))
        assert compute_thread(0).submit(lambda: epoch.cache_bytes).result(10) == 0
        assert prompts.forgotten == [3, 1, 2]
        assert epoch.steps == 5
        # a prompt of several tokens is filled up to its last one, then sampled; each has times of its own
        assert sorted(times.step for times in epoch.trace) == [1, 1, 2, 2, 3, 3, 4]
        assert all(t.started <= t.fed <= t.launched <= t.ready <= t.sent for t in epoch.trace)
    finally:
        ring.close()


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
                until = time.monotonic() + 20
                while working[-1] not in found and time.monotonic() < until:
                    found = {one.step for one in epoch.spans(0).spans if one.activity == activity}
                assert found == set(working)
    finally:
        ring.close()
