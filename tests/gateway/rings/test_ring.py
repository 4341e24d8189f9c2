"""The fate of requests over one or more epochs."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import structlog
from rowoutput import row_output

from sealring.edge.inference.answer import Answer
from sealring.edge.metrics import Metrics
from sealring.gateway.rings import requests, served
from sealring.gateway.rings import ring as ring_module
from sealring.gateway.rings.control import Unheard
from sealring.gateway.rings.epoch import ServingEpoch, epoch_ended
from sealring.gateway.rings.forwarded import Sent
from sealring.gateway.rings.members import MemberTarget
from sealring.gateway.rings.ring import PATIENCE_SECONDS, Ring, Shared
from sealring.gateway.scheduler import (
    AnnounceStep,
    Finish,
    RecallBlocks,
    Request,
    RingLoad,
)
from sealring.mesh.errors import EpochEnded, FailedPrecondition, InvalidInput, SealringError, Unavailable
from sealring.mesh.prompt.images import NOTE
from sealring.mesh.prompt.validate import MAX_TEXT_ENVELOPE_BYTES
from sealring.mesh.ring import Chain, Composition, ResolvedStep
from sealring.mesh.rpc import Backoff, to_problem
from sealring.mesh.rpc.protocol import OLDEST_PROTOCOL
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference
from sealring.v1.model_pb2 import ModelCard

SERVING = ServingEpoch("ring-0", 4, "model", (), 8, 64, 4096, False, 0, 1, False, False)


ATTACHED = control.Attached(kv_bytes_per_token=1, kv_budget=4096)


class Members:
    """A gateway.rings.control.ControlStreams whose members take everything and never answer. It keeps what it
    is sent, and how often an answer was said to be owed or to have come."""

    epoch = 4

    def __init__(self) -> None:
        self.guest = self.saves_power = False
        self.streams: list[object] = []
        self.steps: list[control.Step] = []
        self.recalls: list[control.Recall] = []
        self.head: list[control.ScheduleRequest] = []
        self.owed = self.heard = 0

    def send_all(self, message: bytes) -> None:
        request = control.ScheduleRequest.FromString(message)
        if request.HasField("recall"):
            self.recalls.append(request.recall)
        else:
            self.steps.append(request.step)

    def send_head(self, message: bytes, written: Any = None) -> None:
        self.head.append(control.ScheduleRequest.FromString(message))
        if written is not None:
            written()

    def send_prompt(self, message: bytes, *, key: str = "") -> None:
        self.send_head(message)

    def withdraw(self, key: str) -> bool:
        return False

    def stir(self) -> None:
        pass

    def expect(self) -> None:
        self.owed += 1

    def answered(self) -> None:
        self.heard += 1


class Serving:
    """A ring that serves, or with `serving` None is down. With `elsewhere` another takes what waits here."""

    def __init__(
        self,
        serving: ServingEpoch | None = SERVING,
        *,
        elsewhere: bool = False,
        idle_prefill: bool = True,
    ) -> None:
        self.elsewhere = elsewhere
        self.now = 1000.0
        self.lost = 0
        self.moved: list[str] = []
        self.metrics = Metrics()
        self.members = Members()
        none: Any = None
        shared = Shared(none, self.metrics, 9, idle_prefill, clock=self.time, formable=self.time)
        self.ring = Ring("ring-0", "model", shared, self._lost)
        if serving is not None:
            self.begin(serving)

    def time(self) -> float:
        return self.now

    def begin(self, serving: ServingEpoch = SERVING, *attached: control.Attached) -> None:
        """An epoch serves, with members as they are by default."""
        self.ring.serving = serving
        self.ring.begin(serving, self.members, attached or [ATTACHED])  # type: ignore[arg-type]

    def _lost(self, lost: Ring) -> None:
        self.lost += 1
        if self.elsewhere:
            self.moved += [request.id for request, _ in lost.take_waiting()]

    def ask(self, name: str, floor: int = 0, **fields: Any) -> Answer:
        answer = Answer()
        envelope = fields.pop("envelope", inference.Envelope())
        self.ring.submit(Request(name, "key", 5, envelope, "model", min_trust=floor, **fields), answer)
        return answer

    def hear(self, **message: Any) -> None:
        self.ring.handle(control.ScheduleResponse(**message))

    def opened(self, row: int, prompt: int = 2, answered: int = 0) -> None:
        self.hear(
            opened=control.RowOpened(
                row=row, prompt_tokens=prompt + answered, answered=answered, max_tokens=5
            )
        )

    def counted(self, name: str) -> float:
        labels = {"model_name": "model"}
        return self.metrics.registry.get_sample_value(f"sealring_{name}_total", labels) or 0.0


async def read(answer: Answer) -> list[inference.GenerateResponse]:
    async with asyncio.timeout(200):
        return [event async for event in answer]


async def failure(answer: Answer) -> SealringError:
    with pytest.raises(SealringError) as caught:
        await read(answer)
    return caught.value


@pytest.mark.parametrize("reason", ["STAGE_FAILED", "OUT_OF_MEMORY", "RECORD_LOST", "LEFT"])
def test_a_model_that_fails_is_not_called_a_lost_member(reason: str) -> None:
    named = reason in ("STAGE_FAILED", "OUT_OF_MEMORY")
    assert epoch_ended(reason).reason == (reason if named else "EPOCH_ENDED")


def test_the_abilities_of_a_model_are_those_that_its_head_reports_and_that_are_known() -> None:
    ring = Serving(None)
    head = control.Attached(kv_budget=4096, capabilities=["thinking", "tools", "x" * 99, "tools"])
    ring.begin(SERVING, head, control.Attached(kv_budget=4096, capabilities=["y"]))
    assert ring.ring.abilities.capabilities == ["tools", "thinking"]


async def test_requests_wait_from_the_moment_on_that_the_coordinator_ends_an_epoch() -> None:
    """Also while its streams are still being closed."""
    serving = Serving()
    ring = serving.ring
    clear, sealed = inference.Envelope(clear=inference.Prompt(text="ask")), inference.Envelope(sealed=b"s")
    begun, hidden, later = Answer(), Answer(), Answer()
    ring.submit(Request("begun", "key", 5, clear, "model"), begun)
    ring.submit(Request("hidden", "key", 5, sealed, "model"), hidden)
    for row in (1, 2):
        opened = control.RowOpened(row=row, prompt_tokens=2, max_tokens=5)
        ring.handle(control.ScheduleResponse(opened=opened))
    output = row_output(1, text="so far", tokens=1, token=77)
    ring.handle(control.ScheduleResponse(done=control.StepDone(step=1, outputs=[output])))
    output = row_output(2, sealed=b"so far", tokens=1)
    ring.handle(control.ScheduleResponse(done=control.StepDone(step=2, outputs=[output])))
    ring.leave()
    ring.submit(Request("later", "key", 1, inference.Envelope(), "model"), later)
    assert ring.own.scheduler.load().waiting == 2
    assert not later.over
    with pytest.raises(EpochEnded, match="the coordinator ended") as caught:
        _ = [event async for event in hidden]
    assert caught.value.hint == "send the request again"
    serving.members = Members()
    serving.begin()
    again = serving.members.head[0].open
    assert (again.request_id, again.max_tokens) == ("begun", 5)
    assert again.envelope.clear == inference.Prompt(text="ask", resume=inference.Resume(tokens=[77]))
    assert not clear.clear.HasField("resume")
    assert not begun.over


def test_a_head_owes_an_answer_as_long_as_it_has_a_prompt() -> None:
    ring = Serving()
    for name in ("one", "two"):
        ring.ask(name)
    assert ring.members.owed == 2
    problem = to_problem(InvalidInput("no", reason="NO"))
    for row, owed in ((1, 3), (2, 3)):
        ring.hear(refused=control.RowRefused(row=row, problem=problem))
        assert ring.members.owed == owed


STOP = inference.FINISH_REASON_STOP


async def test_an_answer_from_beginning_to_end() -> None:
    ring = Serving(dataclasses.replace(SERVING, min_trust=2, roster_version=9, epoch=4))
    answer = ring.ask("one", floor=2, routing_key=b"key")
    assert ring.members.owed == 1
    ring.opened(1, prompt=100)
    assert [len(step.prefill.chunks) for step in ring.members.steps] == [1, 1]
    assert ring.counted("steps") == 2
    owed = ring.members.owed
    for step in (1, 2):
        outputs = [row_output(1, text="all", tokens=1, finish=STOP)][: step - 1]
        ring.hear(done=control.StepDone(step=step, outputs=outputs))
    assert ring.members.heard == 3
    assert ring.members.owed > owed
    started, delta, finished = await read(answer)
    assert started.started == inference.Started(
        request_id="one",
        model="model",
        ring="ring-0",
        prompt_tokens=100,
        min_trust=2,
        roster_version=9,
        epoch=4,
        own=ModelCard(),
    )
    assert delta.delta.text == "all"
    assert finished.finished == inference.Finished(reason=STOP, prompt_tokens=100, completion_tokens=1)
    assert answer.timings.queued is not None
    counted = [
        ring.counted(name) for name in ("prefix_cache_queries", "prefix_cache_hits", "routed_by_key_hits")
    ]
    assert counted == [100, 0, 0]
    assert not ring.ring.answers
    assert not ring.ring.own.rows.unstarted


@pytest.mark.parametrize(
    ("own", "unnamed"),
    [
        (ModelCard(temperature=0, top_k=7), 0b1010),
        (ModelCard(top_p=0.5), 0),
        (ModelCard(), 0),
        (ModelCard(temperature=float("nan"), top_k=7), 0),
        (ModelCard(temperature=-1), 0),
    ],
)
async def test_a_head_is_told_what_a_request_does_not_name_if_it_fills_that_in(
    own: ModelCard, unnamed: int
) -> None:
    """Else the request is as releases before sent it, and so is its hash in a receipt. The request itself
    stays as it is: the next head may fill more in."""
    ring = Serving(None)
    asked = inference.Envelope(clear=inference.Prompt(text="?", sampling=inference.Sampling(unnamed=0b1010)))
    answer = ring.ask("one", envelope=asked)
    ring.begin(SERVING, control.Attached(own=own, kv_budget=1 << 20, kv_bytes_per_token=1))
    (given,) = (message.open for message in ring.members.head)
    assert given.envelope.clear.sampling.unnamed == unnamed
    assert asked.clear.sampling.unnamed == 0b1010
    ring.opened(1)
    for step in (1, 2):
        ring.hear(done=control.StepDone(step=step))
    told = (await anext(answer)).started.own
    assert told == (own if unnamed or own.HasField("top_p") else ModelCard())


async def test_a_request_says_how_long_it_waited_until_its_model_was_loaded() -> None:
    ring = Serving(None)
    early = ring.ask("early")
    early.timings.routed -= 7
    ring.begin()
    late = ring.ask("late")
    for row in (1, 2):
        ring.opened(row)
    for step in (1, 2):
        ring.hear(done=control.StepDone(step=step))
    waited = [(await anext(answer)).started.load_ms for answer in (early, late)]
    assert waited[0] >= 7000
    assert waited[1] == 0


async def test_several_answers_tell_how_each_ended_and_kept_tokens_who_led_to_them() -> None:
    ring = Serving()
    for number, routing_key in enumerate((b"key", b"", b"key")):
        answer = ring.ask(f"r{number}", routing_key=routing_key)
        request = Request(f"r{number}", "key", 5, inference.Envelope(), "model", routing_key=routing_key)
        ends = [inference.FinishedChoice(reason=STOP, completion_tokens=tokens) for tokens in (2, 3)]
        finished = inference.Finished(
            reason=STOP,
            completion_tokens=5,
            cached_tokens=3 * (number < 2),
            drafted_tokens=7,
            accepted_tokens=3,
            choices=ends,
        )
        ring.ring.own.perform([Finish(request, finished)])
        assert (await read(answer))[-1].finished == finished
    assert ring.counted("routed_by_key_hits") == 1
    assert ring.counted("spec_decode_num_draft_tokens") == 21
    assert ring.counted("spec_decode_num_accepted_tokens") == 9


@pytest.mark.parametrize(("share", "scope"), [(True, "all"), (False, "key theirs")])
def test_what_the_head_is_told_of_a_request(share: bool, scope: str) -> None:
    ring = Serving(dataclasses.replace(SERVING, share_prefixes=share))
    ring.ask("one", tenant="theirs")
    ring.ask("two", choices=2)
    first, second = (message.open for message in ring.members.head)
    assert (first.row, first.request_id, first.max_tokens) == (1, "one", 5)
    assert (first.choices, second.choices, first.prefix_scope) == (0, 2, scope)


async def test_a_prompt_that_demands_more_trust_is_not_given_away() -> None:
    ring = Serving(dataclasses.replace(SERVING, min_trust=2))
    assert (await failure(ring.ask("one", floor=3))).reason == "TRUST_BELOW_FLOOR"
    assert not ring.members.head
    ring.ask("two", floor=2)
    assert len(ring.members.head) == 1


async def test_links_in_clear_get_nothing_sealed_nor_for_which_trust_is_demanded() -> None:
    ring = Serving(dataclasses.replace(SERVING, min_trust=2, clear_links=True))
    sealed = inference.Envelope(sealed=b"x")
    for refused in (ring.ask("one", floor=1), ring.ask("two", envelope=sealed)):
        assert (await failure(refused)).reason == "LINKS_IN_CLEAR"
    assert not ring.members.head
    ring.ask("three")
    assert len(ring.members.head) == 1


def shown(role: str) -> inference.Envelope:
    said = [inference.ChatMessage(role=role, images=[inference.Image(data=b"picture")])]
    return inference.Envelope(clear=inference.Prompt(chat=inference.Chat(messages=said)))


async def test_a_model_that_cannot_see_gets_no_image_and_no_long_sealed_prompt() -> None:
    ring = Serving()
    long = inference.Envelope(sealed=bytes((8 << 20) + 1))
    assert (await failure(ring.ask("one", envelope=shown("user")))).reason == "MODEL_CANNOT_SEE"
    assert (await failure(ring.ask("two", envelope=long))).reason == "ENVELOPE_TOO_LONG"
    ring.ask("three", envelope=shown("tool"))
    (given,) = (message.open for message in ring.members.head)
    assert [one.content for one in given.envelope.clear.chat.messages] == [NOTE]


async def test_a_head_that_lacks_what_reads_images_is_named() -> None:
    ring = Serving(None)
    head = control.Attached(vision_not_installed=True, kv_budget=1 << 20, kv_bytes_per_token=1)
    ring.begin(SERVING, head)
    assert (await failure(ring.ask("one", envelope=shown("user")))).reason == "VISION_NOT_INSTALLED"


def test_a_model_that_sees_gets_images() -> None:
    ring = Serving(None)
    ring.begin(SERVING, control.Attached(capabilities=["vision"], kv_budget=1 << 20, kv_bytes_per_token=1))
    ring.ask("one", envelope=shown("user"))
    (given,) = (message.open for message in ring.members.head)
    assert given.envelope == shown("user")


async def test_the_head_is_told_what_nobody_waits_for_and_tells_what_it_will_not_have() -> None:
    ring = Serving()
    ring.ask("one")
    refused = ring.ask("two")
    ring.ring.cancel("nobody")
    ring.ring.cancel("one")
    ring.ring.cancel("one")
    assert [message.discard.row for message in ring.members.head[2:]] == [1]
    problem = to_problem(InvalidInput("too long", reason="PROMPT_TOO_LONG"))
    ring.hear(refused=control.RowRefused(row=2, problem=problem))
    assert (await failure(refused)).reason == "PROMPT_TOO_LONG"
    assert not ring.ring.own.rows.unstarted


def test_a_step_of_nothing_but_changes_is_owed_an_answer_too() -> None:
    ring = Serving()
    ring.ring.own.perform([AnnounceStep(control.Step(number=1))])
    assert ([step.number for step in ring.members.steps], ring.members.owed) == ([1], 1)


def test_what_a_row_takes_of_a_prefix_is_counted_and_what_it_reads_from_disk_is_asked_of_all() -> None:
    ring = Serving()
    chain = Chain(bytes(16), (bytes(16),))
    ring.ring.own.perform([RecallBlocks(3, chain, 1)])
    assert ring.members.recalls == [control.Recall(number=3, chain=chain.packed(), row=1)]
    chunk = control.Chunk(row=1, start=64, end=100, prompt_tokens=100, prefix=2)
    ring.ring.own.perform([AnnounceStep(control.Step(number=1, prefill=control.Prefill(chunks=[chunk])))])
    assert [ring.counted(f"prefix_cache_{what}") for what in ("queries", "hits")] == [100, 64]


def test_an_answer_hears_of_each_chunk_of_its_prompt_until_the_last() -> None:
    ring, heard = Serving(), list[tuple[int, int]]()
    answer: Any = ring.ask("one")
    answer.prefilled = lambda done, tokens: heard.append((done, tokens))
    ring.opened(1, prompt=100)
    assert heard == [(0, 100), (64, 100)]
    rows = ring.ring.own.rows
    assert rows is not None
    again = control.Chunk(row=1, start=64, end=100, prompt_tokens=100)
    rows.announce(control.Step(number=3, prefill=control.Prefill(chunks=[again])))
    assert len(heard) == 2


def test_a_pong_is_no_answer_and_after_the_end_nothing_is_heard() -> None:
    ring = Serving()
    ring.ask("one")
    ring.opened(1, prompt=100)
    heard = ring.members.heard
    planner = ring.ring.own.scheduler.planner
    assert planner is not None
    assert planner.under_way == 2
    ring.hear(pong=control.Pong(steps=1))
    assert planner.under_way == 1
    assert ring.members.heard == heard
    ring.ring.leave()
    ring.hear(done=control.StepDone(step=2))
    ring.hear(pong=control.Pong(steps=2))
    assert ring.members.heard == heard


async def test_an_accepted_request_waits_for_a_ring_however_long_that_is_down() -> None:
    """Its machines may be asleep, and its client waits."""
    ring = Serving(None)
    answer = ring.ask("one")
    ring.now += 100 * PATIENCE_SECONDS
    ring.ring.tick()
    assert not ring.ring.patient
    assert ring.ring.load().waiting == 1
    ring.ring.fail_all(Unavailable("the ring is gone", reason="RING_GONE"))
    assert (await failure(answer)).reason == "RING_GONE"


async def test_a_ring_that_serves_is_waited_for_and_a_request_no_longer_than_it_says() -> None:
    ring = Serving()
    ring.now += 10 * PATIENCE_SECONDS
    patient = ring.ask("one", patience=20.0)
    ring.ring.tick()
    assert ring.ring.patient
    assert not patient.over
    ring.now += 20
    ring.ring.tick()
    assert (await failure(patient)).reason == "DEADLINE_PASSED"


class Streams(Members):
    """Streams of which `ends` says how the run of each epoch does, in turn."""

    def __init__(self, epoch: int, ends: list[Exception | None], held: asyncio.Event | None) -> None:
        super().__init__()
        self.epoch, self.ends, self._held = epoch, ends, held
        self.cancelled = self.out_of_memory = False
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        self._fault.set_exception(error)

    async def attach(self) -> list[control.Attached]:
        if self.ends and self.ends[0] is not None and not isinstance(self.ends[0], EpochEnded):
            raise self.ends.pop(0)  # type: ignore[misc]
        return [ATTACHED]

    async def run(self, handle: Callable[[control.ScheduleResponse], None]) -> None:
        if self.ends and (end := self.ends.pop(0)) is not None:
            if self._held is not None:
                await self._held.wait()
            raise end
        await self._fault

    def cancel(self) -> None:
        self.cancelled = True


class Epochs(Serving):
    """A ring with sessions made here. It notes how long it rested in between; that time passes at once."""

    def __init__(self, *ends: Exception | None, **options: Any) -> None:
        super().__init__(None, **options)
        self.made: list[Streams] = []
        self.rested: list[float] = []
        self.yielded: list[bool] = []
        self.held: asyncio.Event | None = None
        """Until it is set, no run ends."""
        self.ends = list(ends)
        self.guest = False
        self._sleep = asyncio.sleep

    def session(
        self, ring: str, epoch: int, *given: Any, clear_links: bool, yields: bool, busy: Any
    ) -> Streams:
        self.members = made = Streams(epoch, self.ends, self.held)
        made.guest = self.guest
        self.made.append(made)
        self.yielded.append(yields)
        return made

    async def rest(self, seconds: float) -> None:
        self.rested.append(seconds)
        self.now += seconds
        await self._sleep(0)

    async def settle(self) -> None:
        for _ in range(100):
            await self._sleep(0)

    async def serve(self, **change: Any) -> None:
        self.ring.serve(dataclasses.replace(SERVING, **change))
        await self.settle()


@pytest.fixture
def epochs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Epochs]:
    def make(*ends: Exception | None, **options: Any) -> Epochs:
        made = Epochs(*ends, **options)
        monkeypatch.setattr(ring_module, "ControlStreams", made.session)
        monkeypatch.setattr(ring_module, "Backoff", partial(Backoff, spread=0.0))
        monkeypatch.setattr(asyncio, "sleep", made.rest)
        return made

    return make


async def test_members_that_cannot_be_reached_are_tried_again_more_and_more_seldom(epochs: Any) -> None:
    ring = epochs(*[EpochEnded("no")] * 3, *[InvalidInput("no")] * 4)
    await ring.serve()
    assert ring.rested == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 4.0, 4.0])
    assert ring.ring.attached
    assert [made.cancelled for made in ring.made] == [True] * 7 + [False]
    assert ring.lost == 3  # of which it had been attached to
    assert ring.counted("epochs_ended") == 0
    await ring.ring.close()


async def test_an_epoch_that_was_used_and_lost_is_not_gone_back_to(epochs: Any) -> None:
    ring = epochs(EpochEnded("a member's word", reason="UNAVAILABLE"))
    answer = ring.ask("one")
    for _ in range(2):
        await ring.serve()
    assert (len(ring.made), ring.rested, ring.ring.attached, ring.lost) == (1, [], False, 1)
    assert ring.counted("epochs_ended") == 1
    assert not answer.over
    await ring.serve(epoch=5)
    assert ring.ring.attached
    assert len(ring.made[1].head) == 1
    await ring.ring.close()
    assert (await failure(answer)).reason in ("RING_GONE", "EPOCH_ENDED")


async def test_an_epoch_whose_members_may_have_heard_nothing_is_gone_back_to(epochs: Any) -> None:
    """They were asleep: what was sent was lost, so that the epoch goes on and no other one comes."""
    ring = epochs(Unheard("no"))
    answer = ring.ask("one")
    for _ in range(2):
        await ring.serve()
    assert [made.epoch for made in ring.made] == [ring.made[0].epoch] * 2
    assert ring.ring.attached
    assert not answer.over
    await ring.ring.close()


async def test_an_epoch_with_a_plan_that_members_would_refuse_ends_and_its_log_says_why(epochs: Any) -> None:
    """Nothing is under way: no answer of a member would end it."""
    ring = epochs()
    await ring.serve()
    planner = ring.ring.own.scheduler.planner
    planner.board.plan(control.Change(drop=control.Drop(prefix=9)))  # which nobody keeps
    with structlog.testing.capture_logs() as logs:
        answer = ring.ask("one")
        await ring.settle()
    (lost,) = (one for one in logs if one["event"] == "ring_lost")
    assert isinstance(lost["exc_info"].__cause__, InvalidInput)
    await ring.settle()
    assert ring.ring.own.scheduler.planner is not planner
    assert len(ring.made[1].head) == 1, "the request is given to the next epoch"
    assert not answer.over
    await ring.ring.close()


async def test_an_epoch_is_attached_to_once_and_another_one_in_its_place(epochs: Any) -> None:
    """Its task may have ended by a fault, and is begun anew."""
    ring = epochs()
    for epoch in (4, 4, 1, 1):
        await ring.serve(epoch=epoch)
    assert [made.epoch for made in ring.made] == [4, 1]
    ring.ring.task.cancel()
    await ring.settle()
    await ring.serve(epoch=1)
    assert [made.epoch for made in ring.made] == [4, 1, 1]
    await ring.ring.close()


@pytest.mark.parametrize("scarce", [True, False])
async def test_a_prompt_for_which_there_is_no_memory_fails_whoever_tells_first_of_the_end(
    epochs: Any, scarce: bool
) -> None:
    """It stays until that is known, for it would end the epoch of the other ring too."""
    ring = epochs(elsewhere=True)
    answers = [ring.ask(name) for name in ("large", "later")]
    await ring.serve()
    ring.opened(1, prompt=100)
    ring.ring.leave()
    ring.ring.tick()
    assert ring.moved == ["later"]
    ring.made[0].out_of_memory = scarce
    await ring.settle()
    assert (ring.moved, ring.lost) == (["later"] if scarce else ["later", "large"], 2)
    assert not answers[1].over
    if scarce:
        assert (await failure(answers[0])).reason == "OUT_OF_MEMORY"
    await ring.ring.close()


def test_a_guest_knows_which_of_its_prompts_members_had_to_work_on() -> None:
    """At the head, which reads it, or computed; one that waits for memory is neither."""
    ring, sent = Serving(), Sent()
    asked = [
        Request(name, "key", 5, inference.Envelope(clear=inference.Prompt(text=name)), "model")
        for name in ("computed", "waiting", "reading")
    ]
    for request in asked:
        forward = sent.add(request, 0.0)
        forward.guest = 1
        ring.hear(forward=forward)
    for row, prompt in ((1, 3000), (2, 3000)):
        ring.opened(row, prompt)
    for message in ring.members.head:
        if message.HasField("forwarded"):
            sent.take(message.forwarded, 4096)
    assert sent.clear() == ([asked[0], asked[2]], [asked[1]])


@pytest.mark.parametrize("heard_first", [True, False])
async def test_a_guest_hears_that_its_prompt_had_no_memory_when_it_brings_it_again(
    epochs: Any, heard_first: bool
) -> None:
    """No other request fails for it, nor what the guest asks for later under the same name."""
    ring = epochs(*[EpochEnded("no", reason="OUT_OF_MEMORY")] * heard_first)
    ring.held = asyncio.Event()
    await ring.serve()
    prompt = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="model", envelope=prompt, request_id="theirs")

    def bring(number: int) -> list[str]:
        ring.hear(forward=control.Forward(guest=1, number=number, key="who", request=request))
        sent = [one.forwarded for one in ring.made[-1].head]
        return [one.problem.reason for one in sent if one.HasField("problem")]

    bring(1)
    own = ring.ask("own")
    ring.opened(1, prompt=100)
    ring.opened(2, prompt=10)
    if not heard_first:
        ring.ring.leave()
    ring.made[0].out_of_memory = True
    ring.held.set()
    await ring.settle()
    assert not own.over
    assert ring.ring.own.scheduler.load().waiting == 1, "the guest brings its own again"
    await ring.serve(epoch=5)
    assert bring(1) == ["OUT_OF_MEMORY"]
    assert bring(2) == ["OUT_OF_MEMORY"]
    assert len([one for one in ring.made[-1].head if one.HasField("open")]) == 2
    await ring.ring.close()


async def test_a_gateway_elsewhere_lets_one_beside_the_rings_members_schedule_for_a_while(
    epochs: Any,
) -> None:
    """There may be none."""
    ring = epochs(*[FailedPrecondition("nobody", reason="NOBODY_SCHEDULES")] * 6)
    await ring.serve(elsewhere=True)
    assert ring.yielded[:2] == [True, True]
    assert not ring.yielded[5]
    await ring.ring.close()


@pytest.mark.parametrize(
    ("reason", "progress", "yields"),
    [
        ("GATEWAY_ENDED", 0, True),
        ("GATEWAY_ENDED", 1, False),
        ("GATEWAY_GONE", 0, False),
        ("GATEWAY_LEFT", 0, False),
    ],
)
async def test_a_guest_whose_prompt_may_be_to_blame_lets_the_gateway_that_knows_it_schedule_again(
    epochs: Any, reason: str, progress: int, yields: bool
) -> None:
    """For a while: that gateway may have gone with the epoch."""
    ring = epochs(EpochEnded("over", reason=reason))
    ring.held, ring.guest = asyncio.Event(), True
    await ring.serve()
    ring.ask("one")
    forwarded = control.Forwarded(number=1)
    ring.hear(forwarded=forwarded)
    if progress:
        forwarded.event.delta.text = "a"
        forwarded.progress.add(tokens=[7] * progress)
        ring.hear(forwarded=forwarded)
    ring.held.set()
    await ring.settle()
    assert [made.epoch for made in ring.made] == [4, 4], "it may come back to one that was not used"
    ring.ends += [FailedPrecondition("nobody", reason="NOBODY_SCHEDULES")] * 6
    await ring.serve(epoch=5)
    assert ring.yielded[:4] == [False, False, yields, yields]
    assert not ring.yielded[8]
    await ring.ring.close()


def test_a_ring_that_is_down_is_waited_for_so_long_and_has_nothing_to_do() -> None:
    down = Serving(None)
    assert down.ring.load() == RingLoad(0, 0, 0.0)
    for later, patient in ((0.0, True), (PATIENCE_SECONDS - 1, True), (PATIENCE_SECONDS, False)):
        down.now = 1000.0 + later
        assert down.ring.patient is patient
    down.ring.awaited()
    assert down.ring.patient, "its model is being loaded"
    serving = Serving()
    serving.now += PATIENCE_SECONDS
    assert serving.ring.patient


def test_a_ring_that_yields_begins_nothing_as_long_as_it_does() -> None:
    ring = Serving()
    ring.ring.hold(True)
    ring.ask("one")
    assert not ring.members.head
    ring.ring.hold(False)
    assert [message.open.request_id for message in ring.members.head] == ["one"]


@pytest.mark.parametrize(
    "change", [{"members": (MemberTarget("other", b"", ()),)}, {"clear_links": not SERVING.clear_links}]
)
async def test_an_epoch_has_the_members_and_links_that_it_began_with(
    epochs: Any, change: dict[str, Any]
) -> None:
    ring = epochs()
    for trust in (0, 1):
        await ring.serve(min_trust=trust)
    assert len(ring.made) == 1
    assert ring.ring.serving == dataclasses.replace(SERVING, min_trust=1)
    ring.ring.serve(dataclasses.replace(SERVING, **change))
    assert (ring.ring.attached, ring.ring.serving) == (False, None)
    await ring.settle()
    assert ring.made[0].cancelled
    await ring.serve(epoch=5, **change)
    assert [made.epoch for made in ring.made] == [4, 5]
    await ring.ring.close()
    assert ring.made[1].cancelled


def test_what_waits_of_guests_is_brought_to_no_other_ring() -> None:
    """There another request may have its id, which would get its answer."""
    ring = Serving()
    prompt = inference.Envelope(clear=inference.Prompt(text="x"))
    request = inference.GenerateRequest(model="model", envelope=prompt, max_tokens=5)
    for number in range(1, 31):
        ring.hear(forward=control.Forward(guest=1, number=number, key="who", request=request))
    waiting = ring.ring.load().waiting
    assert ring.ring.take_waiting() == []
    assert ring.ring.load().waiting < waiting


def guest() -> tuple[Serving, Answer]:
    """A ring that another gateway schedules, with a request that has waited for it."""
    ring = Serving(None)
    waited = ring.ask("one", floor=3)
    ring.members.guest = True
    ring.begin()
    return ring, waited


async def test_a_guest_forwards_what_it_is_asked_and_tells_what_it_is_told() -> None:
    ring, first = guest()
    second = ring.ask("two")
    forwards = [message.forward for message in ring.members.head]
    told = [(one.number, one.request.request_id, one.request.min_trust) for one in forwards]
    assert told == [(1, "one", 3), (2, "two", 0)]
    assert [one.request.attempts for one in forwards] == [1, 0], "what has waited was tried before"
    assert ring.ring.load() == RingLoad(2, 0, 0.0)

    def tell(number: int, **what: Any) -> None:
        ring.hear(forwarded=control.Forwarded(number=number, **what))

    started = inference.GenerateResponse(started=inference.Started(request_id="3:1", prompt_tokens=7))
    deltas = [inference.Delta(text="a", tokens=1, parsed=inference.Parsed()), inference.Delta(text="b")]
    for event in (
        started,
        started,
        *(inference.GenerateResponse(delta=delta) for delta in deltas),
        inference.GenerateResponse(finished=inference.Finished(prompt_tokens=7)),
        inference.GenerateResponse(delta=inference.Delta(text="too late")),
    ):
        tell(1, event=event, progress=[control.Progress(tokens=[5] * event.HasField("delta"))])
    tell(9)
    tell(2, problem=to_problem(FailedPrecondition("no", reason="MEMBERS_SAY_NO")))
    ring.hear(done=control.StepDone(step=1))  # is for who schedules
    events = await read(first)
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta", "finished"]
    events[0].started.ClearField("load_ms")  # of a clock
    assert events[0].started == inference.Started(request_id="one", prompt_tokens=7)
    assert [(event.delta.text, event.delta.HasField("parsed")) for event in events[1:3]] == [
        ("a", True),
        ("b", False),
    ]
    assert (await failure(second)).reason == "MEMBERS_SAY_NO"
    assert not ring.ring.answers


def test_a_guest_says_whom_nobody_waits_for_and_keeps_what_waits_over_an_epoch() -> None:
    ring, _ = guest()
    ring.ask("two")
    for _ in range(2):
        ring.ring.cancel("one")
    assert [message.forward for message in ring.members.head[2:]] == [control.Forward(number=1, cancel=True)]
    assert ring.ring.end(ring.members, "MEMBER_LEFT") is False  # type: ignore[arg-type]
    assert ring.ring.own.scheduler.load().waiting == 1
    assert list(ring.ring.answers) == ["two"]


def test_requests_of_guests_are_served_until_they_take_them_back() -> None:
    ring = Serving()

    def forward(guest: int, number: int, model: str = "model") -> control.Forward:
        asked = Request("x", "key", 5, inference.Envelope(clear=inference.Prompt(text="x")), model)
        made = Sent().add(asked, 0.0)
        made.guest, made.number = guest, number
        return made

    for guest_and_number in ((7, 1), (7, 2), (8, 1), (7, 1)):
        ring.hear(forward=forward(*guest_and_number))
    assert list(ring.ring.answers) == ["7:1", "7:2", "8:1"]
    assert ring.ring.own.scheduler.load().waiting == 3
    ring.hear(forward=control.Forward(guest=7, number=1, cancel=True))
    assert list(ring.ring.answers) == ["7:2", "8:1"]
    ring.hear(forward=control.Forward(guest=7, cancel=True))
    assert list(ring.ring.answers) == ["8:1"]
    ring.hear(forward=forward(8, 2, "other"))
    refused = ring.members.head[-1].forwarded
    assert (refused.guest, refused.number, refused.problem.reason) == (8, 2, "BAD_MESSAGE")
    ring.ring.end(ring.members, "MEMBER_LEFT")  # type: ignore[arg-type]
    assert not ring.ring.answers, "their gateways bring them again"


def test_whose_a_request_is_does_not_depend_on_its_name() -> None:
    ring = Serving()
    ring.ask("7:1")
    ring.hear(forward=control.Forward(guest=7, cancel=True))
    ring.ring.end(ring.members, "MEMBER_LEFT")  # type: ignore[arg-type]
    assert [request.id for request, _ in ring.ring.take_waiting()] == ["7:1"]


class Stepped(Serving):
    """A ring whose head brings a token of each row that a step samples."""

    def __init__(self) -> None:
        super().__init__(None)
        self.tokens: Counter[int] = Counter()
        self.next_epoch(4)

    def next_epoch(self, epoch: int) -> None:
        self.composition = Composition(epoch=epoch, max_rows=8, prefill_chunk=64)
        self.applied = 0
        self.due: deque[ResolvedStep] = deque()
        self.members = Members()
        self.begin(dataclasses.replace(SERVING, epoch=epoch))

    def step(self, text: str = "", **fields: Any) -> None:
        """The next step that samples comes round."""
        while True:
            for step in self.members.steps[self.applied :]:
                self.due.append(self.composition.apply(step))
            self.applied = len(self.members.steps)
            resolved = self.due.popleft()
            if resolved.sampled:
                break
        self.tokens.update(resolved.sampled)
        outputs = [row_output(row, text=text, tokens=self.tokens[row], **fields) for row in resolved.sampled]
        self.hear(done=control.StepDone(step=resolved.number, outputs=outputs))


async def test_an_epoch_of_the_protocol_before_brings_the_same_answer() -> None:
    ring = Serving(dataclasses.replace(SERVING, protocol=OLDEST_PROTOCOL))
    answer = ring.ask("one")
    ring.opened(1)
    output = control.RowOutput(row=1, text="a", tokens=1, token=77, finish=STOP)
    ring.hear(done=control.StepDone(step=1, outputs=[output]))
    _, delta, _ = await read(answer)
    assert delta.delta == inference.Delta(text="a", tokens=1)


def test_an_answer_with_a_receipt_tells_the_head_which_epochs_brought_it_so_far() -> None:
    ring = Stepped()
    clear = inference.Envelope(clear=inference.Prompt(text="ask"))
    ring.ask("one", envelope=clear, receipt=inference.ReceiptRequest(nonce=bytes(16)))
    brought = []
    for epoch, tokens in ((4, 2), (5, 1), (6, 0)):
        (opened,) = (message.open for message in ring.members.head)
        assert list(opened.envelope.clear.resume.earlier) == brought
        ring.opened(opened.row, answered=ring.tokens.total())
        for _ in range(tokens):
            ring.step("a", token=7)
        brought.append(inference.EarlierEpoch(ring="ring-0", epoch=epoch, tokens=ring.tokens.total()))
        ring.ring.leave()
        ring.next_epoch(epoch + 1)


def brought_by(forward: control.Forward) -> list[control.Forwarded]:
    """The messages of a ring to a guest. Each choice of the request has three tokens, and nobody signs."""
    ring = Stepped()
    forward.guest = 7
    ring.hear(forward=forward)
    ring.opened(1)
    for _ in range(2):
        ring.step("a", token=7)
    ring.step("b", token=8, finish=STOP)
    return [message.forwarded for message in ring.members.head if message.HasField("forwarded")]


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("receipt", [None, inference.ReceiptRequest(nonce=bytes(16))])
async def test_no_answer_is_stuck_at_whatever_moment_its_guest_loses_who_schedules(
    choices: int, receipt: inference.ReceiptRequest | None
) -> None:
    """It ends if all of it has come, and goes on otherwise."""
    clear = inference.Envelope(clear=inference.Prompt(text="ask"))
    lost_at = 0
    while True:
        ring = Serving(None)
        answer = ring.ask("one", envelope=clear, choices=choices, receipt=receipt)
        ring.members.guest = True
        ring.begin()
        messages = brought_by(ring.members.head[0].forward)
        for forwarded in messages[:lost_at]:
            ring.hear(forwarded=forwarded)
        ring.ring.end(ring.members, "GATEWAY_GONE")  # type: ignore[arg-type]
        ring.members = Members()
        ring.begin()
        asked = [message.open.envelope.clear.resume for message in ring.members.head]
        earlier = [one.ring for resume in asked for one in resume.earlier]
        assert all(earlier), "no receipt can be read that names a ring without a name"
        assert answer.over is not bool(asked)
        if lost_at == len(messages):
            break
        lost_at += 1
    finished = (await read(answer))[-1].finished
    assert (finished.reason, finished.prompt_tokens) == (STOP, 2)
    assert finished.completion_tokens == 3 * choices
    missing = ["EPOCH_ENDED"] * choices if receipt else []
    assert [one.head.missing for one in finished.receipts] == missing


def test_an_answer_that_a_guest_has_whole_gets_its_end_and_no_row() -> None:
    """A guest of an older release asks on."""
    ring = Serving()
    asked = Request("x", "key", 5, inference.Envelope(clear=inference.Prompt(text="x")), "model")
    asked.progress.started = True
    asked.progress.choices[0].end = inference.FinishedChoice(reason=STOP, completion_tokens=0)
    ring.hear(forward=Sent().add(asked, 0.0))
    assert [one.forwarded.event.finished.reason for one in ring.members.head] == [STOP]
    assert not ring.ring.answers


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"FREE_UNREAD": 1000, "MAX_UNREAD": 5000, "ALL_UNREAD": 9000}
    for name, size in bounds.items():
        monkeypatch.setattr(requests, name, size)
    monkeypatch.setattr(served, "ALL_ASKED", 40_000)


@pytest.mark.usefixtures("small_bounds")
async def test_an_answer_whose_reader_is_too_far_behind_is_given_up() -> None:
    """At once and whole, by the bytes that wait; its row leaves the ring, and others go on."""
    ring = Stepped()
    slow, reads = ring.ask("slow"), ring.ask("reads")
    reading = asyncio.create_task(read(reads))
    for row in (1, 2):
        ring.opened(row)
    while not slow.over:
        ring.step("x" * 2000)
        assert slow.unread <= 7000
        for _ in range(3):
            await asyncio.sleep(0)
    assert slow.unread == 0
    assert (await failure(slow)).reason == "CLIENT_BEHIND"
    assert ring.ring.load().running == 1
    while not reading.done():
        ring.step("y")
        for _ in range(3):
            await asyncio.sleep(0)
    assert "".join(event.delta.text for event in await reading)[-1] == "y"
    assert ring.ring.load().running == 0


@pytest.mark.usefixtures("small_bounds")
async def test_all_readers_of_a_ring_have_one_bound_and_one_that_reads_pays_for_no_other() -> None:
    ring = Stepped()
    deaf, reads = [ring.ask(str(number)) for number in range(4)], ring.ask("reads")
    reading = asyncio.create_task(read(reads))
    for row in range(1, 6):
        ring.opened(row)
    while not reading.done():
        ring.step("x" * 2000)
        for _ in range(3):
            await asyncio.sleep(0)
        assert sum(answer.unread for answer in deaf) <= 9000
    assert "".join(event.delta.text for event in await reading).startswith("x" * 8000)
    assert (await failure(deaf[0])).reason == "CLIENT_BEHIND"


@pytest.mark.usefixtures("small_bounds")
def test_requests_of_guests_are_bounded_by_their_bytes() -> None:
    """All of it comes over the head, which may have made it up."""
    ring = Serving()
    prompt = inference.Envelope(clear=inference.Prompt(text="x" * 5000))
    request = inference.GenerateRequest(model="model", envelope=prompt, max_tokens=5)
    for number in range(1, 9):
        ring.hear(forward=control.Forward(guest=number, number=1, key=str(number), request=request))
    assert len(ring.ring.answers) == 4
    refused = [one.forwarded for one in ring.members.head if one.forwarded.HasField("problem")]
    assert [(one.guest, one.problem.reason) for one in refused] == [
        (guest, "QUEUE_FULL") for guest in range(5, 9)
    ]
    ring.hear(forward=control.Forward(guest=1, number=1, cancel=True))
    ring.hear(forward=control.Forward(guest=9, number=1, request=request))
    assert "9:1" in ring.ring.answers


@pytest.mark.usefixtures("small_bounds")
def test_a_head_that_brings_guests_and_takes_no_answer_ends_the_epoch() -> None:
    class Deaf(Members):
        def send_head(self, message: bytes, written: Any = None) -> None:
            super().send_head(message)

    reading, deaf = Serving(), Serving()
    deaf.members = Deaf()
    deaf.begin()
    for number in range(1, 50):
        reading.hear(forward=control.Forward(guest=1, number=number))
    assert len(reading.members.head) == 49
    with pytest.raises(InvalidInput) as caught:
        for number in range(1, 50):
            deaf.hear(forward=control.Forward(guest=1, number=number))
    assert caught.value.reason == "HEAD_BEHIND"


class Thinking(Serving):
    """A ring whose model thinks, with one question of a user that waits for its answer."""

    def __init__(self, *, idle_prefill: bool = True, **fields: Any) -> None:
        super().__init__(None, idle_prefill=idle_prefill)
        attached = control.Attached(
            kv_bytes_per_token=1,
            kv_budget=4096,
            prefixes=control.PREFIX_SUPPORT_ANY,
            capabilities=["thinking", "vision"],
        )
        self.begin(SERVING, attached)
        self.asked = inference.Prompt()
        self.asked.chat.messages.add(role="user", content="Why?")
        envelope = fields.pop("envelope", inference.Envelope(clear=self.asked))
        self.answer = self.ask("one", envelope=envelope, tenant="tenant", **fields)

    def answered(self, row: int = 1, **last: Any) -> None:
        """Its answer comes, in one token."""
        self.opened(row, prompt=100)
        last = {"text": "So.", "finish": STOP} | last
        for step, outputs in ((1, []), (2, [row_output(row, tokens=1, **last)])):
            self.hear(done=control.StepDone(step=step, outputs=outputs))

    def tick(self) -> control.OpenRow | None:
        """What is opened at the next second."""
        before = len(self.members.head)
        self.ring.tick()
        opened = [each.open for each in self.members.head[before:]]
        assert len(opened) <= 1
        return opened[0] if opened else None


def test_an_idle_ring_prefills_what_the_users_next_question_begins_with() -> None:
    ring = Thinking()
    assert ring.tick() is None, "the ring is busy"
    ring.answered(parsed=inference.Parsed(reasoning="Hm."))
    opened = ring.tick()
    assert opened is not None
    said = [(each.role, each.content, each.reasoning) for each in opened.envelope.clear.chat.messages]
    assert said == [("user", "Why?", ""), ("assistant", "So.", "Hm."), ("user", "x", "")]
    assert (opened.prefix_scope, opened.max_tokens) == ("key tenant", 1)
    assert ring.tick() is None, "once"
    steps = len(ring.members.steps)
    ring.opened(opened.row, prompt=1000)
    assert len(ring.members.steps) > steps
    assert (ring.ring.load(), ring.ring.counts()) == (RingLoad(0, 0, ring.ring.load().kv_usage), (0, 0))
    assert ring.counted("prefix_cache_queries") == 100, "nobody's request"
    assert ring.counted("idle_prefill_tokens") > 0


def test_idle_prefill_waits_for_answers_and_for_power_and_can_be_switched_off() -> None:
    ring = Thinking()
    ring.answered()
    ring.ask("two")
    assert ring.tick() is None
    ring.ring.cancel("two")
    ring.members.saves_power = True
    assert ring.tick() is None
    ring.members.saves_power = False
    assert ring.tick() is not None
    off = Thinking(idle_prefill=False)
    off.answered()
    assert off.tick() is None


def test_any_request_pushes_idle_prefill_aside() -> None:
    ring = Thinking()
    ring.answered()
    opened = ring.tick()
    assert opened is not None
    ring.opened(opened.row, prompt=1000)
    announced = len(ring.members.steps)
    ring.ask("two")
    (two,) = (each.open for each in ring.members.head if each.open.request_id == "two")
    ring.opened(two.row, prompt=10)
    ring.hear(pong=control.Pong(steps=announced))
    later = ring.members.steps[announced:]
    assert {chunk.row for step in later for chunk in step.prefill.chunks} == {two.row}
    assert any(change.evict.row == opened.row for step in later for change in step.changes)
    assert list(ring.ring.answers) == ["two"]


@pytest.mark.parametrize(
    "last",
    [
        {"parsed": inference.Parsed(tool_calls=[inference.ToolCall(name="read")])},  # its result comes soon
        {"finish": inference.FINISH_REASON_LENGTH},
    ],
)
def test_nothing_is_prefilled_behind_an_answer_that_ends_no_turn(last: dict[str, Any]) -> None:
    ring = Thinking()
    ring.answered(**last)
    assert ring.tick() is None


def test_nothing_is_prefilled_of_sealed_prompts_images_and_several_answers() -> None:
    shows = inference.Envelope()
    message = shows.clear.chat.messages.add(role="user", content="What?")
    message.images.add(data=b"png")
    for fields in ({"envelope": inference.Envelope(sealed=b"sealed")}, {"envelope": shows}):
        ring = Thinking(**fields)
        ring.answered()
        assert ring.tick() is None
    ring = Thinking(choices=2)
    ring.answered()
    ring.ring.cancel("one")
    assert ring.tick() is None


def test_what_does_not_pay_is_given_up_before_it_is_computed() -> None:
    ring = Thinking()
    ring.answered()
    opened = ring.tick()
    assert opened is not None
    ring.opened(opened.row, prompt=200)
    ring.hear(pong=control.Pong(steps=9))
    computed = {chunk.row for step in ring.members.steps for chunk in step.prefill.chunks}
    assert computed == {1}
    assert ring.members.head[-1].discard.row == opened.row
    assert not ring.ring.answers


def test_idle_prefill_ends_with_its_epoch() -> None:
    ring = Thinking()
    ring.answered()
    opened = ring.tick()
    assert opened is not None
    ring.opened(opened.row, prompt=1000)
    ring.ring.end(ring.members, "LOST")  # type: ignore[arg-type]
    assert not ring.ring.answers
    assert ring.ring.counts() == (0, 0)
    lost = Thinking()
    lost.answered()
    lost.ring.end(lost.members, "LOST")  # type: ignore[arg-type]
    lost.begin()
    assert lost.tick() is None, "before it has begun as well: what the prompt begins with is gone"


def test_a_guests_prompt_that_is_refused_is_given_back_at_once() -> None:
    """A model that cannot see takes no envelope as long as this one. The frames of the error hold the prompt
    and, by the list of what to do, the error."""
    serving = Serving()
    long = inference.Envelope(sealed=bytes(MAX_TEXT_ENVELOPE_BYTES + 1))
    asked = inference.GenerateRequest(request_id="long", model="model", envelope=long)
    gc.collect()
    gc.disable()
    try:
        serving.hear(forward=control.Forward(guest=1, number=1, key="who", request=asked))
        held = [one for one in gc.get_objects() if isinstance(one, Request) and one.id == "1:1"]
    finally:
        gc.enable()
    assert serving.members.head[-1].forwarded.problem.reason == "ENVELOPE_TOO_LONG"
    assert held == []
