from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from draftedring import GPUS, SHARED_GPU, DraftedRing, Machine
from requestkit import request_of
from ringfacts import member_with, ring_of
from sharedring import GuessingHead, SharedRing

from sealring.gateway.scheduler import (
    LOOKUP,
    MAX_SOURCES,
    NO_MODEL,
    RingFacts,
    Row,
    SourceFacts,
    StepCosts,
)
from sealring.gateway.scheduler.board import Board
from sealring.gateway.scheduler.drafting import (
    BATCH_LENGTHS,
    LENGTHS,
    Drafting,
    DraftPlan,
    LanesPolicy,
    RowPolicy,
    Shares,
    Step,
    acceptance_rates,
)
from sealring.gateway.scheduler.facts import HOP, Source
from sealring.gateway.scheduler.lane import Lane
from sealring.mesh.errors import InvalidInput
from sealring.v1 import control_pb2 as control

STAGES = 3


def every_second(cases: Iterable[Any]) -> Iterator[Any]:
    """Leaves every second case to `make sweep`."""
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        yield pytest.param(*values, marks=[pytest.mark.sweep] * (number % 2))


def ring(stages: int, costs: StepCosts | None = None) -> RingFacts:
    """A ring whose members can cut their caches."""
    return ring_of(
        *[member_with()] * stages, rows=4, chunk=4096, speculate=True, costs=costs or COSTS, draft_runs=64
    )


COSTS = StepCosts(rows=((1, 1.0),), tokens=((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.8), (16, 3.0)))
DEAR = StepCosts(rows=((1, 1.0),), tokens=((1, 1.0), (16, 16.0)))
RISING = StepCosts(rows=((1, 1.0),), tokens=((1, 1.0), (2, 1.3)))
PLAIN = float(STAGES)


def spent(
    policy: RowPolicy,
    tokens: int,
    right: int,
    dear: float = 1.0,
    costs: StepCosts = COSTS,
    rate: float = 0.9,
) -> float:
    """Speed of an answer with one run at a time, against one without drafts. `right` drafts are right, then
    one is wrong; the head reports `rate` always. Runs take `dear` times the table's seconds."""
    seconds, said, late = 0.0, 0, False
    policy.begin()
    while said < tokens:
        drafts = policy.best(tokens - said - 2, {LOOKUP: rate}).drafts
        took, brought = PLAIN, 1
        if drafts:
            brought = 1 + min(right, drafts)
            took = dear * (PLAIN + STAGES * (costs.chunk(1 + drafts) - costs.chunk(1)))
        if drafts or late:
            policy.took(DraftPlan(drafts, 1), brought, took)
        else:
            policy.plain(took)
        seconds, said, late = seconds + took, said + brought, drafts > 0
    return said * PLAIN / seconds


@pytest.mark.parametrize("costs", [COSTS, DEAR])
@pytest.mark.parametrize("dear", [0.5, 1.0, 3.0])
def test_wrong_drafts_cost_next_to_nothing(costs: StepCosts, dear: float) -> None:
    """Also where they take longer than was timed, and though the head says that nine of ten are right."""
    policy = RowPolicy(ring(STAGES, costs))
    spent(policy, 400, right=0, dear=dear, costs=costs)
    gains = [spent(policy, 400, right=0, dear=dear, costs=costs) for _ in range(20)]
    assert fmean(gains) > 0.96
    assert min(gains) > 0.92


def test_right_drafts_go_as_deep_as_it_pays() -> None:
    policy = RowPolicy(ring(STAGES))
    assert spent(policy, 400, right=1000, rate=0.99) > 4
    assert policy.best(15, {LOOKUP: 0.99}).drafts > policy.best(15, {LOOKUP: 0.6}).drafts > 0
    assert policy.best(15, {LOOKUP: 0.05}) == DraftPlan()
    assert policy.best(15, {LOOKUP: 0.05, control.DRAFT_SOURCE_MODEL: 0.99}) == DraftPlan(), (
        "no member has that source"
    )


def test_runs_go_ahead_where_processors_are_there_for_them() -> None:
    """A token of a step takes as long as a step: only stages that would be idle gain."""
    policy = RowPolicy(ring(STAGES, DEAR))
    policy.plain(PLAIN)
    for _ in range(9):  # all right, and gains enough for what runs ahead may lose
        policy.took(DraftPlan(1, 1), 2, 1.5 * PLAIN)
    plan = policy.best(15, {LOOKUP: 0.95})
    assert plan.drafts
    assert plan.runs == STAGES
    for _ in range(9):
        policy.took(plan, 1 + plan.drafts, 4 * (PLAIN + STAGES * plan.drafts))
        policy.took(DraftPlan(), 1, PLAIN)
    assert policy.best(15, {LOOKUP: 0.95}).runs < STAGES


@pytest.mark.parametrize(("right", "runs"), [(0.5, 2), (0.9, 3)])
def test_a_run_goes_ahead_where_it_saves_more_than_is_waited_for_it_in_vain(right: float, runs: int) -> None:
    """In vain each run keeps each stage for 0.3 s. With a third one under way the next run is done 0.65 s
    earlier, of which there are 0.33 and 4.3 in the mean."""
    policy = RowPolicy(ring(STAGES, RISING))
    policy.plain(PLAIN)
    assert policy.best(1, {LOOKUP: right}) == DraftPlan(1, runs)


def test_the_step_behind_a_chain_is_expected_to_wait_for_runs_in_vain() -> None:
    """Otherwise chains of many runs would pass for slower than the table says."""
    policy = RowPolicy(ring(STAGES, RISING))
    policy.plain(PLAIN)
    for _ in range(9):
        policy.took(DraftPlan(1, 3), 2, 1.3 * PLAIN)
        policy.took(DraftPlan(), 1, PLAIN + 2 * 0.3)
    assert policy.best(1, {LOOKUP: 0.7}) == DraftPlan(1, 3)


@pytest.mark.parametrize("drafts", BATCH_LENGTHS)
def test_a_chain_that_began_beside_others_counts_where_its_row_is_the_last_one(drafts: int) -> None:
    """Rows together have depths that a row alone never has."""
    policy = RowPolicy(ring(STAGES))
    policy.plain(PLAIN)
    policy.took(DraftPlan(drafts, 1), 1 + drafts, PLAIN)
    assert policy.best(15, {LOOKUP: 0.9}).drafts


def test_an_answer_that_stops_repeating_goes_on_without() -> None:
    policy = RowPolicy(ring(STAGES))
    spent(policy, 200, right=9)
    assert spent(policy, 400, right=0) > 0.93, "the head tells 0.9 all the time"
    assert spent(policy, 400, right=9) > 1.5


def test_a_ring_that_was_slow_for_a_while_is_tried_again() -> None:
    """However bad the measured chains were: once that has been saved up what a trial may lose."""
    policy, rates = RowPolicy(ring(STAGES)), {LOOKUP: 0.9}
    for _ in range(9):
        spent(policy, 30, right=0, dear=9.0)
        for runs in range(2, 1 + STAGES):
            policy.took(DraftPlan(7, runs), 8, 99 * PLAIN)
            policy.took(DraftPlan(), 1, PLAIN)
    tried = []
    for _ in range(5000):
        tried.append(policy.best(15, rates) != DraftPlan())
        policy.plain(PLAIN)
    assert not any(tried[:100])
    assert any(tried)


@pytest.mark.parametrize("most", [-5, 0, 1, 2, 3, 6, 7, 14])
def test_no_more_is_wanted_than_may_be(most: int) -> None:
    policy = RowPolicy(ring(STAGES))
    rates = {LOOKUP: 0.9}
    assert policy.best(15, rates) == DraftPlan()  # before a step without has been timed
    spent(policy, 100, right=1000)
    assert policy.best(15, rates).drafts in LENGTHS
    plan = policy.best(most, rates)
    assert (plan.drafts in LENGTHS and plan.runs in (1, 2, 3)) or plan == DraftPlan()
    assert plan.drafts <= max(most, 0)


def turns(tokens: int, right: float, source: random.Random) -> list[int]:
    """Tokens of 64, each the next in turn with probability `right` and else any."""
    said = [0]
    while len(said) < tokens:
        said.append((said[-1] + 1) % 64 if source.random() < right else source.randrange(64))
    return said


def answers(seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts and what is answered, as in bench/speculate, and a text with every twelfth token a new one."""
    source = random.Random(seed)
    text = [source.randrange(3000) for _ in range(TOKENS)]
    return {
        "quotes": (list(range(64)) * 2, turns(TOKENS, 1.0, source)),
        "edits": (list(range(64)) * 2, turns(TOKENS, 0.92, source)),
        "replaces": (text, [token if at % 12 else 5000 + at for at, token in enumerate(text, start=1)]),
        "wrong": (source.choices(range(64), k=1024), source.choices(range(64), k=TOKENS)),
    }


TOKENS = 192
MACHINES = {
    "own processors": (Machine(3, 1.8), 2.0),
    "one GPU": (Machine(1, 1.1), 2.0),
    "one GPU, late steps": (Machine(1, 1.1, 0.6), 2.0),
    "two cores": (Machine(2, 4.0), 1.4),
    "two cores, dear tokens": (Machine(2, 5.0), 1.3),
}
"""With what an edit gains at least: on two cores what is in vain takes time from what is not."""


@pytest.mark.parametrize("machine", every_second(MACHINES))
def test_targets_are_met_on_a_simulated_ring(machine: str) -> None:
    """Though the first run of each length takes ten times as long; the first answers are to learn."""
    costs, edits = MACHINES[machine]
    noise = 0.1
    source, met = random.Random(1), {1}

    def slower(tokens: int) -> float:
        first, times = tokens not in met, source.lognormvariate(0, noise)
        met.add(tokens)
        return 10 * times if first else times

    ring = DraftedRing(costs, slower)
    gains: dict[str, list[float]] = {}
    for seed in range(3):
        for kind, (prompt, answer) in answers(seed).items():
            plain = DraftedRing(costs, lambda tokens: source.lognormvariate(0, noise)).answer(
                prompt, answer, drafts=0
            )
            gains.setdefault(kind, []).append(plain / ring.answer(prompt, answer))
    mean = {kind: fmean(each[1:]) for kind, each in gains.items()}
    assert mean["quotes"] > 2
    assert mean["edits"] > edits
    assert mean["replaces"] > min(edits, 1.4)
    assert min(gains["wrong"]) > 0.97


@pytest.mark.parametrize("machine", every_second(MACHINES))
def test_a_head_that_is_sure_of_what_is_wrong_costs_next_to_nothing(machine: str) -> None:
    """The first answer also pays for what is not known of this ring."""
    costs, _ = MACHINES[machine]
    prompt, answer = [1, 2, 3], [1000 + at for at in range(256)]
    plain, ring = DraftedRing(costs).answer(prompt, answer, drafts=0), DraftedRing(costs, claims=0.95)
    first, *later = (plain / ring.answer(prompt, answer) for _ in range(4))
    assert first > 0.88
    assert min(later) > 0.94


class OneRow:
    """A row whose prompt of 4 tokens is prefilled, alone in its lane, and the drafting of its ring."""

    def __init__(self) -> None:
        facts = ring(STAGES)
        self.board = Board(facts)
        self.drafting = Drafting(facts, self.board)
        request = request_of("r", 200)
        self.row = Row(1, request, prompt_tokens=4, limit=200, drafts=15)
        self.lane = Lane(0, self.board)
        step = control.Step()
        step.prefill.chunks.add(row=1, end=4, prompt_tokens=4)
        self.board.announce(step)
        self.board.admit(self.row, lane=0)
        self.board.announce(control.Step(decode=control.Decode(lane=0)))

    def announce(self, plan: DraftPlan) -> None:
        self.drafting.announced(self.lane, plan)
        work = control.Decode(lane=0, drafts=plan.drafts, source=plan.source)
        self.board.announce(control.Step(decode=work))

    def bring(self, tokens: int, now: float = 0.0, right: float = 0.9, *, refuted: bool = False) -> None:
        self.drafting.done({1: tokens}, [self.lane], now, rates={LOOKUP: right}, refuted=refuted)


def test_what_follows_a_wrong_draft_in_its_chain_brings_nothing() -> None:
    for brought in (0, 1):
        one = OneRow()
        for _ in range(3):
            one.announce(DraftPlan(2, 3))
        for tokens in (3, 1):  # as many as there can be, and a wrong draft
            one.bring(tokens)
        with pytest.raises(InvalidInput) if brought else nullcontext():
            one.bring(brought)
        assert one.board.counts(1) == 4 + 1 + 3 + 1
        one.drafting.settle()
        one.board.announce(step := control.Step(decode=control.Decode(lane=0)))
        assert step.changes[0].settle.tokens == 9
        assert one.board.counts(1) == one.board.held(1) == 10


def test_a_second_run_is_announced_behind_the_first_where_the_head_knows_more() -> None:
    one, now = OneRow(), 0.0
    drafting, lane = one.drafting, one.lane
    for rate in (0.0, 0.0, 0.9, 0.0, 0.9):
        drafting.wanted(lane, [lane], 1)
        now += PLAIN
        drafting.plain(lane, [lane], now, follows=True, rates={LOOKUP: rate})
        plan = drafting.wanted(lane, [lane], 1)
        assert plan is not None
        assert (plan.drafts in LENGTHS) == (rate > 0)
        lane.outstanding = 1
        assert (drafting.wanted(lane, [lane], 1) is None) == (rate > 0)
        lane.outstanding = 0
    plan = drafting.wanted(lane, [lane], 1)
    assert plan is not None
    one.announce(plan)
    assert drafting.wanted(lane, [lane], 1) == plan
    one.announce(plan)
    one.bring(1 + plan.drafts, now + PLAIN, 0.95)
    assert drafting.wanted(lane, [lane], 1)
    drafting.settle()
    assert not one.board.changes
    one.bring(0, now + PLAIN, 0.0)  # none is right
    drafting.settle()
    assert one.board.changes
    progress = one.row.request.progress
    assert (progress.drafted, progress.accepted) == (2 * plan.drafts + 1, plan.drafts)
    assert drafting.wanted(lane, [lane], 1) != DraftPlan()


def test_a_chain_ends_as_soon_as_the_head_knows_that_what_follows_is_wrong() -> None:
    """Also where all drafts of the run were right: the runs behind it bring nothing."""
    one = OneRow()
    for _ in range(2):
        one.announce(DraftPlan(2, 2))
    one.bring(3, refuted=True)
    one.drafting.settle()
    assert one.board.changes
    with pytest.raises(InvalidInput):
        one.bring(1)


STAIRS = ((1, 1.0), (2, 1.0), (4, 1.28), (6, 2.04), (8, 2.5), (10, 3.95), (32, 3.95))
SMALL = {
    (3, 0.3): 1.9,
    (3, 0.1): 2.1,
    (2, 0.2): 1.7,
    (2, 0.1): 1.85,
}
"""By stages and by the time in which the draft model guesses, in those of a stage's step of one token: gains
where guesses are right with probability 0.7. The head has fewer layers, by as much as the model takes."""


@pytest.mark.parametrize(("stages", "draft"), every_second(SMALL))
def test_a_draft_model_gains_on_a_simulated_ring(stages: int, draft: float) -> None:
    """By the staircase of a Mac; no answer repeats anything."""
    head = (stages + draft) / stages - draft
    machine = Machine(stages, 1.8, stages=stages, draft=draft, head=head, stairs=STAIRS)

    def gains(right: float, answers: int) -> list[float]:
        ring = DraftedRing(machine, right=right)
        found = []
        for seed in range(answers):
            text = random.Random(seed).sample(range(1 << 19), 300)
            plain = DraftedRing(machine).answer(text[:44], text[44:], drafts=0)
            found.append(plain / ring.answer(text[:44], text[44:]))
        return found

    assert fmean(gains(0.7, 6)) > SMALL[stages, draft]
    assert min(gains(0.0, 2)) > 0.99


MEASURED = {(1, 1): 0.77, (3, 1): 0.99, (7, 1): 0.87, (1, 2): 0.92, (3, 2): 1.01, (1, 3): 0.82}
"""By drafts of a run and runs under way, to which the gateway was made to keep: gains on one H200 by
docs/decisions/0060-a-draft-model-at-the-head.md, guesses right with probability 0.7."""


def gain(machine: Machine, right: float, answers: int = 4, tokens: int = 200) -> float:
    """The mean gain of answers that repeat nothing."""
    ring, found = DraftedRing(machine, right=right), []
    for seed in range(answers):
        text = random.Random(seed).sample(range(1 << 19), 44 + tokens)
        plain = DraftedRing(machine).answer(text[:44], text[44:], drafts=0)
        found.append(plain / ring.answer(text[:44], text[44:]))
    return fmean(found)


@pytest.mark.parametrize("plan", every_second((plan,) for plan in MEASURED))
def test_a_simulated_ring_gains_what_a_gpu_did(
    plan: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the messages, the graphs and the turns of processes it would be 1.3 to 1.7."""
    kept = DraftPlan(*plan, control.DRAFT_SOURCE_MODEL)

    def keep(self: RowPolicy, most: int, *_: Any, **__: Any) -> DraftPlan:
        return kept if self.ready and kept.drafts <= most else DraftPlan()

    monkeypatch.setattr(RowPolicy, "best", keep)
    assert gain(SHARED_GPU, 0.7) == pytest.approx(MEASURED[plan], abs=0.2)


def test_a_simulated_ring_gains_what_two_gpus_did() -> None:
    """They made 2.8 to 4.2 times as much where all guesses were right."""
    assert 2.8 < gain(GPUS, 1.0) < 4.2


SHARED = {
    (2, 2, 0.2): 1.5,
    (2, 3, 0.2): 1.3,
    (2, 4, 0.2): 1.2,
    (2, 4, 0.0): 1.2,
    (3, 3, 0.3): 1.5,
    (3, 4, 0.14): 1.37,
}
"""By stages, rows, and the time in which the draft model guesses a token of one row; of several at once it
rises as a stage's does. As SMALL."""


@pytest.mark.parametrize(("stages", "rows", "draft"), every_second(SHARED))
def test_rows_at_once_gain_on_a_simulated_ring(stages: int, rows: int, draft: float) -> None:
    """By the staircase of a Mac. With all guesses wrong the head says so, and nothing is drafted."""
    head = (stages + draft) / stages - draft
    machine = Machine(stages, 1.8, stages=stages, draft=draft, head=head, stairs=STAIRS)
    for right, least in ((0.7, SHARED[stages, rows, draft]), (0.0, 0.99)):
        plain = SharedRing(machine, rows, 300, right, drafts=0).rate
        assert SharedRing(machine, rows, 300, right).rate / plain > least


@pytest.mark.parametrize(
    ("lanes", "source", "seconds"),
    [
        (3, LOOKUP, 3 * 1.0),
        (3, control.DRAFT_SOURCE_MODEL, 3 * (0.5 + 0.8)),
        (1, LOOKUP, 0.5 + 1.0 + 2 * HOP + 2 * HOP),
    ],
)
def test_a_round_takes_as_long_as_the_busiest_stage_or_the_longest_way(
    lanes: int, source: Source, seconds: float
) -> None:
    """The busiest is any stage but the head, or the head, which guesses a token for each of 2 rows. The plan
    leads through 2 stages, to the gateway and back."""
    costs, head = (StepCosts(rows=((1, each),), tokens=((1, each),)) for each in (1.0, 0.5))
    sources = {**NO_MODEL, control.DRAFT_SOURCE_MODEL: SourceFacts(0.4)}
    together = LanesPolicy(replace(ring(2, costs), head=head, sources=sources))
    assert together.round([Step(2, DraftPlan(1, 1, source))] * lanes) == pytest.approx(seconds)


def test_a_round_with_drafts_waits_as_long_as_the_last_ones_did() -> None:
    """So that few drafts no longer pay, and many still do."""
    flat = StepCosts(((1, 1.0), (16, 1.1)), ((1, 1.0), (16, 1.1)))
    together, plain, rates = LanesPolicy(ring(2, flat)), Step(2, DraftPlan()), {LOOKUP: 0.7}
    few = Step(2, together.best(2, 2, rates, [plain]), rates)
    assert few.plan.drafts == 2
    table = together.round([few, few])
    for _ in range(9):
        together.took([few, few], 2.0, table + 1.4)
    assert together.round([few, few]) == pytest.approx(table + 1.4)
    assert together.round([plain, plain]) < table, "steps without drafts are announced ahead"
    assert together.best(2, 2, rates, [plain]) == DraftPlan()
    assert together.best(2, 7, rates, [plain]).drafts == 7


def test_what_takes_longer_than_the_table_says_is_given_up() -> None:
    """And tried again for a share of the time."""
    together = LanesPolicy(ring(2, StepCosts(STAIRS, STAIRS)))
    plain, rates = Step(2, DraftPlan()), {LOOKUP: 0.9}
    plan = together.best(2, 15, rates, [plain])
    assert plan.drafts
    steps = [Step(2, plan, rates), plain.with_plan(plan)]
    for _ in range(9):
        together.took(steps, 1.9, 9 * together.round([plain, plain]))
    assert together.best(2, 15, rates, [plain]) == DraftPlan()
    assert not together.pays(2, [2]), "so no rates are asked for"
    tried = 0
    while not together.best(2, 15, rates, [plain]).drafts:
        together.took([plain, plain], 1.0, together.round([plain, plain]))
        tried += 1
    assert 500 < tried < 20_000
    assert together.best(2, 0, rates, [plain]) == DraftPlan()
    assert together.best(16, 15, rates, []) == DraftPlan(), "a step has 16 tokens at most"
    dear = StepCosts(DEAR.tokens, DEAR.tokens)
    assert not LanesPolicy(ring(2, dear)).pays(2, [2]), "a token more costs as much as a step"
    sources = {**NO_MODEL, control.DRAFT_SOURCE_MODEL: SourceFacts(1e-6, 4, 1e-6)}
    guessed = LanesPolicy(replace(ring(2, StepCosts(STAIRS, STAIRS)), sources=sources))
    assert guessed.pays(2, [2])


def test_a_few_slow_rounds_rule_no_drafts_out() -> None:
    """The median of seven counts."""
    together = LanesPolicy(ring(2, StepCosts(STAIRS, STAIRS)))
    plain, rates = Step(2, DraftPlan()), {LOOKUP: 0.9}
    step = Step(2, together.best(2, 15, rates, [plain]), rates)
    usual = together.round([step, plain])
    for seconds, tokens in [(9 * usual, 1.0), *[(usual, 1.9)] * 9, (9 * usual, 1.0)]:
        together.took([step, plain], tokens, seconds)
    assert together.best(2, 15, rates, [plain]).drafts


def test_guesses_count_by_their_place_in_a_run() -> None:
    """The head tells one rate of a source, though later guesses may be right less often."""
    shares = Shares()
    assert shares.tokens(LOOKUP, 3, 0.5)[0] == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    for _ in range(200):
        shares.add(LOOKUP, 3, 2, 0.5)  # the first is right, the second wrong
    assert shares.tokens(LOOKUP, 1, 0.5)[0] > 1.85
    assert shares.tokens(LOOKUP, 7, 0.5)[0] < 2.2
    assert shares.tokens(LOOKUP, 3, 0.25)[0] < 1.6, "a row's own rate counts"
    assert shares.tokens(control.DRAFT_SOURCE_MODEL, 1, 0.5)[0] == 1.5


def test_a_draft_model_guesses_for_no_ring_of_more_rows_than_it_follows() -> None:
    machine = Machine(2, 1.8, stages=2, draft=0.07, stairs=STAIRS)
    plain = SharedRing(machine, 16, 60, 0.7, drafts=0).rate
    assert SharedRing(machine, 16, 60, 0.7).rate == pytest.approx(plain)


HEADS = {(2, 0.1, 0.8): 1.85, (3, 0.15, 0.8): 1.85, (2, 0.1, 0.3): 1.1, (2, 0.2, 0.8): 1.65}
"""By stages, the time in which an MTP head guesses, in those of a stage's step of one token, and the
probability that a guess is right: gains."""


@pytest.mark.parametrize(("stages", "draft", "right"), every_second(HEADS))
def test_an_mtp_head_gains_on_a_simulated_ring_and_costs_next_to_nothing_where_it_is_wrong(
    stages: int, draft: float, right: float
) -> None:
    stairs = ((1, 1.0), (2, 1.0), (4, 1.28), (6, 2.04), (8, 2.5), (10, 3.95), (32, 3.95))
    machine = Machine(stages, 1.8, stages=stages, draft=draft, mtp=True, stairs=stairs)
    text = random.Random(1).sample(range(1 << 19), 644)
    plain = DraftedRing(machine).answer(text[:44], text[44:], drafts=0)
    assert (
        plain / DraftedRing(machine, right=right).answer(text[:44], text[44:]) > HEADS[stages, draft, right]
    )
    assert plain / DraftedRing(machine).answer(text[:44], text[44:]) > 0.985


HEADS_TOGETHER = {
    (2, 2, "stairs"): 1.5,
    (2, 4, "stairs"): 1.2,
    (3, 4, "stairs"): 1.25,
    (2, 4, "flat"): 1.8,
    (2, 8, "flat"): 1.8,
    (3, 6, "flat"): 1.8,
    (2, 4, "GPUs"): 1.5,
    (2, 2, "GPUs"): 1.6,
    (2, 8, "GPUs"): 1.35,
}
"""By stages, rows and machines, with guesses that are right with 0.8: gains."""


@pytest.mark.parametrize(("stages", "rows", "name"), HEADS_TOGETHER)
def test_an_mtp_head_gains_for_rows_at_once_and_costs_next_to_nothing_where_it_is_wrong(
    stages: int, rows: int, name: str
) -> None:
    """Lanes with drafts wait for each other, so that one alone gains less than it costs by the staircase."""
    machine = {
        "stairs": Machine(stages, 1.8, stages=stages, draft=0.1, mtp=True, stairs=STAIRS),
        "flat": Machine(stages, 1.05, stages=stages, draft=0.1, mtp=True),
        "GPUs": replace(GPUS, draft=0.15, mtp=True),
    }[name]
    for right, least in ((0.8, HEADS_TOGETHER[stages, rows, name]), (0.5, 0.96), (0.0, 0.98)):
        plain = SharedRing(machine, rows, 300, right, drafts=0).rate
        assert SharedRing(machine, rows, 300, right).rate / plain > least


@pytest.mark.parametrize(("rows", "gains"), [(4, 1.5), (6, 0.98)])
def test_no_more_rows_have_drafts_than_members_keep_states_for(rows: int, gains: float) -> None:
    machine = Machine(2, 1.05, stages=2, draft=0.1, mtp=True)
    plain = SharedRing(machine, rows, 300, 0.8, drafts=0, runs=4).rate
    drafted = SharedRing(machine, rows, 300, 0.8, runs=4)
    assert drafted.rate / plain > gains
    assert isinstance(drafted.head, GuessingHead)
    assert 0 < drafted.head.most_open <= 4


def test_a_busy_tail_computes_no_tokens_for_an_mtp_head_whose_guesses_do_not_pay() -> None:
    """Each step that asks takes it a layer more; now and then one does."""
    machine = Machine(2, 1.05, stages=2, draft=0.1, mtp=True)
    wrong, right = (SharedRing(machine, 4, 300, share).head for share in (0.0, 0.8))
    assert isinstance(wrong, GuessingHead)
    assert isinstance(right, GuessingHead)
    assert 0.02 < wrong.asked < 0.15
    assert right.asked > 0.8


def test_an_mtp_head_guesses_for_no_ring_of_more_rows_than_it_follows() -> None:
    machine = Machine(2, 1.05, stages=2, draft=0.1, mtp=True)
    plain = SharedRing(machine, 9, 60, 0.8, drafts=0).rate
    assert SharedRing(machine, 9, 60, 0.8).rate == pytest.approx(plain)


@pytest.mark.parametrize(("stages", "gain"), [(2, 2.5), (3, 2.8)])
def test_a_drafter_of_blocks_gains_on_a_simulated_ring_and_costs_next_to_nothing_where_it_is_wrong(
    stages: int, gain: float
) -> None:
    """The drafter is right about 5 of 8 tokens in the mean. A pass takes a sixth of the model's time."""
    machine = replace(GPUS, processors=stages, stages=stages, draft=stages / 6, block=8)
    text = random.Random(1).sample(range(1 << 19), 1044)
    plain = DraftedRing(machine).answer(text[:44], text[44:], drafts=0)
    assert plain / DraftedRing(machine, right=0.895).answer(text[:44], text[44:]) > gain
    assert plain / DraftedRing(machine).answer(text[:44], text[44:]) > 0.985


def test_a_run_is_no_longer_than_a_block_and_of_few_lengths() -> None:
    hidden = control.DRAFT_SOURCE_HIDDEN
    for block, most in ((3, 3), (7, 7), (8, 7), (15, 15), (99, 15), (0, 15)):
        sources = {**NO_MODEL, hidden: SourceFacts(1e-6, 1, ahead=True, block=block)}
        policy = RowPolicy(replace(ring(2, StepCosts(STAIRS, ((1, 1.0), (16, 1.1)))), sources=sources))
        policy.plain(2.0)
        assert policy.best(15, {hidden: 0.99}) == DraftPlan(most, 1, hidden)


def test_hidden_states_come_with_the_steps_of_a_row_that_is_alone_and_drafts() -> None:
    """Other steps are as long as in a ring without such a drafter."""
    taps: list[tuple[int, bool]] = []
    machine = replace(GPUS, draft=0.3, block=8)
    text = random.Random(1).sample(range(1 << 19), 144)
    for drafts in (15, 0):
        one = DraftedRing(machine, right=0.9)
        announce = one.announce

        def noted(step: control.Step, drafts: int = drafts, announce: Any = announce) -> None:
            found = [chunk.taps for chunk in step.prefill.chunks]
            taps.extend((drafts, each) for each in found + [step.decode.taps] * step.HasField("decode"))
            announce(step)

        one.announce = noted  # type: ignore[method-assign]
        one.answer(text[:44], text[44:], drafts=drafts)
    assert {(15, True), (0, False)} <= set(taps)
    assert (0, True) not in taps


def test_a_head_tells_rates_of_few_sources() -> None:
    """Each step brings them, and the gateway goes through all."""
    told = [control.DraftRate(source=LOOKUP, right=250)]
    told += [control.DraftRate(source=number) for number in range(10, 1000)]  # type: ignore[arg-type]
    assert acceptance_rates(told)[LOOKUP] == 1
    assert len(acceptance_rates(told)) == MAX_SOURCES
