"""Rings of real stages in one process, joined by queues, of small models of many families."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from patience import PATIENCE_SECONDS
from small_models import tiny

from sealring.mesh.crypto import Suite
from sealring.mesh.errors import EpochEnded, SealringError
from sealring.mesh.ring import MAX_UNSETTLED, Change, Chunk, Composition, Eviction, ResolvedStep
from sealring.node.engine import (
    Accelerator,
    Allowance,
    Asking,
    Grammars,
    Prefixes,
    RowParameters,
    RowSeal,
    StageEpoch,
    TokenLogprobs,
    Transfer,
    asking_of,
    borders_of,
    compute_in_batches,
    params,
    seat_of,
    support,
)
from sealring.node.engine.drafts import Drafter, GuessesAhead, ModelAtHead, Proposed, Sources, TailDrafter
from sealring.node.engine.staging import Prefill, ShardSpec, Stage, random_model, random_stage, share
from sealring.node.engine.text import Picture
from sealring.node.engine.vision.tower import Tower
from sealring.node.engine.warm_up import warm_up
from sealring.node.wire.channel import RecordHeader
from sealring.v1 import control_pb2 as control

SEED = 7
ROW_KEY = bytes([Suite.X25519_AES256GCM.code]) + bytes(range(32))
FREE_PLACES = (control.StepTime(rows=1, tokens=1, microseconds=1),)
"""Times of a stage whose steps take as long with any number of rows: it leaves places of lanes empty."""

CHUNK = 8
MAX_ROWS = 64
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "num_hidden_layers": 5, "intermediate_size": 96, "vocab_size": 300},
    "llama:sliding": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 300,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen2": {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300},
    "qwen3": {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300},
    "gemma3_text": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "vocab_size": 300,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
    "gpt_oss": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_local_experts": 4,
        "vocab_size": 300,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mixtral": {"num_hidden_layers": 4},
    "mamba2": {"vocab_size": 300},
    "deepseek_v3": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "vocab_size": 300,
    },
    "afm7": {"hidden_dim": 64, "num_layers": 4, "num_hidden_layers": 4, "num_kv_reuse_layers": 2},
    "dbrx": {
        "num_hidden_layers": 4,
        "d_model": 64,
        "n_heads": 4,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "vocab_size": 300,
    },
}
"""What makes a configuration of tests/data/archs.json smaller, or its window short enough to slide."""

QUANTIZED = ["qwen3:8", "qwen3:4", "gemma3_text:8", "llama:sliding:4"]
"""Families, each with the bits of its quantized caches."""

UNUSUAL = ["gemma4", "gemma3n", "afm7", "minimax_m3_vl", "nemotron-nas", "kimi_k3", "deepseek_v41"]
"""They hand on more than one state, or have caches of their own making."""

FAMILIES = [*(family for family in SMALL if family not in ("llama:sliding", "afm7")), *QUANTIZED]


def combinations(
    families: Iterable[str], sizes: Iterable[int], *, always: Iterable[tuple[str, int]]
) -> list[Any]:
    """Pairs of a family and a number of members; those not for every run are marked as a sweep."""
    wanted = set(always)
    return [
        pytest.param(family, size, marks=[pytest.mark.sweep] * ((family, size) not in wanted))
        for family in families
        for size in sizes
    ]


@cache
def compute_thread(rank: int) -> ThreadPoolExecutor:
    """The thread of one member, for all tests: mlx's streams and their arrays belong to a thread."""
    return ThreadPoolExecutor(1, f"compute-{rank}", initializer=_as_in_an_engine)


def _as_in_an_engine() -> None:
    compute_in_batches()
    mx.set_default_device(mx.cpu)


class Carrying(Accelerator):
    """A device whose records go by a transfer of the test's."""

    def __init__(self, made: Transfer) -> None:
        self._made = made

    def transfer(self) -> Transfer:
        return self._made


class Link:
    """A directed edge: what is sent comes out in order."""

    def __init__(self) -> None:
        self.records: SimpleQueue[tuple[RecordHeader, bytes] | None] = SimpleQueue()
        self.seen: list[RecordHeader] = []
        self.awaited = threading.Event()


class MemoryReceived:
    def __init__(self, header: RecordHeader, data: bytes) -> None:
        self.header = header
        self.data = memoryview(data)

    def release(self) -> None:
        self.data.release()


class MemoryChannel:
    """As node.wire.channel.EngineChannel, and as strict about what was announced."""

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
        self._incoming.awaited.set()
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


def prefixes_of(stage: Stage) -> Prefixes:
    return Prefixes(support(stage.prefill.make_cache()))


def runs_in(stage: Stage, size: int) -> int:
    """Runs of drafts that a stage takes back."""
    return stage.draft_runs(size)


def sources_of(rank: int, size: int, drafter: Drafter | None, tail: TailDrafter | None) -> Sources:
    """The sources of drafts of a member."""
    workers = {control.DRAFT_SOURCE_MODEL: ModelAtHead(drafter)} if drafter is not None and rank == 0 else {}
    ahead = tail.facts.source if tail is not None else control.DRAFT_SOURCE_UNSPECIFIED
    return Sources(workers, tail if rank == size - 1 else None, ahead)


def seals_of(stages: Sequence[Stage]) -> dict[int, RowSeal]:
    """The seals of a pipeline's head and tail, by rank, where members are in between."""
    size = len(stages)
    if size < 3 or isinstance(stages[0].spec, ShardSpec):
        return {}
    seals = {rank: RowSeal(seals=not rank) for rank in (0, size - 1)}
    for seal in seals.values():
        seal.take(ROW_KEY)
    return seals


class _Text:
    """Drafts of a row that a test makes."""

    def __init__(self, looked_up: Callable[[int, int], list[int]]) -> None:
        self._looked_up = looked_up

    def propose(self, last: int, count: int) -> Proposed:
        return Proposed(self._looked_up(last, MAX_UNSETTLED))


class Prompts:
    """The head's text side without text."""

    def __init__(self, rows: dict[int, tuple[list[int], RowParameters]]) -> None:
        self._rows = rows
        self.apart = False
        self.answers: dict[int, list[int]] = {row: [] for row in rows}
        self.logprobs: dict[int, list[TokenLogprobs]] = {row: [] for row in rows}
        self.steps: list[int] = []
        self.without_tokens: list[int] = []
        self.refuted: set[int] = set()
        self.forgotten: list[int] = []
        self.reused: list[int] = []
        self.over: set[int] = set()
        self.images: dict[int, Sequence[Picture]] = {}
        self.failed: dict[int, SealringError] = {}
        self.delivered = threading.Condition()
        self.guess: Callable[[int, int], list[int]] = lambda last, count: [last] * count
        self.modelled = {
            row: GuessesAhead(np.array(prompt, np.uint32), b"scope") for row, (prompt, _) in rows.items()
        }

    def add(self, row: int, prompt: list[int], parameters: RowParameters) -> None:
        """Opens another row."""
        self._rows[row] = prompt, parameters
        self.answers[row], self.logprobs[row] = [], []
        self.modelled[row] = GuessesAhead(np.array(prompt, np.uint32), b"scope")

    def source(self, row: int, source: control.DraftSource.ValueType) -> Any:
        text = _Text(partial(self.looked_up, row))
        return text if source == control.DRAFT_SOURCE_LOOKUP else self.modelled.get(row)

    def looked_up(self, row: int, last: int, count: int) -> list[int]:
        """Drafts of a chain behind the row's `last` token."""
        return self.guess(last, count)

    def gone(self, row: int) -> bool:
        return row not in self._rows

    def prompt(self, row: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array(self._rows[row][0], np.uint32)

    def parameters(self, row: int) -> bytes:
        return params.encode(self._rows[row][1], apart=self.apart)

    def ended(self, row: int) -> bool:
        return row in self.over

    def pictures(self, row: int) -> Sequence[Picture]:
        return self.images.get(row, ())

    def fail(self, row: int, error: SealringError) -> None:
        self.failed[row] = error

    def prefilled(self, row: int) -> None: ...

    def begin(self, chunk: Chunk) -> None:
        if chunk.prefix:
            self.reused.append(chunk.start)

    def change(self, change: Change) -> None:
        if isinstance(change, Eviction):
            self.forgotten.append(change.row)

    def asking(self, rows: Sequence[int], *, first: bool) -> Asking:
        asked = [self._rows[row][1] for row in rows]
        scored = (max(0, len(each.scored) - 1) * first for each in asked)
        return asking_of((each.logprobs for each in asked), scored)

    def deliver(
        self,
        step: ResolvedStep,
        tokens: list[int],
        logprobs: Mapping[int, TokenLogprobs],
        *,
        refuted: bool = False,
    ) -> None:
        with self.delivered:
            self.refuted |= {step.number} if refuted else set()
            (self.steps if step.sampled or step.drafts else self.without_tokens).append(step.number)
            for index, (row, token) in enumerate(zip(step.sampled, tokens, strict=True)):
                self.answers[row].append(token)
                self.modelled[row].heard(token)
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
        deadline: float = PATIENCE_SECONDS,
        allowance: Allowance = Allowance(1, 1, 1 << 40),
        number: int = 1,
        prefixes: list[Prefixes] | None = None,
        grammars: Grammars | None = None,
        speculate: bool = True,
        drafter: Drafter | None = None,
        tail_drafter: TailDrafter | None = None,
        tower: Tower | None = None,
        chunk: int = CHUNK,
    ) -> None:
        size = len(stages)
        links = [Link() for _ in stages]
        self.links = links
        self.faults: list[BaseException] = []
        self.failed = threading.Event()
        self.prompts = prompts
        self.seals = seals_of(stages)
        prompts.apart = bool(self.seals)
        self.prefixes = prefixes or [
            compute_thread(rank).submit(prefixes_of, stage).result(PATIENCE_SECONDS)
            for rank, stage in enumerate(stages)
        ]
        sources = [
            sources_of(rank, size, drafter, tail_drafter) if speculate else None for rank in range(size)
        ]
        self.epochs = [
            StageEpoch(
                number,
                Composition(epoch=number, max_rows=MAX_ROWS, prefill_chunk=chunk),
                stage,
                partial(
                    seat_of,
                    stage,
                    channel=MemoryChannel(links[rank], links[rank - 1]) if size > 1 else None,
                    prompts=prompts if rank == 0 else None,
                    grammars=grammars,
                    sources=sources[rank],
                    tower=tower if rank == 0 else None,
                    borders=compute_thread(rank).submit(borders_of, stage).result(PATIENCE_SECONDS),
                    deadline=deadline,
                ),
                allowance=allowance,
                prefixes=self.prefixes[rank],
                sources=sources[rank],
                seal=self.seals.get(rank),
                runs=compute_thread(rank).submit(runs_in, stage, size).result(PATIENCE_SECONDS),
                times=FREE_PLACES if rank % 2 else (),
                on_fault=self._fault,
            )
            for rank, stage in enumerate(stages)
        ]

    def announce(self, step: control.Step) -> None:
        for rank, epoch in enumerate(self.epochs):
            resolved = epoch.announce(step)
            if resolved is not None:
                compute_thread(rank).submit(epoch.execute, resolved)

    def wait_for(self, step: int) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        with self.prompts.delivered:
            while step not in self.prompts.steps and not self.faults:
                assert time.monotonic() < until
                self.prompts.delivered.wait(0.2)
        assert not self.faults, self.faults

    def wait_for_fault(self) -> None:
        assert self.failed.wait(PATIENCE_SECONDS)

    def _fault(self, error: BaseException) -> None:
        self.faults.append(error)
        self.failed.set()

    def break_off(self) -> None:
        """A link fails, everywhere."""
        for epoch in self.epochs:
            epoch.fail(EpochEnded("a link broke"))
        self.faults.clear()

    def close(self) -> None:
        for epoch in self.epochs:
            epoch.end()
        for rank, epoch in enumerate(self.epochs):
            compute_thread(rank).submit(epoch.close).result(PATIENCE_SECONDS)


def free() -> None:
    """In the threads that made it: else mlx aborts when the interpreter ends."""
    stages_of.cache_clear()
    doubled_stages_of.cache_clear()
    gc.collect()
    for rank in range(4):
        compute_thread(rank).submit(mx.synchronize).result(PATIENCE_SECONDS)
        compute_thread(rank).submit(mx.clear_streams).result(PATIENCE_SECONDS)
        compute_thread(rank).shutdown()
    compute_thread.cache_clear()  # a later test begins other threads


@cache
def config_of(family: str) -> dict[str, Any]:
    data = Path(__file__).parents[1] / "data"
    archs = {
        key: config
        for file in ("archs.json", "archs-more.json")
        for key, config in json.loads((data / file).read_bytes()).items()
    }
    name, _ = kv_bits_of(family)
    return (tiny(archs[name], name) if name in UNUSUAL else archs[name]) | SMALL.get(name, {})


def kv_bits_of(family: str) -> tuple[str, int]:
    name, _, bits = family.rpartition(":")
    return (name, int(bits)) if family in QUANTIZED else (family, 0)


def setting(family: str, name: str) -> int:
    """A number of a configuration, or of the text model in it."""
    config = config_of(family)
    found = config.get(name) or config["text_config"][name]
    assert isinstance(found, int)
    return found


@cache
def stages_of(family: str, size: int) -> list[Stage]:
    return made_stages(config_of(family), setting(family, "num_hidden_layers"), size, kv_bits_of(family)[1])


def made_stages(
    config: dict[str, Any], layers: int, size: int, kv_bits: int = 0, seed: int = SEED
) -> list[Stage]:
    edges = [layers * rank // size for rank in range(size + 1)]

    def make(lo: int, hi: int) -> Stage:
        stage = random_stage(config, lo, hi, seed=seed, kv_bits=kv_bits)
        warm_up(stage, 512)
        return stage

    made = [compute_thread(rank).submit(make, *edges[rank : rank + 2]) for rank in range(size)]
    return [stage.result(PATIENCE_SECONDS) for stage in made]


@cache
def doubled_stages_of(family: str, prompts: tuple[int, ...], answers: tuple[int, ...]) -> list[Stage]:
    """The stages of a ring that cuts a model there for prompts, and there for answers."""
    config, (_, bits) = config_of(family), kv_bits_of(family)
    layers = setting(family, "num_hidden_layers")
    ranges = zip(pairwise([0, *prompts, layers]), pairwise([0, *answers, layers]), strict=True)

    def make(computes: tuple[int, int], decodes: tuple[int, int]) -> Stage:
        stage = random_stage(config, *decodes, seed=SEED, kv_bits=bits)
        prefill = random_stage(config, *computes, seed=SEED, kv_bits=bits, cut=Prefill)
        assert isinstance(prefill, Prefill)
        share(prefill, stage)
        for each in (prefill, stage):
            warm_up(each, 512)
        prefill.pair(stage)
        return stage

    made = [compute_thread(rank).submit(make, *both) for rank, both in enumerate(ranges)]
    return [stage.result(PATIENCE_SECONDS) for stage in made]


@cache
def whole(family: str) -> Any:
    model = random_model(config_of(family), seed=SEED)
    mx.eval(model.parameters())
    return model


@cache
def expected(family: str, prompt: tuple[int, ...], tokens: int = 12) -> list[int]:
    """Greedy tokens of mlx-lm's whole model alone.

    By its `__call__` and its caches, as `mlx_lm.generate` calls them, whose import of transformers takes more
    than a second of a processor.
    """
    from mlx_lm.models.cache import make_prompt_cache

    model = whole(family)
    caches = quantized_prompt_cache(family) if family in QUANTIZED else make_prompt_cache(model)
    given, answer = mx.array([prompt], mx.uint32), list[int]()
    if len(prompt) > 1:
        mx.eval(model(given[:, :-1], cache=caches))
    given = given[:, -1:]
    while len(answer) < tokens:
        given = mx.argmax(model(given, cache=caches)[:, -1], axis=-1, keepdims=True).astype(mx.uint32)
        answer.append(int(given.item()))  # type: ignore[arg-type]
    return answer


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
    return [choices.randrange(setting(family, "vocab_size")) for _ in range(length)]


def run(
    family: str, size: int, steps: list[control.Step], rows: dict[int, tuple[list[int], RowParameters]]
) -> Prompts:
    return run_on(stages_of(family, size), steps, rows)


def sampling(steps: list[control.Step]) -> list[int]:
    """The numbers of those that bring tokens."""
    composition = Composition(epoch=1, max_rows=MAX_ROWS, prefill_chunk=CHUNK)
    return [step.number for step in map(composition.apply, steps) if step.sampled]


def run_on(
    stages: list[Stage],
    steps: list[control.Step],
    rows: dict[int, tuple[list[int], RowParameters]],
    grammars: Grammars | None = None,
) -> Prompts:
    prompts = Prompts(rows)
    ring = Ring(stages, prompts, grammars=grammars)
    try:
        for step in steps:
            ring.announce(step)
        expected_steps = sampling(steps)
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
