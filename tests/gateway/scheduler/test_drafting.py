from __future__ import annotations

from collections import Counter, deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.gateway.scheduler import (
    Action,
    AnnounceStep,
    Finish,
    MemberMemory,
    OpenRow,
    Request,
    RingFacts,
    Scheduler,
)
from sealring.gateway.scheduler.costs import StepCosts
from sealring.gateway.scheduler.drafting import DEPTHS, LOSS, Depth, Drafting, _Chain
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.composition import MAX_UNSETTLED, Composition
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

STAGES = 3
COSTS = StepCosts(rows=((1, 1.0),), tokens=((1, 1.0), (2, 1.1), (4, 1.3), (8, 1.8), (16, 3.0)))
DEAR = StepCosts(rows=((1, 1.0),), tokens=((1, 1.0), (16, 16.0)))
PLAIN = float(STAGES)


def spent(
    depth: Depth, tokens: int, right: int, dear: float = 1.0, costs: StepCosts = COSTS
) -> tuple[float, Counter[int]]:
    """How fast an answer comes of which so many drafts are right and then one is wrong, against one without;
    its steps by depth. What drafts take is `dear` times what the table says."""
    seconds, steps, said = 0.0, Counter[int](), 0
    depth.begin()
    while said < tokens:
        drafts = depth.wanted(tokens - said - 2)
        steps[drafts] += 1
        if not drafts:
            depth.plain(PLAIN)
            seconds, said = seconds + PLAIN, said + 1
            continue
        took = PLAIN + dear * STAGES * (costs.chunk(1 + drafts) - costs.chunk(1))
        brought = min(right, drafts)
        depth.run(drafts, brought, min(right + 1, drafts), 1 + brought, took, first=True)
        seconds, said, left = seconds + took, said + 1 + brought, right - brought
        while brought >= drafts and left and said < tokens and depth.pays(drafts):
            brought = min(left, 1 + drafts)
            depth.run(drafts, brought, min(left + 1, 1 + drafts), brought, dear * took / STAGES, first=False)
            seconds, said, left = seconds + dear * took / STAGES, said + brought, left - brought
            brought -= 1
    return said * PLAIN / seconds, steps


@pytest.mark.parametrize("costs", [COSTS, DEAR])
@pytest.mark.parametrize("dear", [0.5, 1.0, 3.0])
def test_wrong_drafts_cost_next_to_nothing(costs: StepCosts, dear: float) -> None:
    """Also where they take longer than was timed."""
    depth = Depth(costs, STAGES)
    for _ in range(4):
        faster, _ = spent(depth, 400, right=0, dear=dear, costs=costs)
        assert faster > 0.97


def test_right_drafts_go_as_deep_as_it_pays() -> None:
    faster, steps = spent(Depth(COSTS, STAGES), 400, right=1000)
    assert faster > 4
    assert steps[0] < 3
    faster, deep = spent(Depth(COSTS, STAGES), 400, right=3)
    assert faster > 1.5
    assert sum(deep[each] for each in DEPTHS[2:]) < deep[1] + deep[3]


def test_chains_pay_where_a_step_with_drafts_alone_would_not() -> None:
    """A token of a step takes as long as a step; stages that would be idle compute them."""
    faster, _ = spent(Depth(DEAR, STAGES), 400, right=1000, costs=DEAR)
    assert faster > 1.5


def test_an_answer_that_stops_repeating_goes_on_without() -> None:
    depth = Depth(COSTS, STAGES)
    spent(depth, 200, right=9)
    faster, _ = spent(depth, 400, right=0)
    assert faster > 1 - 2 * LOSS
    faster, _ = spent(depth, 400, right=9)
    assert faster > 1.5


@pytest.mark.parametrize("most", [-5, 0, 1, 2, 3, 6, 7, 14])
def test_no_more_is_wanted_than_may_be(most: int) -> None:
    depth = Depth(COSTS, STAGES)
    assert depth.wanted(15) == 0  # before a step without has been timed
    spent(depth, 100, right=1000)
    assert depth.wanted(15) in DEPTHS
    assert depth.wanted(most) in [0, *DEPTHS]
    assert depth.wanted(most) <= max(most, 0)


def test_what_follows_a_wrong_draft_in_its_chain_brings_nothing() -> None:
    facts: Any = SimpleNamespace(speculates=True, costs=COSTS, stages=STAGES)
    for brought in (0, 1):
        request = SimpleNamespace(drafted=0, accepted=0)
        row = SimpleNamespace(number=1, closed=False, request=request)
        lane: Any = SimpleNamespace(rows={1: row}, steps=0)
        drafting = Drafting(facts)
        for _ in range(3):
            drafting.announced(lane, 2)
        for tokens in (3, 1):  # as many as there can be, and a wrong draft
            drafting.done(tokens, 0.0, knows=True)
        with pytest.raises(InvalidInput) if brought else nullcontext():
            drafting.done(brought, 0.0, knows=True)
        assert lane.steps == 4


def test_a_second_run_is_announced_behind_the_first_where_the_head_knows_more() -> None:
    facts: Any = SimpleNamespace(speculates=True, costs=COSTS, stages=STAGES)
    row = SimpleNamespace(number=1, closed=False, drafts=15, request=SimpleNamespace(drafted=0, accepted=0))
    lane: Any = SimpleNamespace(rows={1: row}, ready=[], outstanding=0, steps=0, left=lambda row: 100)
    drafting, now = Drafting(facts), 0.0
    for knows in (False, False, True, False, True):
        drafting.wanted(lane, 1)
        now += PLAIN
        drafting.plain(now, follows=True, knows=knows)
        assert (drafting.wanted(lane, 1) in DEPTHS) == knows
    drafts = drafting.wanted(lane, 1)
    assert drafts
    for _ in range(2):
        drafting.announced(lane, drafts)
        assert drafting.wanted(lane, 1) == drafts
    assert drafting.settling() == []
    drafting.done(1 + drafts, now + PLAIN, knows=True)
    assert drafting.wanted(lane, 1) == drafts
    drafting.done(0, now + PLAIN, knows=False)  # none is right
    assert (row.request.drafted, row.request.accepted) == (2 * drafts + 1, drafts)


def test_what_steps_with_drafts_brought_is_counted() -> None:
    """Each draft is right."""
    any_prefix = control.PREFIX_SUPPORT_ANY
    members = (MemberMemory(1, 0, 1 << 40),) * STAGES
    facts = RingFacts(members, 4, 64, prefixes=any_prefix, speculate=True, costs=COSTS)
    scheduler = Scheduler(queue_limit=1)
    composition = Composition(epoch=1, max_rows=4, prefill_chunk=64)
    request = Request("a", "", 60, inference.Envelope())
    todo: deque[Action] = deque([*scheduler.attach(facts), *scheduler.submit(request, 0.0)])
    under_way: deque[control.StepDone] = deque()
    said, ends = 0, []
    for now in range(200):
        while todo:
            action = todo.popleft()
            if isinstance(action, OpenRow):
                todo += scheduler.row_opened(
                    action.row, prompt_tokens=4, params_bytes=64, max_tokens=60, drafts=15
                )
            elif isinstance(action, AnnounceStep):
                done = control.StepDone(step=action.step.number, guesses=True)
                for row in composition.apply(action.step).sampled:
                    done.outputs.add(row=row, text="x")
                under_way += [done] if done.outputs else []
            elif isinstance(action, Finish):
                ends.append(action.completion_tokens)
        if under_way:
            done = under_way.popleft()
            for output in done.outputs:
                said += 1
                output.tokens = said
            todo += scheduler.step_done(done, float(now))
    assert (said, ends) == (60, [60])
    assert request.accepted == request.drafted > 20


def test_a_step_that_waited_in_vain_is_paid_for() -> None:
    depth = Depth(COSTS, STAGES)
    for _ in range(100):
        depth.plain(PLAIN)
    assert depth.wanted(15) > 0
    depth.waited(1.5 * PLAIN)
    assert depth.wanted(15) == 0
    for _ in range(50):
        depth.plain(PLAIN)
    assert depth.wanted(15) > 0


@pytest.mark.parametrize(
    ("drafts", "left", "runs"),
    [(7, 10_000, MAX_UNSETTLED // 8), (6, 10_000, MAX_UNSETTLED // 7), (7, 17, 2), (7, 16, 1), (7, 8, 0)],
)
def test_a_chain_is_as_long_as_members_take_it_and_its_row_has_room(
    drafts: int, left: int, runs: int
) -> None:
    lane, row = SimpleNamespace(left=lambda row: left), SimpleNamespace()
    chain = _Chain(lane, row, drafts)  # type: ignore[arg-type]
    while chain.more:
        chain.runs += 1
        chain.live += 1
    assert chain.runs == runs
