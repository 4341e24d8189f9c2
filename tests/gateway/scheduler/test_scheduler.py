"""What the scheduler does, one situation at a time."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requestkit import request_of, with_progress
from ringfacts import member_with, ring_of
from rowoutput import row_output

from sealring.coordinator.rings.epochs import FIRST_BACKOFF, LAST_BACKOFF
from sealring.gateway.scheduler import (
    MAX_ATTEMPTS,
    TOKEN_BYTES,
    Action,
    AnnounceStep,
    Begin,
    DiscardRow,
    EndEpoch,
    Fail,
    Finish,
    OpenRow,
    Request,
    Scheduler,
    StepCosts,
)
from sealring.gateway.scheduler.admission import EXTENSION, OPEN_AHEAD, OPEN_BYTES
from sealring.gateway.scheduler.board import PlanError
from sealring.gateway.scheduler.budget import MANY
from sealring.mesh.errors import EpochEnded, Internal, InvalidInput
from sealring.mesh.ring import Composition, round_seconds
from sealring.mesh.rpc import Backoff
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

WHOLE = StepCosts(rows=((1, 1e-3),), tokens=((1, 1e-3), (512, 1.5e-3)))
"""Most of the cost of a chunk is fixed, so a short prompt is one chunk."""

COSTS = StepCosts(rows=((1, 1e-3),), tokens=((1, 2e-6), (10, 1.1e-5), (100, 1.01e-4), (512, 5.13e-4)))


class Driver:
    """A ring that answers on command, each answer as long as it may be. A decode step takes a millisecond, a
    prompt token a microsecond."""

    def __init__(
        self,
        stages: int = 1,
        *,
        max_rows: int = 64,
        chunk: int = 256,
        budget: int = 1 << 40,
        queue: int = 100,
        costs: StepCosts = COSTS,
    ) -> None:
        self.scheduler = Scheduler(queue_limit=queue)
        self.facts = ring_of(*[member_with(budget)] * stages, rows=max_rows, chunk=chunk, costs=costs)
        self.prompts: dict[str, int] = {}
        self.actions: list[Action] = []
        self.steps: list[control.Step] = []
        self.under_way: deque[control.Step] = deque()
        self.lanes: dict[int, list[int]] = {}
        self.sampled: dict[int, list[int]] = {}
        self.rows: dict[int, Request] = {}
        self.tokens: dict[int, int] = {}
        self.finished: dict[str, int] = {}
        self.failed: dict[str, str] = {}
        self.now = 0.0
        self.take(self.scheduler.attach(self.facts))

    def take(self, actions: list[Action]) -> None:
        todo = deque(actions)
        self.actions.extend(actions)
        while todo:
            action = todo.popleft()
            if isinstance(action, OpenRow):
                request = action.request
                self.rows[action.row] = request
                answered = len(action.resume.tokens) if action.resume else 0
                prompt = self.prompts[request.id] + answered
                self.tokens[action.row] = answered
                more = self.scheduler.row_opened(
                    control.RowOpened(
                        row=action.row,
                        prompt_tokens=prompt,
                        params_bytes=64,
                        max_tokens=request.max_tokens - answered if request.max_tokens else 100_000 - prompt,
                        answered=answered,
                    )
                )
                self.actions.extend(more)
                todo.extend(more)
            elif isinstance(action, AnnounceStep):
                self._step(action.step)
            elif isinstance(action, Finish):
                self.finished[action.request.id] = action.finished.completion_tokens
            elif isinstance(action, Fail):
                self.failed[action.request.id] = action.error.reason

    def _step(self, step: control.Step) -> None:
        self.steps.append(step)
        for change in step.changes:
            if change.HasField("admit"):
                self.lanes.setdefault(change.admit.lane, []).append(change.admit.row)
            for lane in list(self.lanes):
                for row in {change.evict.row}.intersection(self.lanes[lane]):
                    self.lanes[lane].remove(row)
        if step.WhichOneof("work"):
            self.under_way.append(step)
        if step.HasField("decode"):
            self.sampled[step.number] = list(self.lanes[step.decode.lane])

    def ask(
        self, name: str, prompt: int = 10, max_tokens: int = 8, key: str = "", patience: float = math.inf
    ) -> Request:
        self.prompts[name] = prompt
        request = request_of(name, max_tokens, key, patience=patience)
        self.take(self.scheduler.submit(request, self.now))
        return request

    def done(self, count: int = 1, stop: frozenset[int] = frozenset()) -> None:
        """Lets steps come round; rows in `stop` end with them."""
        for _ in range(count):
            if not self.under_way:
                return
            step = self.under_way.popleft()
            if step.HasField("decode"):
                self.now += 1e-3
                rows = self.sampled.pop(step.number)
            else:
                self.now += sum(chunk.end - chunk.start for chunk in step.prefill.chunks) * 1e-6
                rows = [chunk.row for chunk in step.prefill.chunks if chunk.end == chunk.prompt_tokens]
            done = control.StepDone(step=step.number)
            for row in rows:
                self.tokens[row] = self.tokens.get(row, 0) + 1
                output = done.outputs.add()
                output.CopyFrom(row_output(row, text="x", tokens=self.tokens[row]))
                if row in stop:
                    output.finish = inference.FINISH_REASON_STOP
            self.take(self.scheduler.step_done(done, self.now))

    def lose(self, reason: str = "EPOCH_ENDED") -> None:
        """The epoch ends."""
        self.take(self.scheduler.end_epoch(EpochEnded("gone", reason=reason)))
        for state in (self.under_way, self.lanes, self.sampled, self.tokens, self.steps):
            state.clear()  # type: ignore[attr-defined]

    def attach(self) -> None:
        self.take(self.scheduler.attach(self.facts))

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.under_way:
                return
            self.done()
        pytest.fail("the scheduler does not come to an end")

    def work(self) -> list[str]:
        """The steps in short: p for a prefill, the number of the lane for a decode, - for changes only."""
        kinds = {"prefill": lambda step: "p", "decode": lambda step: str(step.decode.lane)}
        return [kinds.get(step.WhichOneof("work"), lambda step: "-")(step) for step in self.steps]


def test_one_request_from_beginning_to_end() -> None:
    driver = Driver()
    driver.ask("a", prompt=10, max_tokens=3)
    assert [type(action) for action in driver.actions] == [OpenRow, Begin, AnnounceStep]
    driver.finish()
    assert driver.finished == {"a": 3}
    assert driver.work() == ["p", "0", "0", "-"]
    assert driver.steps[1].changes[0].admit.row == 1
    assert driver.steps[3].changes[0].evict.row == 1


def test_without_an_epoch_requests_wait_and_nothing_is_owed() -> None:
    scheduler = Scheduler(queue_limit=5)
    for name in "ab":
        assert scheduler.submit(request_of(name, 8), 0.0) == []
    assert (scheduler.used, scheduler.expects_answer) == (False, False)
    assert scheduler.planner is None
    load = scheduler.load()
    assert (load.waiting, load.running, load.kv_usage) == (2, 0, 0.0)
    assert scheduler.kept() == (0, 0)
    assert scheduler.cancel("a") == scheduler.cancel("nobody") == []
    assert scheduler.load().waiting == 1
    for told in (
        lambda: scheduler.row_opened(control.RowOpened(row=1, prompt_tokens=1, params_bytes=1, max_tokens=1)),
        lambda: scheduler.row_refused(1, InvalidInput("x")),
        lambda: scheduler.step_done(control.StepDone(step=1), 0.0),
        lambda: scheduler.steps_executed(1),
    ):
        with pytest.raises(InvalidInput) as caught:
            told()
        assert caught.value.reason == "BAD_STEP"


def test_an_epoch_is_used_and_owes_answers_once_a_row_is_with_its_head() -> None:
    scheduler = Scheduler(queue_limit=5)
    facts = ring_of(rows=4)
    assert scheduler.attach(facts) == []
    assert (scheduler.used, scheduler.expects_answer) == (False, False)
    (opened,) = scheduler.submit(request_of("a", 3), 0.0)
    assert isinstance(opened, OpenRow)
    assert (scheduler.used, scheduler.expects_answer) == (True, True)
    assert (scheduler.load().waiting, scheduler.load().running) == (1, 0)
    for bad in ({"prompt_tokens": 0, "max_tokens": 1}, {"prompt_tokens": 1, "max_tokens": 0}):
        with pytest.raises(InvalidInput):
            scheduler.row_opened(control.RowOpened(row=opened.row, params_bytes=1, **bad))
    assert (
        scheduler.row_opened(control.RowOpened(row=99, prompt_tokens=1, params_bytes=1, max_tokens=1)) == []
    )
    actions = scheduler.row_opened(
        control.RowOpened(row=opened.row, prompt_tokens=1, params_bytes=1, max_tokens=1)
    )
    assert [type(action) for action in actions[:2]] == [Begin, AnnounceStep]
    assert (
        scheduler.row_opened(control.RowOpened(row=opened.row, prompt_tokens=1, params_bytes=1, max_tokens=1))
        == []
    )
    assert (scheduler.load().waiting, scheduler.load().running) == (0, 1)
    assert scheduler.load().kv_usage > 0
    assert scheduler.expects_answer


def test_a_row_that_its_head_refuses_fails_and_leaves_no_trace() -> None:
    scheduler = Scheduler(queue_limit=5)
    scheduler.attach(ring_of(rows=4))
    (opened,) = scheduler.submit(request_of("a", 3), 0.0)
    error = InvalidInput("x", reason="CONTEXT_TOO_LONG")
    (failed,) = scheduler.row_refused(opened.row, error)
    assert isinstance(failed, Fail)
    assert (failed.request.id, failed.error) == ("a", error)
    assert scheduler.row_refused(opened.row, error) == []
    assert not scheduler.expects_answer
    assert (scheduler.load().waiting, scheduler.load().running) == (0, 0)


def test_a_row_that_its_head_will_not_go_on_with_fails_and_is_evicted() -> None:
    scheduler = Scheduler(queue_limit=5)
    scheduler.attach(ring_of(rows=4))
    (opened,) = scheduler.submit(request_of("a", 9), 0.0)
    begun = scheduler.row_opened(
        control.RowOpened(row=opened.row, prompt_tokens=4, params_bytes=256, max_tokens=9)
    )
    assert any(isinstance(action, AnnounceStep) for action in begun)
    error = Internal("x", reason="GRAMMAR_FAILED")
    failed = [one for one in scheduler.row_refused(opened.row, error) if isinstance(one, Fail)]
    assert [(one.request.id, one.error) for one in failed] == [("a", error)]
    assert not [one for one in scheduler.row_refused(opened.row, error) if isinstance(one, Fail)]
    assert scheduler.load().running == 0


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_lanes_are_those_of_the_table_as_rows_come(stages: int) -> None:
    driver = Driver(stages)
    for number in range(1, 13):
        driver.ask(f"r{number}", max_tokens=500)
        driver.done(40)
        lanes = [len(rows) for rows in driver.lanes.values() if rows]
        assert sum(lanes) == number
        found, wanted = (
            round_seconds(sizes, COSTS.decode, stages, driver.facts.hop)
            for sizes in (lanes, driver.facts.lanes(number))
        )
        assert found <= 1.1 * wanted


def test_lanes_take_turns_with_two_steps_announced() -> None:
    driver = Driver(3)
    for name in "abc":
        driver.ask(name, max_tokens=300)
    driver.done(60)
    announced = [step.decode.lane for step in driver.under_way]
    assert sorted(announced) == [0, 0, 1, 1, 2, 2]
    decodes = [work for work in driver.work() if work != "p"][-30:]
    assert all(len(set(decodes[i : i + 3])) == 3 for i in range(len(decodes) - 3))


def test_chunks_go_back_to_back_when_nothing_decodes() -> None:
    driver = Driver(3, chunk=100)
    driver.ask("a", prompt=9500, max_tokens=2)
    assert driver.work() == ["p"] * MANY
    driver.done(3)
    assert driver.work() == ["p"] * (3 + MANY)
    driver.finish()
    chunks = [step.prefill.chunks[0] for step in driver.steps if step.HasField("prefill")]
    ends = [chunk.end for chunk in chunks]
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]]
    assert ends[-1] == 9500
    assert all(10 <= chunk.end - chunk.start <= 100 for chunk in chunks)
    assert [chunk.params_bytes for chunk in chunks] == [64] + [0] * (len(chunks) - 1)


def test_running_lanes_step_between_chunks() -> None:
    driver = Driver(2, chunk=100)
    driver.ask("a", max_tokens=1000)
    driver.ask("b", max_tokens=1000)
    driver.done(20)
    before = len(driver.steps)
    driver.ask("long", prompt=20000, max_tokens=2)
    driver.done(700)
    work = "".join(driver.work()[before:])
    assert work.count("p") >= 100
    gaps = [gap for gap in work.split("p")[1:-1] if gap]
    assert all(abs(gap.count("0") - gap.count("1")) <= 1 for gap in gaps)
    longest = max(map(len, work.replace("0", " ").replace("1", " ").split()))
    assert longest == 16, "with them a round of two milliseconds takes one and a half times as long"


def test_while_a_pause_lasts_a_lane_has_one_step_behind_it() -> None:
    """The head would keep a second one until the first one's tokens are back, and with it all behind it."""
    driver = Driver(2, chunk=512, costs=WHOLE)
    driver.ask("a", max_tokens=1000)
    driver.ask("b", max_tokens=1000)
    driver.done(20)
    driver.ask("short", prompt=300, max_tokens=100)
    driver.done(4)
    assert [step.WhichOneof("work") for step in driver.under_way] == ["prefill", "decode", "decode"]
    driver.ask("another", prompt=300, max_tokens=100)
    assert [step.WhichOneof("work") for step in driver.under_way][3:] == ["prefill"]
    driver.done(10)
    assert sorted(step.decode.lane for step in driver.under_way) == [0, 0, 1, 1]


def test_behind_a_first_token_that_is_on_its_way_a_short_prompt_has_a_pause() -> None:
    """It has as few chunks as alone."""
    costs = StepCosts(rows=((1, 1e-3),), tokens=((1, 1e-3), (4, 1.4e-3), (128, 12e-3), (512, 40e-3)))
    driver = Driver(2, chunk=512, costs=costs)
    lengths = []
    for name in ("first", "second"):
        before = len(driver.steps)
        driver.ask(name, prompt=300, max_tokens=100)
        chunks = [chunk for step in driver.steps[before:] for chunk in step.prefill.chunks]
        lengths.append([chunk.end - chunk.start for chunk in chunks])
    assert sum(lengths[0]) == sum(lengths[1]) == 300
    assert len(lengths[1]) == len(lengths[0])


def test_changes_are_gathered() -> None:
    driver = Driver(1)
    for number in range(20):
        driver.ask(f"r{number}", max_tokens=400)
    driver.done(60)
    steps = len(driver.steps)
    for row in range(1, 9):
        driver.done(stop=frozenset({row}))
    driver.done(8)
    changing = [step for step in driver.steps[steps:] if step.changes]
    assert len(driver.finished) == 8
    assert len(changing) <= 4


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    driver = Driver(1, budget=1024)
    driver.ask("a", prompt=100, max_tokens=1000)
    assert driver.failed == {"a": "TOO_LARGE_FOR_RING"}
    fail = next(action for action in driver.actions if isinstance(action, Fail))
    assert fail.error.metadata["capacity_tokens"] == "1024"
    assert fail.error.metadata["param"] == "max_tokens"
    assert "need memory for 1100 tokens and this ring holds 1024" in fail.error.message
    assert fail.error.hint == "send a shorter prompt or a lower max_tokens"
    assert any(isinstance(action, DiscardRow) for action in driver.actions)
    driver.ask("b", prompt=1024, max_tokens=0)
    assert driver.failed["b"] == "TOO_LARGE_FOR_RING"
    driver.ask("c", prompt=1023, max_tokens=0)
    driver.finish()
    assert driver.finished == {"c": 1}
    driver.ask("d", prompt=1000, max_tokens=0)
    driver.finish()
    assert driver.finished["d"] == 24


def open_with_images(*images: tuple[int, int]) -> Driver:
    """A ring of one whose chunks have 64 tokens at most, and whose head has read a prompt of 200."""
    driver = Driver(1, chunk=64)
    request = request_of("a", 4)
    (opened,) = (each for each in driver.scheduler.submit(request, 0.0) if isinstance(each, OpenRow))
    spans = [control.TokenSpan(begin=begin, end=end) for begin, end in images]
    told = control.RowOpened(row=opened.row, prompt_tokens=200, params_bytes=64, max_tokens=4, unbroken=spans)
    driver.rows[opened.row] = request
    driver.take(driver.scheduler.row_opened(told))
    return driver


def test_an_image_is_computed_in_one_chunk_or_refused() -> None:
    driver = open_with_images((10, 74))
    driver.finish()
    assert driver.finished == {"a": 4}
    refused = open_with_images((10, 75))
    assert refused.failed == {"a": "IMAGE_TOO_LARGE"}
    assert not refused.steps


@pytest.mark.parametrize("images", [((10, 10),), ((150, 201),), ((5, 9), (8, 12))])
def test_images_that_cannot_be_end_the_epoch(images: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        open_with_images(*images)
    assert caught.value.reason == "BAD_STEP"


@pytest.mark.parametrize(
    ("tokens", "max_rows", "fitting"), [(500, 64, 1), (924, 64, 1), (1, 2, 2), (0, 2, 2)]
)
def test_several_answers_that_do_not_fit_though_fewer_do_are_too_many(
    tokens: int, max_rows: int, fitting: int
) -> None:
    """The memory holds no more, or the ring has no more rows."""
    driver = Driver(1, budget=1024, max_rows=max_rows)
    driver.prompts["a"] = 100
    driver.take(driver.scheduler.submit(request_of("a", tokens, choices=3), 0.0))
    fail = next(action for action in driver.actions if isinstance(action, Fail))
    assert (fail.error.reason, fail.error.metadata["param"]) == ("TOO_LARGE_FOR_RING", "n")
    assert (
        f"3 answers are asked for and this ring computes {fitting} of this length at once"
        in fail.error.message
    )
    assert fail.error.hint == f"ask for {fitting} at most"


def test_without_a_limit_a_row_grows_while_there_is_memory() -> None:
    driver = Driver(1, budget=3 * EXTENSION)
    driver.ask("a", prompt=100, max_tokens=0)
    assert driver.scheduler.load().kv_usage < 0.5
    driver.finish()
    assert 2 * EXTENSION <= driver.finished["a"] <= 3 * EXTENSION - 100


def test_growth_comes_before_new_rows() -> None:
    driver = Driver(1, budget=2 * EXTENSION)
    driver.ask("a", prompt=256, max_tokens=0)
    driver.done(900)
    driver.ask("b", prompt=256, max_tokens=EXTENSION)
    assert driver.scheduler.load().waiting == 1
    driver.finish()
    assert driver.finished["a"] > EXTENSION - 256 - 1
    assert driver.finished["b"] == EXTENSION


def test_long_rows_do_not_make_a_lane_of_short_ones_long() -> None:
    driver = Driver(1, budget=32 * 1024, max_rows=32)
    for number in range(16):
        driver.ask(f"r{number}", prompt=100, max_tokens=300)
    driver.done(30)
    driver.ask("long", prompt=100, max_tokens=8000)
    driver.done(30)
    assert set(driver.lanes) == {0, 1}


def test_a_full_queue_refuses_and_makes_room_for_a_new_key() -> None:
    driver = Driver(1, max_rows=1, queue=10)
    for number in range(40):
        driver.ask(f"greedy{number}", key="greedy", max_tokens=2)
    refused = [name for name, reason in driver.failed.items() if reason == "QUEUE_FULL"]
    assert refused == [f"greedy{number}" for number in range(13, 40)]
    fail = next(action for action in driver.actions if isinstance(action, Fail))
    assert int(fail.error.metadata["retry_after"]) >= 1
    driver.ask("modest", key="modest", max_tokens=2)
    assert "modest" not in driver.failed
    assert driver.failed["greedy12"] == "QUEUE_FULL"


def test_a_full_queue_takes_what_a_head_has_begun() -> None:
    """From another ring, whose epoch ended: to its client that is a pause, and no refusal in mid-stream."""
    driver = Driver(1, max_rows=1, queue=1)
    for number in range(5):
        driver.ask(f"old{number}", max_tokens=2)
    assert driver.failed == {"old4": "QUEUE_FULL"}
    begun = with_progress(request_of("begun", 8), started=True, earlier_tokens=3, attempts=1)
    tried = with_progress(request_of("tried", 8), attempts=1)
    for request in (begun, tried):
        driver.prompts[request.id] = 10
        driver.take(driver.scheduler.submit(request, driver.now))
    driver.finish()
    assert {"begun", "tried"} <= set(driver.finished)


def one_each_ten_seconds() -> Driver:
    """A ring that runs one request at a time, ten seconds each, and has begun six of twenty."""
    driver = Driver(1, max_rows=1)
    for number in range(20):
        driver.ask(f"old{number}", max_tokens=1)
    for _ in range(6):
        driver.now += 10.0
        driver.done()
    return driver


def test_a_request_that_would_wait_for_too_long_is_refused_at_once() -> None:
    driver = one_each_ten_seconds()
    waiting = driver.scheduler.load().waiting
    assert waiting == 13
    driver.ask("patient")
    driver.ask("late", patience=120.0)
    driver.ask("another key", key="another", patience=60.0)
    assert driver.failed == {"late": "QUEUE_FULL"}
    refused = next(action for action in driver.actions if isinstance(action, Fail))
    assert refused.error.code == "RESOURCE_EXHAUSTED"
    assert refused.error.metadata["retry_after"] == "20", "the 140 s that it would wait, less its own 120"
    for number in range(20):
        driver.ask(f"new{number}")
    told = [action.error.metadata["retry_after"] for action in driver.actions if isinstance(action, Fail)]
    assert len(told) == 12
    assert set(told[1:]) == {"1"}, "without a deadline it is refused beyond 240 s"
    driver.finish()
    assert len(driver.finished) == 20 + 2 + 9


def test_what_goes_on_is_let_wait_however_long() -> None:
    driver = one_each_ten_seconds()
    driver.lose()
    moved = request_of("moved", 8, patience=5.0)
    with_progress(moved, due=0.0, deadline=1e9)
    driver.take(driver.scheduler.submit(moved, driver.now))
    driver.take(driver.scheduler.submit(with_progress(request_of("resumed", 8), claimed=1), driver.now))
    for name in ("moved", "resumed"):
        driver.prompts[name] = 10
    driver.ask("new", patience=5.0)
    assert driver.failed == {"new": "QUEUE_FULL"}, "also while no ring is there"
    driver.attach()
    driver.finish()
    assert len(driver.finished) == 22


def test_nothing_is_refused_by_a_ring_that_has_no_queue() -> None:
    """However long its answers take, and the pauses between them."""
    driver = one_each_ten_seconds()
    driver.finish()
    driver.now += 1000.0
    driver.ask("next", patience=0.01)
    driver.finish()
    assert "next" in driver.finished
    assert not driver.failed


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    driver = Driver(1, budget=1024)
    for number in range(80):
        driver.ask(f"small{number}", prompt=50, max_tokens=20, key="many")
        if number == 40:
            driver.ask("large", prompt=100, max_tokens=900, key="one")
    driver.finish()
    order = list(driver.finished)
    assert driver.finished["large"] == 900
    assert order.index("large") < 70


def test_what_an_epoch_has_left_goes_on_in_the_next_one() -> None:
    driver = Driver(1, max_rows=2)
    driver.ask("seen", max_tokens=50)
    driver.done(3)
    for name in ("first", "second", "third"):
        driver.ask(name, max_tokens=5)
    driver.lose()
    assert driver.scheduler.load().waiting == 4
    driver.attach()
    driver.finish()
    assert not driver.failed
    assert driver.finished == {"first": 5, "second": 5, "third": 5, "seen": 50}
    again = [action for action in driver.actions if isinstance(action, OpenRow)][-4]
    assert (again.request.id, len(again.resume.tokens if again.resume else ())) == ("seen", 3)
    begun = [action.request.id for action in driver.actions if isinstance(action, Begin)]
    assert begun == ["seen", "first", "second", "third"]


def test_a_request_that_ends_every_epoch_is_given_up() -> None:
    """And not one that was known to the head, and had to wait for memory each time."""
    driver = Driver(1, budget=10_000)
    driver.ask("poison", prompt=5000)
    driver.ask("waiting", prompt=9000)
    for _ in range(MAX_ATTEMPTS):
        assert not driver.failed
        driver.lose()
        driver.attach()
    assert driver.failed == {"poison": "REQUEST_GIVEN_UP"}
    assert driver.scheduler.load().running == 1


def test_a_request_whose_names_no_head_can_tell_is_given_up() -> None:
    scheduler, facts = Scheduler(queue_limit=5), ring_of(rows=4)
    scheduler.submit(request_of("a", 3), 0.0)
    for attempt in range(MAX_ATTEMPTS):
        (opened,) = scheduler.attach(facts)
        assert isinstance(opened, OpenRow), attempt
        told = control.RowOpened(row=opened.row, prompt_tokens=9, params_bytes=1, max_tokens=3, prefixes=b"x")
        with pytest.raises(InvalidInput) as caught:
            scheduler.row_opened(told)
        assert caught.value.reason == "BAD_PREFIXES"
        actions = scheduler.end_epoch(EpochEnded("gone"))
    assert [action.error.reason for action in actions if isinstance(action, Fail)] == ["REQUEST_GIVEN_UP"]


def ends_epochs(driver: Driver, kind: str) -> int:
    """Lets the ring run. Its epoch ends with each prefill or decode step of "poison". How many did."""
    ended = 0
    while driver.under_way:
        step = driver.under_way[0]
        rows = driver.sampled.get(step.number) or [chunk.row for chunk in step.prefill.chunks]
        if not step.HasField(kind) or all(driver.rows[row].id != "poison" for row in rows):  # type: ignore[arg-type]
            driver.done()
            continue
        ended += 1
        driver.lose()
        driver.attach()
    return ended


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(("stages", "max_rows"), [(1, 3), (3, 64)])
def test_what_ends_every_epoch_is_given_up_and_nothing_else(
    kind: str, place: int, stages: int, max_rows: int
) -> None:
    """Others are computed beside it, or wait. Each epoch brings a token of an answer, with its prefill."""
    driver = Driver(stages, max_rows=max_rows, chunk=64)
    driver.ask("running", max_tokens=500)
    driver.done(9)
    for number in range(10):
        driver.ask("poison" if number == place else f"r{number}", prompt=200, max_tokens=60)
    assert ends_epochs(driver, kind) == MAX_ATTEMPTS
    assert driver.failed == {"poison": "REQUEST_GIVEN_UP"}
    assert len(driver.finished) == 10
    fail = next(action for action in driver.actions if isinstance(action, Fail))
    assert f"{MAX_ATTEMPTS} times in a row" in fail.error.message
    assert "no more than a token of it each time" in fail.error.message


def test_an_answer_goes_on_over_short_epochs_of_which_some_bring_more_than_a_token() -> None:
    """Something else ends them, soon after each begins."""
    driver = Driver(1)
    driver.ask("slow", max_tokens=3 * MAX_ATTEMPTS)
    for steps in (*[1] * (MAX_ATTEMPTS - 1), 3, *[1] * (MAX_ATTEMPTS - 2), 3):
        driver.done(steps)
        driver.lose()
        driver.attach()
    driver.finish()
    assert driver.finished == {"slow": 3 * MAX_ATTEMPTS}


def test_a_request_outlives_epochs_that_something_ends_at_once_for_20_seconds() -> None:
    pauses = Backoff(FIRST_BACKOFF, LAST_BACKOFF, spread=0.0)
    assert sum(pauses.after(0.8) for _ in range(MAX_ATTEMPTS - 1)) > 20


def test_what_a_client_says_of_earlier_attempts_counts_and_makes_nobody_wait() -> None:
    driver = Driver(1)
    for name, claimed in (("first", MAX_ATTEMPTS - 1), ("second", MAX_ATTEMPTS - 2), ("third", 0)):
        driver.prompts[name] = 10
        request = request_of(name, 8, envelope=inference.Envelope(sealed=b"s"))
        with_progress(request, claimed=claimed)
        driver.take(driver.scheduler.submit(request, 0.0))
    assert len(driver.rows) == 3
    driver.done()
    driver.lose()
    assert driver.failed == {"first": "REQUEST_GIVEN_UP"}
    driver.attach()
    driver.done(8)
    driver.lose()
    assert driver.failed == {"first": "REQUEST_GIVEN_UP", "second": "EPOCH_ENDED", "third": "EPOCH_ENDED"}
    assert {request.id: request.progress.all_attempts for request in driver.rows.values()} == {
        "second": 1,
        "third": 1,
    }


def test_of_an_epoch_without_memory_the_request_fails_whose_prompt_was_computed() -> None:
    driver = Driver(1)
    driver.ask("decoding", max_tokens=20)
    driver.done(3)
    driver.ask("large", prompt=5000)
    driver.ask("waiting", prompt=9000)
    for _ in range(2):
        driver.lose("OUT_OF_MEMORY")
        driver.take(driver.scheduler.settled(out_of_memory=True))
        assert driver.failed == {"large": "OUT_OF_MEMORY"}
        assert driver.scheduler.load().waiting == 2


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_that_an_epoch_had_no_memory_may_be_known_after_its_end(out_of_memory: bool) -> None:
    driver = Driver(1)
    driver.ask("decoding", max_tokens=20)
    driver.done(3)
    driver.ask("large", prompt=5000)
    driver.ask("waiting", prompt=9000)
    driver.lose()
    assert driver.scheduler.suspect == "large"
    assert [each.id for each in driver.scheduler.drain()] == ["decoding", "waiting"]
    for _ in range(2):
        driver.take(driver.scheduler.settled(out_of_memory=out_of_memory))
        assert driver.failed == ({"large": "OUT_OF_MEMORY"} if out_of_memory else {})
        assert driver.scheduler.suspect == ""
    assert [each.id for each in driver.scheduler.drain()] == ([] if out_of_memory else ["large"])
    driver.attach()
    driver.take(driver.scheduler.settled(out_of_memory=True))
    assert len(driver.failed) == out_of_memory, "what the epoch before ended with says nothing of this one"


@pytest.mark.parametrize(("steps", "failed"), [(0, "OUT_OF_MEMORY"), (3, "EPOCH_ENDED")])
def test_whose_prompt_was_computed_is_known_of_one_that_its_client_goes_on_with(
    steps: int, failed: str
) -> None:
    driver = Driver(1)
    request = request_of("sealed", 8, envelope=inference.Envelope(sealed=b"s"))
    (action,) = driver.scheduler.submit(request, 0.0)
    assert isinstance(action, OpenRow)
    driver.rows[action.row] = request
    opened = driver.scheduler.row_opened(
        control.RowOpened(row=action.row, prompt_tokens=8, params_bytes=64, max_tokens=8, answered=3)
    )
    driver.tokens[action.row] = 3
    driver.take(opened)
    driver.done(steps)
    assert len(request.progress.choices[0].tokens) == steps
    driver.lose()
    driver.take(driver.scheduler.settled(out_of_memory=True))
    assert driver.failed == {"sealed": failed}


def test_a_sealed_answer_that_has_begun_is_its_clients_to_go_on_with() -> None:
    driver = Driver(1, max_rows=1)
    for name in ("seen", "waiting"):
        driver.ask(name).envelope.sealed = b"s"
    driver.done(3)
    driver.lose()
    assert driver.failed == {"seen": "EPOCH_ENDED"}
    assert driver.scheduler.load().waiting == 1


@pytest.mark.parametrize("answered", [0, 2, 4])
def test_a_head_that_goes_on_from_elsewhere_ends_the_epoch(answered: int) -> None:
    driver = Driver(1)
    request = driver.ask("a", max_tokens=20)
    driver.done(3)
    assert len(request.progress.choices[0].tokens) == 3
    driver.lose()
    (opened,) = (action for action in driver.scheduler.attach(driver.facts) if isinstance(action, OpenRow))
    with pytest.raises(InvalidInput) as caught:
        driver.scheduler.row_opened(
            control.RowOpened(
                row=opened.row, prompt_tokens=13, params_bytes=64, max_tokens=5, answered=answered
            )
        )
    assert caught.value.reason == "BAD_STEP"


@pytest.mark.parametrize("number", [0, 4, 99])
def test_steps_that_cannot_be_done_end_the_epoch(number: int) -> None:
    driver = Driver(1)
    driver.ask("a")
    with pytest.raises(InvalidInput) as caught:
        driver.scheduler.step_done(control.StepDone(step=number), 0.0)
    assert caught.value.reason == "BAD_STEP"


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 20])
def test_a_head_that_tells_of_too_few_tokens_ends_the_epoch(limit: int, silent: bool, others: int) -> None:
    """Otherwise the row would outgrow its memory, or never be done."""
    driver = Driver(2)
    driver.ask("a", max_tokens=limit)
    for number in range(2 * others):
        driver.ask(str(number), max_tokens=200)
    with pytest.raises(InvalidInput) as caught:
        for _ in range(100):
            step = driver.under_way.popleft()
            rows = driver.sampled.get(step.number, [chunk.row for chunk in step.prefill.chunks])
            outputs = [row_output(row, tokens=0) for row in rows if row > 1 or not silent]
            driver.take(driver.scheduler.step_done(control.StepDone(step=step.number, outputs=outputs), 0.0))
    assert caught.value.reason == "BAD_STEP"


def test_an_end_with_names_that_cannot_be_is_no_part_of_what_is_resumed() -> None:
    """Else the answer would go on behind its end."""
    driver = Driver(1)
    driver.ask("a", max_tokens=20)
    driver.done(2)
    (request,) = driver.rows.values()
    heard = len(request.progress.choices[0].tokens)
    step = driver.under_way.popleft()
    last = output(1, heard + 1, finish=inference.FINISH_REASON_STOP, prefixes=b"x")
    with pytest.raises(InvalidInput) as caught:
        driver.scheduler.step_done(control.StepDone(step=step.number, outputs=[last]), 0.0)
    assert caught.value.reason == "BAD_PREFIXES"
    assert len(request.progress.choices[0].tokens) == heard


def output(row: int, tokens: int, **fields: object) -> control.RowOutput:
    return row_output(row, tokens=tokens, **fields)


@pytest.mark.parametrize(
    "outputs",
    [
        [output(1, 1), output(1, 2)],
        [output(2, 1)],
        [output(1, 2)],
        [output(1, 0)],
        [output(9, 1)],
        [output(1, 1, text="x" * (TOKEN_BYTES + 1))],
        [output(1, 1, parsed=inference.Parsed(reasoning="x" * TOKEN_BYTES))],
        [output(1, 1, logprobs=[inference.TokenLogprob(spelling=b"x" * TOKEN_BYTES)])],
        [output(1, 1, held=[inference.TokenLogprob(spelling=b"x" * 2048)] * 1024)],
        [],
    ],
    ids=[
        "twice",
        "another-rows",
        "too-far",
        "too-few",
        "nobodys",
        "text",
        "parsed",
        "logprobs",
        "held",
        "none",
    ],
)
@pytest.mark.parametrize("more", [True, False])
def test_a_head_that_brings_what_no_step_owes_ends_the_epoch(
    outputs: list[control.RowOutput], more: bool
) -> None:
    """Row 1 is stepped, row 2 is still being prefilled; a step that brings nothing at all brings too few."""
    driver = Driver(1, chunk=10)
    driver.ask("a", max_tokens=9)
    driver.ask("b", prompt=50)
    chunks = {step.number: step.prefill.chunks[0] for step in driver.steps}
    number = next(number for number, chunk in chunks.items() if (chunk.row, chunk.end) == (1, 10))
    with pytest.raises(InvalidInput) as caught:
        driver.scheduler.step_done(control.StepDone(step=number, outputs=outputs, more=more), 0.0)
        driver.done(60)
    assert caught.value.reason == "BAD_STEP"


@pytest.mark.parametrize("more", [True, False])
def test_outputs_are_of_the_step_that_is_due(more: bool) -> None:
    driver = Driver(1)
    driver.ask("a", max_tokens=20)
    driver.done(1)
    due, next_one = [step.number for step in driver.under_way]
    for number in (next_one, due - 1, next_one + 1):
        with pytest.raises(InvalidInput) as caught:
            late = control.StepDone(step=number, outputs=[output(1, 2)], more=more)
            driver.scheduler.step_done(late, 0.0)
        assert caught.value.reason == "BAD_STEP"
    driver.finish()
    assert driver.finished == {"a": 20}


def test_text_that_was_held_back_comes_at_once() -> None:
    """As a call does, or what began like a stop string."""
    driver = Driver(1)
    driver.ask("a", max_tokens=40)
    driver.done(20)
    step = driver.under_way[0].number
    whole = output(1, 21, text="x" * 20 * TOKEN_BYTES)
    driver.scheduler.step_done(control.StepDone(step=step, outputs=[whole]), 0.0)
    with pytest.raises(InvalidInput):
        again = output(1, 22, text="x" * 20 * TOKEN_BYTES)
        driver.scheduler.step_done(control.StepDone(step=driver.under_way[1].number, outputs=[again]), 0.0)


def test_what_a_step_brings_may_come_in_several_messages() -> None:
    driver = Driver(1)
    driver.ask("a", max_tokens=1)
    part = control.StepDone(step=1, more=True)
    part.outputs.append(row_output(1, text="x", tokens=1))
    driver.take(driver.scheduler.step_done(part, 0.0))
    assert driver.finished == {"a": 1}
    driver.take(driver.scheduler.step_done(control.StepDone(step=1), 0.0))
    assert driver.finished == {"a": 1}
    assert driver.work() == ["p", "-"]


def test_a_step_that_samples_nothing_is_done_when_the_head_has_executed_it() -> None:
    driver = Driver(1, chunk=4)
    driver.ask("a", prompt=4 * (MANY + 4), max_tokens=1)
    assert driver.work() == ["p"] * MANY
    driver.take(driver.scheduler.steps_executed(2))
    assert driver.work() == ["p"] * (MANY + 2)
    driver.take(driver.scheduler.step_done(control.StepDone(step=1), 0.0))
    driver.take(driver.scheduler.steps_executed(4))
    driver.under_way = deque([driver.steps[-1]])
    driver.done()
    assert driver.finished == {"a": 1}


def test_a_lane_does_not_wait_for_a_row_that_reaches_its_limit() -> None:
    """Nor is it stepped for nobody when the last token of its last row is on the way."""
    driver = Driver(1)
    driver.ask("short", max_tokens=20)
    driver.ask("long", max_tokens=40)
    driver.done(8)
    assert driver.lanes == {0: [1, 2]}
    under_way = []
    while driver.under_way:
        driver.done()
        under_way.append(len(driver.under_way))
    assert driver.finished == {"short": 20, "long": 40}
    assert under_way[-2:] == [1, 0]
    assert set(under_way[:-2]) == {2}


def test_a_step_that_samples_nothing_is_done_with_a_later_one() -> None:
    driver = Driver(1, chunk=10)
    driver.ask("a", prompt=15, max_tokens=1)
    assert driver.work() == ["p", "p"]
    driver.under_way.popleft()
    driver.done()
    assert driver.finished == {"a": 1}
    assert not driver.scheduler.expects_answer


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(1, 900), st.integers(1, 40)), min_size=1, max_size=60
    ),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_everybody_starts_in_turn(work: list[tuple[str, int, int]], stages: int, max_rows: int) -> None:
    """Before the nth request of a key start at most n requests of every other key, and what was opened."""
    driver = Driver(stages, max_rows=max_rows, chunk=64, budget=2048, queue=1000)
    for index, (key, prompt, limit) in enumerate(work):
        driver.ask(str(index), prompt, limit, key)
    driver.finish()
    assert len(driver.finished) == len(work)
    begun = [chunk.row for step in driver.steps for chunk in step.prefill.chunks if chunk.start == 0]
    started = [int(driver.rows[row].id) for row in begun]
    keys = {key for key, _, _ in work}
    ahead: Counter[str] = Counter()
    for index, (key, _, _) in enumerate(work):
        ahead[key] += 1
        assert started.index(index) <= ahead[key] * len(keys) + OPEN_AHEAD


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 3000), st.integers(1, 40)), max_size=60),
    st.integers(1, 4),
    st.integers(0, 200),
    st.sampled_from([(64, 1 << 40), (8, 1 << 40), (64, 8192), (3, 8192)]),
)
def test_a_short_question_waits_for_one_turn_of_each_other_key(
    work: list[tuple[str, int, int]], stages: int, steps: int, room: tuple[int, int]
) -> None:
    """Opened, given memory and prefilled by turns, however many prompts other keys have sent before it."""
    rows, budget = room
    driver = Driver(stages, max_rows=rows, chunk=256, budget=budget, queue=1000)
    for index, (key, prompt, limit) in enumerate(work):
        driver.ask(f"{index}", prompt, limit, key)
    driver.done(steps)
    ample = driver.scheduler.planner.ledger.rows < rows and budget > 8192  # type: ignore[union-attr]
    before = len(driver.steps)
    driver.ask("short", 1, 5, "another")
    (own,) = [row for row, request in driver.rows.items() if request.id == "short"]
    driver.finish()
    chunks = [chunk for step in driver.steps[before:] for chunk in step.prefill.chunks]
    earlier = chunks[: [chunk.row for chunk in chunks].index(own)]
    later = Counter(driver.rows[chunk.row].key for chunk in earlier if chunk.start == 0 and chunk.row > own)
    assert max(later.values(), default=0) <= 1, (
        "of the prompts that were opened after it one may begin before"
    )
    if ample:
        assert max(Counter(driver.rows[chunk.row].key for chunk in earlier).values(), default=0) <= 1


def test_a_question_beside_a_burst_of_another_key_is_not_taken_to_wait_for_all_of_it() -> None:
    driver = Driver(max_rows=4, chunk=256)
    for index in range(40):
        driver.ask(f"{index}", 3000, 40, "burst")
    for _ in range(900):
        driver.done()
        driver.now += 1.0
    driver.ask("refused", 10, 5, "burst", patience=120.0)
    driver.ask("short", 10, 5, "another", patience=120.0)
    assert driver.failed == {"refused": "QUEUE_FULL"}


@given(st.lists(st.integers(1, 25), max_size=12))
def test_bytes_that_come_later_do_not_overtake_a_prompt_that_waits_for_room(later: list[int]) -> None:
    """By a bound of 100 bytes: the real one would have each example fill memory."""
    scheduler, rows = Scheduler(queue_limit=100), dict[str, int]()
    scheduler.attach(ring_of(member_with(2048), rows=64))

    def submit(name: str, key: str, size: int) -> None:
        take(scheduler.submit(request_of(name, 5, key, envelope=inference.Envelope(sealed=bytes(size))), 0.0))

    def take(actions: list[Action]) -> None:
        rows.update({one.request.id: one.row for one in actions if isinstance(one, OpenRow)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sealring.gateway.scheduler.admission.OPEN_BYTES", 100)
        submit("first", "many", 50)
        submit("large", "one", 100)
        for index, size in enumerate(later):
            submit(f"later {index}", "many", size)
        assert set(rows) == {"first"}
        take(
            scheduler.row_opened(
                control.RowOpened(row=rows["first"], prompt_tokens=3, params_bytes=0, max_tokens=5)
            )
        )
    assert set(rows) == {"first", "large"}


def test_what_is_to_be_soon_goes_first_and_what_is_too_late_fails() -> None:
    scheduler = Scheduler(queue_limit=100)
    scheduler.submit(request_of("a", 1, "k"), 0.0)
    scheduler.submit(request_of("b", 1, "k", patience=2.0), 1.0)
    scheduler.submit(request_of("c", 1, "k", patience=8.0), 1.0)
    assert scheduler.expire(2.9) == []
    (failed,) = scheduler.expire(3.0)
    assert isinstance(failed, Fail)
    assert (failed.request.id, failed.error.reason, failed.error.code) == (
        "b",
        "DEADLINE_PASSED",
        "DEADLINE_EXCEEDED",
    )
    assert [request.id for request in scheduler.drain()] == ["c", "a"]
    assert scheduler.expire(1e9) == []


def test_a_row_that_waits_for_memory_is_given_back_and_one_that_has_begun_goes_on() -> None:
    scheduler = Scheduler(queue_limit=100)
    scheduler.attach(ring_of(member_with(512)))
    for name in ("runs", "waits"):
        actions = scheduler.submit(request_of(name, 200, "k", patience=1.0), 0.0)
        (opened,) = [action for action in actions if isinstance(action, OpenRow)]
        scheduler.row_opened(
            control.RowOpened(row=opened.row, prompt_tokens=200, params_bytes=0, max_tokens=200)
        )
    assert scheduler.expire(0.999) == []
    discarded, failed = scheduler.expire(1.0)
    assert discarded == DiscardRow(2)
    assert isinstance(failed, Fail)
    assert failed.request.id == "waits"
    assert scheduler.load().running == 1


def test_a_row_that_waits_for_its_first_chunk_with_memory_fails_at_its_deadline() -> None:
    scheduler = Scheduler(queue_limit=100)
    scheduler.attach(ring_of(member_with(1 << 20)))
    for name in ("runs", "waits"):
        actions = scheduler.submit(request_of(name, 5000, "k", patience=1.0), 0.0)
        (opened,) = [action for action in actions if isinstance(action, OpenRow)]
        scheduler.row_opened(
            control.RowOpened(row=opened.row, prompt_tokens=5000, params_bytes=0, max_tokens=200)
        )
    discarded, failed = scheduler.expire(1.0)
    assert discarded == DiscardRow(2)
    assert isinstance(failed, Fail)
    assert (failed.request.id, failed.error.reason) == ("waits", "DEADLINE_PASSED")
    assert scheduler.expire(1e9) == []


def test_a_key_whose_prompts_the_head_still_reads_holds_up_itself_alone() -> None:
    """Its prompts take all the room that there is, and another key's is opened and begun all the same."""
    scheduler, opened = Scheduler(queue_limit=1000), dict[str, int]()
    actions = scheduler.attach(ring_of(member_with(2048), rows=4))
    for index in range(2 * OPEN_AHEAD):
        actions += scheduler.submit(request_of(f"costly {index}", 5, "a"), 0.0)
    for index in range(3):
        actions += scheduler.submit(request_of(f"short {index}", 5, "b"), 0.0)
    for action in actions:
        assert isinstance(action, OpenRow)
        opened[action.request.id] = action.row
    assert [name for name in opened if name.startswith("short")] == ["short 0"]
    row = opened["short 0"]
    answer = control.RowOpened(row=row, prompt_tokens=3, params_bytes=0, max_tokens=5)
    begun = scheduler.row_opened(answer)
    steps = [action.step for action in begun if isinstance(action, AnnounceStep)]
    assert [chunk.row for step in steps for chunk in step.prefill.chunks] == [row]
    after = scheduler.steps_executed(steps[-1].number)
    assert [action.request.id for action in after if isinstance(action, OpenRow)] == ["short 1"]


def test_the_head_reads_images_of_so_many_bytes_at_once_and_texts_meanwhile() -> None:
    scheduler = Scheduler(queue_limit=10)
    scheduler.attach(ring_of(member_with(2048)))
    large = inference.Envelope(sealed=bytes(OPEN_BYTES // 2 + 1))

    def opened(actions: list[Action]) -> list[str]:
        return [action.request.id for action in actions if isinstance(action, OpenRow)]

    assert opened(scheduler.submit(request_of("one", 5, "a", envelope=large), 0.0)) == ["one"]
    assert opened(scheduler.submit(request_of("two", 5, "b", envelope=large), 0.0)) == []
    assert opened(scheduler.submit(request_of("after", 5, "b"), 0.0)) == []
    assert opened(scheduler.submit(request_of("text", 5, "c"), 0.0)) == ["text"]
    read = control.RowOpened(row=1, prompt_tokens=3, params_bytes=0, max_tokens=5)
    assert opened(scheduler.row_opened(read)) == ["two", "after"]


def test_a_prompt_of_any_size_is_read_where_no_other_large_one_is() -> None:
    scheduler = Scheduler(queue_limit=10)
    scheduler.attach(ring_of(member_with(2048)))
    largest = inference.Envelope(sealed=bytes(OPEN_BYTES + 1))
    assert any(
        isinstance(one, OpenRow) for one in scheduler.submit(request_of("one", 5, "a", envelope=largest), 0.0)
    )


@given(st.permutations(range(4)))
def test_rows_begin_in_the_order_in_which_their_prompts_are_read(order: list[int]) -> None:
    """Members take steps in which a row begins after others with higher numbers."""
    scheduler = Scheduler(queue_limit=10)
    actions = scheduler.attach(ring_of(member_with(2048)))
    composition = Composition(epoch=1, max_rows=8, prefill_chunk=64)
    for index in order:
        actions += scheduler.submit(request_of(f"{index}", 5, f"{index}"), 0.0)
    rows = [action.row for action in actions if isinstance(action, OpenRow)]
    begun = list[int]()
    for place in order:
        opened = control.RowOpened(row=rows[place], prompt_tokens=3, params_bytes=0, max_tokens=5)
        todo = deque(scheduler.row_opened(opened))
        while todo:
            if isinstance(action := todo.popleft(), AnnounceStep):
                step = composition.apply(action.step)
                begun.extend(chunk.row for chunk in step.chunks)
                todo.extend(scheduler.steps_executed(step.number))
    assert begun == [rows[place] for place in order]


def test_a_scheduler_that_holds_finishes_what_it_has_begun_and_begins_nothing() -> None:
    driver = Driver(max_rows=1)
    driver.ask("a", max_tokens=3)
    driver.take(driver.scheduler.hold(True))
    driver.ask("b")
    assert driver.scheduler.counts() == (1, 1)
    driver.done()
    driver.lose()
    assert driver.scheduler.counts() == (1, 1), "an answer that was begun is not over with its epoch"
    driver.attach()
    driver.finish()
    assert set(driver.finished) == {"a"}
    assert driver.scheduler.counts() == (0, 1)
    driver.take(driver.scheduler.hold(False))
    driver.finish()
    assert set(driver.finished) == {"a", "b"}


def test_a_plan_that_members_would_refuse_is_not_announced_and_ends_the_epoch() -> None:
    """Also if no member is to answer. A client that asks has done nothing wrong."""
    driver = Driver()
    driver.ask("a")
    planner, announced = driver.scheduler.planner, len(driver.steps)
    assert planner is not None
    planner.board.plan(control.Change(drop=control.Drop(prefix=9)))  # which nobody keeps
    driver.actions.clear()
    driver.ask("b")
    assert len(driver.steps) == announced
    (end,) = driver.actions
    assert isinstance(end, EndEpoch)
    assert isinstance(end.error.__cause__, InvalidInput)
    with pytest.raises(PlanError):
        driver.done()
    driver.take(driver.scheduler.cancel("a"))
    driver.take(driver.scheduler.end_epoch(EpochEnded("gone")))
    driver.under_way.clear()
    driver.lanes.clear()
    driver.take(driver.scheduler.attach(driver.facts))
    driver.done(100)
    assert driver.finished == {"b": 8}
