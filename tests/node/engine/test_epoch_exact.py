"""Rows with drafts, beside others, evicted, kept, begun with what was kept and begun again in later epochs:
each answer is the one that the row would have alone and without drafts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stagering import (
    CHUNK,
    PATIENCE_SECONDS,
    Prompts,
    Ring,
    compute_thread,
    config_of,
    doubled_stages_of,
    kv_bits_of,
    prompt_of,
    setting,
    stages_of,
)

from sealring.mesh.ring import MAX_DRAFTED, MAX_UNSETTLED
from sealring.node.engine import RowParameters, params, support
from sealring.node.engine.drafts import Drafter
from sealring.node.engine.staging import random_stage
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

SIZE, LANES, LONGEST = 2, 3, 26
KNOWN = LONGEST + 40
"""Tokens of an answer that are known beforehand: more than runs under way may bring."""

PROMPTS = 4
SAMPLINGS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 5},
    "penalties": {
        "temperature": 0.8,
        "seed": 9,
        "repetition_penalty": 1.4,
        "repetition_context_size": 12,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
}
FAMILIES = ["llama", "qwen3:8", "gemma3_text", "gpt_oss", "llama4", "mamba2", "deepseek_v3", "kimi_k3"]
"""Keys and values, those in 8 bits, windows, windows beside keys, chunks, states, latents, and several of
these."""


def prompt(family: str, number: int) -> list[int]:
    """Prompts of which each begins with half of the one before."""
    begin = prompt(family, number - 1)[: 9 * number] if number else []
    return [*begin, *prompt_of(family, number, 18)]


def parameters(name: str, prompt: list[int], answered: list[int]) -> RowParameters:
    return params.from_sampling(inference.Sampling(**SAMPLINGS[name]), prompt, answered)


@cache
def alone(family: str, number: int, name: str) -> list[int]:
    """The answer of a row that is alone and has no drafts."""
    text = prompt(family, number)
    prompts = Prompts({1: (text, parameters(name, text, []))})
    ring = Ring(stages_of(family, SIZE), prompts)
    try:
        for begin in range(0, len(text), CHUNK):
            end, size = min(begin + CHUNK, len(text)), 0 if begin else len(prompts.parameters(1))
            chunk = control.Chunk(row=1, start=begin, end=end, prompt_tokens=len(text), params_bytes=size)
            ring.announce(control.Step(number=1 + begin // CHUNK, prefill=control.Prefill(chunks=[chunk])))
        first = 1 + -(-len(text) // CHUNK)
        for step in range(first, first + KNOWN):
            admit = [control.Change(admit=control.Admit(row=1, lane=0))] * (step == first)
            ring.announce(control.Step(number=step, changes=admit, decode=control.Decode(lane=0)))
            if step % 8 == 0:
                ring.wait_for(step)
        ring.wait_for(step)
    finally:
        ring.close()
    return prompts.answers[1]


@cache
def draft_model(family: str) -> Drafter:
    """The ring's own model: what it guesses is right, unless its caches are not those of the row's tokens."""
    layers, bits = setting(family, "num_hidden_layers"), kv_bits_of(family)[1]

    def make() -> Drafter:
        stage = random_stage(config_of(family), 0, layers, seed=7, kv_bits=bits)
        times = [control.StepTime(rows=1, tokens=tokens, microseconds=50 * tokens) for tokens in (1, 8, 64)]
        return Drafter(stage, setting(family, "vocab_size"), 400, times)

    return compute_thread(0).submit(make).result(PATIENCE_SECONDS)


class Guessing(Prompts):
    """A head whose drafts of each row are right with a probability of its own."""

    def __init__(self) -> None:
        super().__init__({})
        self.coming: dict[int, list[int]] = {}
        self.right: dict[int, float] = {}
        self.words = 0
        self._choices = random.Random(1)

    def looked_up(self, row: int, last: int, count: int) -> list[int]:
        answer = self.answers[row]
        assert last == answer[-1]
        coming = [*self.coming[row][len(answer) :], *[0] * count][:count]
        right = self.right[row]
        return [one if self._choices.random() < right else (one + 1) % self.words for one in coming]


@dataclass
class Row:
    """A row of the epoch. `prompt` has what was answered in earlier epochs at its end."""

    number: int
    name: str
    asked: int
    prompt: list[int]
    before: list[int]
    done: int = 0
    lane: int | None = None
    marks: list[int] = field(default_factory=list)


@dataclass
class Chain:
    """Runs of drafts of one row since it was settled; `under_way` are steps with the tokens they compute."""

    row: Row
    source: control.DraftSource.ValueType
    begun: int
    computed: int = 0
    broken: bool = False
    under_way: deque[tuple[int, int]] = field(default_factory=deque)


LOOKED_UP = control.DRAFT_SOURCE_LOOKUP
sources = st.sampled_from([LOOKED_UP, control.DRAFT_SOURCE_MODEL])
picks = st.integers(0, 1 << 16).map(random.Random)
"""Choices that hypothesis does not see: their number depends on what has come back at that time."""


class Gateway(RuleBasedStateMachine):
    """Announces steps as a gateway may, in an order that hypothesis chooses."""

    def __init__(self, family: str, doubled: bool = False) -> None:
        """`doubled`: prompts are computed by another cut than answers."""
        super().__init__()
        self.family, self.doubled = family, doubled
        layers = setting(family, "num_hidden_layers")
        self.stages = doubled_stages_of(family, (layers - 1,), (1,)) if doubled else stages_of(family, SIZE)
        allowed = compute_thread(0).submit(lambda: support(self.stages[0].prefill.make_cache()))
        self.cuts = allowed.result(PATIENCE_SECONDS) == control.PREFIX_SUPPORT_ANY
        self.epoch, self.rows_made, self.prefixes_made = 0, 0, 0
        self.waiting: list[tuple[str, int, list[int]]] = []
        self.kept: dict[int, tuple[list[int], list[int]]] = {}
        self.origins: dict[tuple[int, int, int], list[int]] = {}
        self.begin_epoch()

    @invariant()
    def acted(self) -> None:
        self.acts += 1

    # Epochs

    def begin_epoch(self) -> None:
        self.epoch += 1
        earlier = self.ring.prefixes if self.epoch > 1 else None
        self.prompts = Guessing()
        self.prompts.words = setting(self.family, "vocab_size")
        model = draft_model(self.family)
        self.ring = Ring(self.stages, self.prompts, number=self.epoch, prefixes=earlier, drafter=model)
        self.number = self.acts = 0
        self.rows: dict[int, Row] = {}
        self.lanes: dict[int, list[Row]] = {}
        self.chains: dict[int, Chain] = {}
        self.plain: list[int] = []  # steps without drafts under way
        self.changes: list[control.Change] = []

    @rule(adopts=st.booleans())
    @precondition(lambda self: self.acts > 6)
    def end_epoch(self, adopts: bool) -> None:
        """A link breaks, mostly behind runs that are not settled; unfinished rows begin again.

        Only prefixes that all members have kept go on, as a gateway decides it: a member may not have come to
        the last `Keep`. What is under way has ended, so that the same choices give the same machine.
        """
        self.wait()
        self.ring.break_off()
        self.ring.close()
        self.check()
        unfinished = [
            (row.name, row.asked, row.before + self.prompts.answers[number])
            for number, row in self.rows.items()
        ]
        self.waiting += [one for one in unfinished if len(one[2]) < LONGEST]
        origins = [each.turn_over("") for each in self.ring.prefixes]
        common = [each for each in origins[0] if all(each in other for other in origins)]
        earlier, self.kept = self.origins, {}
        self.origins = {}
        self.begin_epoch()
        for origin in common:
            if adopts and tuple(origin) in earlier:
                self.prefixes_made += 1
                adopt = control.Adopt(prefix=self.prefixes_made, **origin._asdict())
                self.changes.append(control.Change(adopt=adopt))
                text = earlier[tuple(origin)]
                self.kept[self.prefixes_made] = text, [len(text)]
                self.origins[tuple(origin)] = text

    def teardown(self) -> None:
        try:
            self.settle_all()
            self.check()
        finally:
            self.ring.close()
            for each in self.ring.prefixes:
                each.clear()
        assert not self.ring.faults
        assert not draft_model(self.family).failed

    # Steps

    def announce(self, **work: Any) -> int:
        self.number += 1
        kinds = ("adopt", "settle", "keep", "drop", "admit", "evict")
        order = {kind: max(1, place) if place < 2 else 2 + (place > 3) for place, kind in enumerate(kinds)}
        order["adopt"] = 0
        self.changes.sort(key=lambda change: order[str(change.WhichOneof("change"))])
        self.ring.announce(control.Step(number=self.number, changes=self.changes, **work))
        self.changes = []
        return self.number

    def wait(self) -> None:
        """Waits for all that is under way."""
        for step in self.plain:
            self.ring.wait_for(step)
        self.plain = []
        for chain in self.chains.values():
            while chain.under_way:
                self.wait_for_run(chain)

    def wait_for_run(self, chain: Chain) -> None:
        step, computed = chain.under_way.popleft()
        self.ring.wait_for(step)
        few = len(self.prompts.answers[chain.row.number]) < chain.begun + computed
        chain.broken |= few or step in self.prompts.refuted

    def settle(self, row: Row) -> None:
        """Ends the row's chain with the next step, and those of the rows beside it in its lane."""
        for other in self.lanes[row.lane] if row.lane is not None else ():
            self.settle_one(other)

    def settle_one(self, row: Row) -> None:
        chain = self.chains.get(row.number)
        if chain is None:
            return
        while chain.under_way:
            self.wait_for_run(chain)
        del self.chains[row.number]
        tokens = len(row.prompt) + len(self.prompts.answers[row.number]) - 1
        self.changes.append(control.Change(settle=control.Settle(row=row.number, tokens=tokens)))

    def settle_all(self) -> None:
        self.wait()
        for row in list(self.rows.values()):
            self.settle(row)
        if self.changes:
            self.announce()

    def finished(self, row: Row) -> bool:
        return len(row.before) + len(self.prompts.answers[row.number]) >= LONGEST

    def text(self, row: Row) -> list[int]:
        return row.prompt + self.prompts.answers[row.number]

    def check(self) -> None:
        for number, row in self.rows.items():
            answer = row.before + self.prompts.answers[number]
            wanted = alone(self.family, row.asked, row.name)
            assert answer[:LONGEST] == wanted[: len(answer)][:LONGEST], (row.name, row.asked)

    # Rules

    @initialize(
        names=st.lists(st.sampled_from(sorted(SAMPLINGS)), min_size=2, max_size=2),
        pick=picks,
    )
    def begin(self, names: list[str], pick: random.Random) -> None:
        for lane, name in enumerate(names):
            self.open(name, pick.randrange(PROMPTS), 0.8, True, lane, pick)

    @rule(
        name=st.sampled_from(sorted(SAMPLINGS)),
        asked=st.integers(0, PROMPTS - 1),
        right=st.sampled_from([0.9, 1.0, 0.6, 0.0]),
        whole=st.booleans(),
        lane=st.integers(0, LANES - 1),
        pick=picks,
    )
    @precondition(lambda self: len(self.rows) < 4)
    def open(self, name: str, asked: int, right: float, whole: bool, lane: int, pick: random.Random) -> None:
        """A row begins, with a kept prefix if there is one; one of an earlier epoch first."""
        before: list[int] = []
        if self.waiting:
            name, asked, before = self.waiting.pop()
        text = prompt(self.family, asked)
        self.rows_made += 1
        row = Row(self.rows_made, name, asked, text + before, before)
        self.prompts.add(row.number, row.prompt, parameters(name, text, before))
        self.prompts.coming[row.number] = alone(self.family, asked, name)[len(before) :]
        self.prompts.right[row.number] = right
        self.rows[row.number] = row
        start, prefix = pick.choice(self.reusable(row.prompt))
        if prefix and self.cuts:
            start = pick.randint(1, start)
        row.done = start
        row.marks = [mark for mark in self.kept[prefix][1] if mark <= start] if prefix else []
        self.prefill(row, pick.randint(1, CHUNK), prefix)
        while row.done < len(row.prompt) and (whole or pick.random() < 0.5):
            if pick.random() < 0.3:
                self.keep_of(row, pick)
            self.prefill(row, pick.randint(1, CHUNK))
        if row.done == len(row.prompt):
            self.join(row, lane)

    def reusable(self, text: list[int]) -> list[tuple[int, int]]:
        found = []
        for prefix, (tokens, marks) in self.kept.items():
            common = 0
            while common < min(len(tokens), len(text) - 1) and tokens[common] == text[common]:
                common += 1
            lengths = [common] * (common > 0) if self.cuts else [one for one in marks if one <= common]
            found += [(length, prefix) for length in lengths]
        return found or [(0, 0)]

    def prefill(self, row: Row, part: int, prefix: int = 0) -> None:
        first, end = not row.done or prefix, min(len(row.prompt), row.done + part)
        chunk = control.Chunk(
            row=row.number,
            start=row.done,
            end=end,
            prompt_tokens=len(row.prompt),
            params_bytes=len(self.prompts.parameters(row.number)) if first else 0,
            prefix=prefix,
        )
        step = self.announce(prefill=control.Prefill(chunks=[chunk]))
        row.done = end
        if end == len(row.prompt):
            self.plain.append(step)

    @rule(lane=st.integers(0, LANES - 1), pick=picks)
    def go_on(self, lane: int, pick: random.Random) -> None:
        """A prompt is computed to its end."""
        begun = [row for row in self.rows.values() if row.lane is None]
        if not begun:
            return
        row = pick.choice(begun)
        while row.done < len(row.prompt):
            self.prefill(row, pick.randint(1, CHUNK))
        self.join(row, lane)

    def join(self, row: Row, lane: int) -> None:
        """The row joins a lane, which may have a row with drafts."""
        self.wait()
        for other in self.lanes.get(lane, ()):
            self.settle(other)
        self.changes.append(control.Change(admit=control.Admit(row=row.number, lane=lane)))
        row.lane = lane
        self.lanes.setdefault(lane, []).append(row)
        self.step(lane, 1)

    def step(self, lane: int, count: int) -> None:
        for _ in range(count):
            self.plain.append(self.announce(decode=control.Decode(lane=lane)))

    @rule(count=st.integers(1, 3), pick=picks)
    def decode(self, count: int, pick: random.Random) -> None:
        """Steps without drafts, announced ahead."""
        if not self.lanes:
            return
        lane = pick.choice(sorted(self.lanes))
        for row in self.lanes[lane]:
            self.settle(row)
        self.step(lane, count)
        self.wait()

    def single(self) -> list[Row]:
        rows = [rows[0] for rows in self.lanes.values() if len(rows) == 1]
        return [row for row in rows if not self.finished(row)]

    @rule(drafts=st.integers(1, 6), runs=st.integers(2, 9), pick=picks)
    def draft(self, drafts: int, runs: int, pick: random.Random) -> None:
        """Drafts that are right by chance."""
        self.chain_on(drafts, runs, pick, source=LOOKED_UP)

    @rule(drafts=st.integers(1, 6), runs=st.integers(2, 9), pick=picks)
    def model(self, drafts: int, runs: int, pick: random.Random) -> None:
        """Drafts of a draft model."""
        self.chain_on(drafts, runs, pick, source=control.DRAFT_SOURCE_MODEL)

    def chain_on(
        self, drafts: int, runs: int, pick: random.Random, *, source: control.DraftSource.ValueType
    ) -> None:
        """Runs of rows that are alone in their lanes, behind those under way if these may still be right."""
        for step in self.plain:
            self.ring.wait_for(step)
        self.plain = []
        for _ in range(runs):
            if rows := self.single():
                self.run(pick.choice(rows), drafts, source, fresh=pick.random() < 0.1)

    @rule(drafts=st.integers(1, 7), source=sources, pick=picks)
    @precondition(lambda self: self.cuts)
    def together(self, drafts: int, source: control.DraftSource.ValueType, pick: random.Random) -> None:
        """Drafts of all rows of a lane in one step; the next step settles them."""
        self.wait()
        lanes = [lane for lane, rows in self.lanes.items() if len(rows) > 1]
        lanes = [lane for lane in lanes if not any(map(self.finished, self.lanes[lane]))]
        if not lanes:
            return
        lane = pick.choice(lanes)
        rows = self.lanes[lane]
        self.settle(rows[0])
        drafts = min(drafts, MAX_DRAFTED // len(rows) - 1)
        work = control.Decode(lane=lane, drafts=drafts, source=source, asks=source > LOOKED_UP)
        begun = [len(self.prompts.answers[row.number]) for row in rows]
        step = self.announce(decode=work)
        for row, answered in zip(rows, begun, strict=True):
            under_way = deque([(step, 1 + drafts)])
            chain = Chain(row, source, answered, 1 + drafts, broken=True, under_way=under_way)
            self.chains[row.number] = chain

    def run(self, row: Row, drafts: int, source: control.DraftSource.ValueType, *, fresh: bool) -> None:
        chain = self.chains.get(row.number)
        if chain is not None and len(chain.under_way) == SIZE:
            self.wait_for_run(chain)
        if chain is not None and (
            chain.broken or fresh or chain.computed + 1 + drafts > MAX_UNSETTLED or self.finished(row)
        ):
            self.settle(row)
            chain = None
            if self.finished(row):
                return
        if chain is None:
            chain = Chain(row, source, len(self.prompts.answers[row.number]))
            self.chains[row.number] = chain
        work = control.Decode(
            lane=row.lane or 0, drafts=drafts, source=chain.source, asks=chain.source > LOOKED_UP
        )
        step = self.announce(decode=work)
        chain.computed += 1 + drafts
        chain.under_way.append((step, chain.computed))

    @rule(pick=picks, settles=st.booleans())
    @precondition(lambda self: self.rows)
    def evict(self, pick: random.Random, settles: bool) -> None:
        """A row leaves, maybe with drafts under way that nobody settles."""
        row = pick.choice(list(self.rows.values()))
        if settles:
            self.settle(row)
        elif (chain := self.chains.pop(row.number, None)) is not None:
            while chain.under_way and pick.random() < 0.5:
                self.wait_for_run(chain)
            self.settle(row)  # that is, the others of its lane
        else:
            self.wait()
        self.check()
        del self.rows[row.number]
        if row.lane is not None:
            self.lanes[row.lane].remove(row)
            if not self.lanes[row.lane]:
                del self.lanes[row.lane]
        self.changes.append(control.Change(evict=control.Evict(row=row.number)))
        self.announce()

    @rule(drops=st.booleans(), pick=picks)
    @precondition(lambda self: self.rows)
    def keep(self, drops: bool, pick: random.Random) -> None:
        """The first tokens of a row are kept, or all that it holds where its caches cannot be cut. Another
        prefix may be dropped."""
        if drops and self.kept:
            prefix = pick.choice(sorted(self.kept))
            del self.kept[prefix]
            self.changes.append(control.Change(drop=control.Drop(prefix=prefix)))
        self.keep_of(pick.choice([row for row in self.rows.values() if row.done]), pick)
        self.announce()

    def keep_of(self, row: Row, pick: random.Random) -> None:
        self.wait()
        self.settle(row)
        text = self.text(row)
        held = row.done if row.lane is None else len(text) - 1
        if self.doubled and row.lane is not None:  # of an answer nothing is kept
            held = len(row.prompt)
            if not self.cuts and held not in row.marks:
                return
        tokens = pick.randint(1, held) if self.cuts else held
        marks = [mark for mark in row.marks if mark < tokens and pick.random() < 0.5][-6:]
        self.prefixes_made += 1
        keep = control.Keep(prefix=self.prefixes_made, row=row.number, tokens=tokens, marks=marks)
        self.changes.append(control.Change(keep=keep))
        self.kept[self.prefixes_made] = text[:tokens], [*marks, tokens]
        if tokens == held:
            row.marks = [*marks, tokens]
        self.origins[(self.epoch, row.number, tokens)] = text[:tokens]


QUICK = ["llama", "gemma3_text", "mamba2"]
"""Caches that are cut, those that slide, and those that can only be kept as they were."""


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(one, marks=pytest.mark.sweep) for one in FAMILIES if one not in QUICK)]
)
def test_every_answer_is_that_of_the_row_alone_without_drafts(family: str, doubled: bool) -> None:
    run_state_machine_as_test(
        lambda: Gateway(family, doubled),
        settings=settings(
            max_examples=5,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
