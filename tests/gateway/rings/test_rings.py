"""The ring that gets a request, and the rings that there are by roster and coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from requestkit import with_progress

from sealring.edge.inference.answer import Answer
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.choice import SAMPLE
from sealring.gateway.rings.epoch import Abilities
from sealring.gateway.rings.ring import Shared
from sealring.gateway.rings.rings import Rings
from sealring.gateway.rings.table import MAX_RINGS
from sealring.gateway.scheduler import Request
from sealring.mesh.clock import AwakeClock
from sealring.mesh.errors import FailedPrecondition, NotFound, Unavailable
from sealring.mesh.rpc import PROTOCOL_VERSION
from sealring.v1 import inference_pb2 as inference
from sealring.v1 import membership_pb2 as membership
from sealring.v1.model_pb2 import ModelCard


class FakeRing:
    """A gateway.rings.ring.Ring that takes requests; it counts the calls of `load`."""

    looked_at = 0

    def __init__(self, name: str, deployment: str, shared: Shared, on_lost: Callable[[Any], None]) -> None:
        self.idle_prefill = shared.idle_prefill
        self.name, self.deployment = name, deployment
        self.on_lost = on_lost
        self.attached, self.patient = True, True
        self.patience = SimpleNamespace(seconds=60.0)
        self.serving = SimpleNamespace(max_rows=4)
        self.requests: list[str] = []
        self.waiting: list[tuple[Request, Answer]] = []
        self.kv_usage = 0.0
        self.abilities = Abilities()
        self.events: list[Any] = []
        self.holds = False
        self.hoped = 0

    def counts(self) -> tuple[int, int]:
        return len(self.requests), len(self.waiting)

    def hold(self, holding: bool) -> None:
        self.holds = holding

    def awaited(self) -> None:
        self.hoped += 1

    def load(self) -> SimpleNamespace:
        FakeRing.looked_at += 1
        return SimpleNamespace(waiting=0, running=len(self.requests), kv_usage=self.kv_usage)

    def kept(self) -> tuple[int, int]:
        return 3, 5

    def submit(self, request: Request, answer: Answer) -> None:
        self.requests.append(request.id)

    def cancel(self, request_id: str) -> None:
        self.events.append(request_id)

    def serve(self, serving: Any) -> None:
        self.events.append(serving)

    def leave(self) -> None:
        self.events.append("leave")

    def tick(self) -> None:
        self.events.append("tick")

    async def close(self) -> None:
        self.events.append("close")

    def take_waiting(self) -> list[tuple[Request, Answer]]:
        taken, self.waiting = self.waiting, []
        return taken


class FakeMembers:
    """A gateway.rings.members.Members that notes to which machines connections may stand."""

    def __init__(self) -> None:
        self.kept: set[str] = set()

    def keep(self, members: Iterable[str]) -> None:
        self.kept = set(members)

    async def close(self) -> None:
        self.kept = set()


class Bed:
    """Rings over a roster of `count` rings of one deployment, with fakes for rings and connections."""

    def __init__(self, count: int, trust: int = 10, *, trusts: dict[int, int] | None = None) -> None:
        self.made: list[FakeRing] = []
        self.members = FakeMembers()
        self.metrics = Metrics()
        self.now = 1234.5
        self.rings = Rings(
            self.members,  # type: ignore[arg-type]
            queue_limit=9,
            idle_prefill=False,
            metrics=self.metrics,
            signed_roster=lambda: (b"", b""),
            wall=lambda: self.now,
            make_ring=self._make_ring,
        )
        roster = roster_of(*(f"ring-{number}" for number in range(count)))
        for number, ring in enumerate(roster.rings):
            ring.min_trust = (trusts or {}).get(number, trust)
        self.rings.use_roster(roster)

    def _make_ring(self, *given: Any) -> Any:
        self.made.append(FakeRing(*given))
        return self.made[-1]

    def counted(self, name: str, kind: str = "_total") -> float:
        labels = {"model_name": "model"}
        return self.metrics.registry.get_sample_value(f"sealring_{name}{kind}", labels) or 0.0


def make(
    count: int, trust: int = 10, *, trusts: dict[int, int] | None = None
) -> tuple[Rings, list[FakeRing]]:
    bed = Bed(count, trust, trusts=trusts)
    return bed.rings, bed.made


def ask(
    rings: Rings, number: int, *, ring: str = "", min_trust: int = 0, model: str = "model", key: bytes = b""
) -> None:
    envelope = inference.Envelope(sealed_for=inference.SealedFor(ring=ring) if ring else None)
    request = Request(f"r{number}", "key", 1, envelope, model, routing_key=key, min_trust=min_trust)
    rings.submit(request, Answer())


def test_rings_prefill_while_they_are_idle_as_the_gateway_is_set() -> None:
    assert [ring.idle_prefill for ring in Bed(2).made] == [False, False]


def test_of_few_rings_the_least_busy_is_taken() -> None:
    rings, made = make(SAMPLE)
    for number in range(3 * SAMPLE):
        ask(rings, number)
    assert [len(ring.requests) for ring in made] == [3] * SAMPLE


@pytest.mark.parametrize(("keyed", "requests", "most"), [(False, 2000, 6), (True, 200, 3)])
def test_of_many_a_few_are_looked_at_and_load_is_even(keyed: bool, requests: int, most: int) -> None:
    rings, made = make(500)
    FakeRing.looked_at = 0
    for number in range(requests):
        ask(rings, number, min_trust=10, key=key_of(number % 20) if keyed else b"")
    assert FakeRing.looked_at <= requests * SAMPLE
    assert max(len(ring.requests) for ring in made) <= most


def test_the_one_ring_that_is_up_or_trusted_is_found_among_many() -> None:
    rings, made = make(400, trusts={7: 20})
    for ring in made[:-1]:
        ring.attached = False
    ask(rings, 1)
    assert made[-1].requests == ["r1"]
    made[7].attached = True
    ask(rings, 2, min_trust=15)
    assert made[7].requests == ["r2"]
    with pytest.raises(FailedPrecondition, match="trust of 21"):
        ask(rings, 3, min_trust=21)
    made[-1].attached = made[7].attached = False
    for ring in made:
        ring.patient = False
    with pytest.raises(Unavailable, match="at the moment") as caught:
        ask(rings, 4)
    assert caught.value.metadata["retry_after"] == "5"


def test_a_sealed_prompt_goes_to_its_ring_and_to_no_other() -> None:
    rings, made = make(40)
    ask(rings, 1, ring="ring-33")
    assert made[33].requests == ["r1"]
    with pytest.raises(Unavailable):
        ask(rings, 2, ring="ring-41")
    with pytest.raises(NotFound):
        ask(rings, 3, model="other")


def where(made: list[FakeRing], number: int) -> str:
    return next(ring.name for ring in made if f"r{number}" in ring.requests)


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


@pytest.mark.parametrize("count", [2, 5, 60])
def test_requests_of_one_key_go_to_one_ring(count: int) -> None:
    bed = Bed(count)
    rings, made = bed.rings, bed.made
    homes = set()
    for number in range(40):
        ask(rings, 2 * number, key=key_of(number), min_trust=10)
        ask(rings, 2 * number + 1, key=key_of(number), min_trust=10)
        assert where(made, 2 * number) == where(made, 2 * number + 1)
        homes.add(where(made, 2 * number))
        for ring in made:
            ring.requests.clear()
    assert len(homes) >= min(count, 20)
    assert (bed.counted("requests_routed_by_key"), bed.counted("routed_by_key_moved")) == (80, 0)


def test_everything_under_one_key_overloads_no_ring() -> None:
    bed = Bed(4)
    rings, made = bed.rings, bed.made
    for number in range(64):
        ask(rings, number, key=key_of(1))
    assert max(len(ring.requests) for ring in made) <= 64 / 4 + 1
    assert min(len(ring.requests) for ring in made) >= 64 / 4 - 1
    assert bed.counted("routed_by_key_moved") >= 64 / 4 * 3 - 1


def test_a_ring_that_leaves_gives_up_its_keys_and_what_waits_there() -> None:
    """And no others move; when it is back, its keys are, too."""
    rings, made = make(3)

    def homes() -> list[str]:
        found = []
        for number in range(60):
            ask(rings, number, key=key_of(number))
            found.append(where(made, number))
            for ring in made:
                ring.requests.clear()
        return found

    before = homes()
    gone = made[0]
    own = [number for number in range(60) if before[number] == gone.name]
    gone.attached = False
    envelope = inference.Envelope()
    gone.waiting = [
        (Request(f"r{number}", "key", 1, envelope, "model", routing_key=key_of(number)), Answer())
        for number in own[:2]
    ]
    gone.on_lost(gone)
    taken = [where(made, number) for number in own[:2]]
    for ring in made:
        ring.requests.clear()
    during = homes()
    assert [number for number in range(60) if before[number] != during[number]] == own
    assert {during[number] for number in own} == {made[1].name, made[2].name}
    assert [during[number] for number in own[:2]] == taken
    gone.attached = True
    assert homes() == before


def test_a_key_goes_to_no_ring_that_is_trusted_too_little() -> None:
    rings, made = make(3, trusts={2: 20})
    for number in range(12):
        ask(rings, number, key=key_of(number), min_trust=15)
    assert [len(ring.requests) for ring in made] == [0, 0, 12]
    with pytest.raises(FailedPrecondition):
        ask(rings, 99, key=key_of(1), min_trust=21)


def test_what_demands_any_trust_goes_past_rings_whose_links_are_in_clear() -> None:
    rings, made = make(3)
    roster = roster_of("ring-0", "ring-1", "ring-2")
    for ring in roster.rings[:2]:
        ring.clear_links = True
    rings.use_roster(roster)
    for number in range(6):
        ask(rings, number, key=key_of(number) if number % 2 else b"", min_trust=1)
    assert [len(ring.requests) for ring in made] == [0, 0, 6]
    ask(rings, 6, min_trust=0)
    roster.rings[2].clear_links = True
    rings.use_roster(roster)
    with pytest.raises(FailedPrecondition) as caught:
        ask(rings, 7, min_trust=1)
    assert caught.value.reason == "LINKS_IN_CLEAR"


def test_a_sealed_prompts_ring_is_the_clients_choice_whatever_key_stands_beside_it() -> None:
    rings, made = make(4)
    for number in range(8):
        ask(rings, number, key=key_of(number), ring="ring-3")
    assert len(made[3].requests) == 8


def test_what_waits_for_a_lost_ring_goes_to_none_that_is_trusted_too_little() -> None:
    _, made = make(4, trusts={0: 20, 3: 20})
    made[0].attached = False

    def lose(*numbers: int) -> None:
        made[0].waiting = [
            (
                Request(f"r{one}", "key", 1, inference.Envelope(), "model", routing_key=key, min_trust=20),
                Answer(),
            )
            for one, key in zip(numbers, (b"", key_of(1)), strict=True)
        ]
        made[0].on_lost(made[0])

    lose(1, 2)
    assert [ring.requests for ring in made] == [[], [], [], ["r1", "r2"]]
    made[3].attached = False
    lose(3, 4)
    assert made[0].requests == ["r3", "r4"], "they wait for the ring that may have them"
    assert made[1].requests == made[2].requests == []


def test_a_model_that_no_ring_can_serve_is_down_and_not_unknown() -> None:
    """As when a member was evicted: the roster holds no ring of it, and the coordinator still plans one."""
    rings, _ = make(1)
    parked = membership.RingState(ring="other-0", deployment="other", phase=membership.RING_PHASE_DOWN)
    rings.ring_state(parked)
    assert rings.deployments() == ["model", "other"]
    with pytest.raises(Unavailable) as caught:
        ask(rings, 1, model="other")
    assert caught.value.reason == "RING_DOWN"
    assert caught.value.metadata["retry_after"] == "5"
    rings.begin_watch()
    assert rings.deployments() == ["model", "other"]
    rings.all_told()
    with pytest.raises(NotFound):
        ask(rings, 2, model="other")


def test_a_model_is_what_the_roster_says_of_its_own_rings() -> None:
    rings, (first, second) = make(2)
    signed = [
        SimpleNamespace(id="ring-0", deployment="model", min_trust=20, context=512, clear_links=False),
        SimpleNamespace(id="ring-1", deployment="model", min_trust=10, context=256, clear_links=True),
        SimpleNamespace(id="ring-2", deployment="other", min_trust=5, context=64, clear_links=False),
    ]
    for one in signed:
        one.model_digest = bytes(32)
    rings.use_roster(SimpleNamespace(rings=signed, members=[], hash=b""))  # type: ignore[arg-type]
    second.serving = None  # type: ignore[assignment]
    model, other = rings.models()
    assert (model.name, model.context, model.min_trust) == ("model", 256, 10)
    assert (model.rings, model.rows) == (1, first.serving.max_rows)
    assert (other.name, other.context, other.min_trust) == ("other", 64, 5)
    first.attached = False
    rings.ring_state(membership.RingState(ring="ring-3", deployment="planned"))
    model, _, planned = rings.models()
    assert (model.rings, model.rows) == (0, 0)
    assert planned == inference.Model(name="planned")


def test_a_model_without_a_ring_says_what_keeps_it_down() -> None:
    rings, (ring,) = make(1)
    rings.ring_state(membership.RingState(ring="ring-0", deployment="model", reason="mac1 is offline"))
    assert [model.reason for model in rings.models()] == [""], "it still serves"
    ring.attached = False
    assert [model.reason for model in rings.models()] == ["mac1 is offline"]


SERVES = {
    "phase": membership.RING_PHASE_SERVING,
    "deployment": "model",
    "max_rows": 4,
    "prefill_chunk": 64,
    "protocol": PROTOCOL_VERSION,
}


def roster_of(*names: str, members: tuple[str, ...] = ("one", "two")) -> Any:
    """A roster of rings of the same members, each at an address of its own."""
    listed = {name: SimpleNamespace(id=name, identity_key=b"k", addresses=(f"{name}:1",)) for name in members}
    return SimpleNamespace(
        version=7,
        hash=bytes(32),
        members=list(listed.values()),
        member=listed.__getitem__,
        rings=[
            SimpleNamespace(
                id=name,
                deployment="model",
                min_trust=10,
                clear_links=False,
                context=512,
                model_digest=bytes(32),
                members=list(listed.values()),
            )
            for name in names
        ],
    )


def watched() -> tuple[Rings, FakeRing]:
    """With a roster of one ring, of which the coordinator has said nothing yet."""
    rings, (ring,) = make(1)
    assert ring.events == ["leave"]
    return rings, ring


async def settle() -> None:
    """Waits for what the rings close in the background."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


async def test_what_roster_and_coordinator_agree_on_is_attached_to() -> None:
    bed = Bed(1)
    rings, (ring,) = bed.rings, bed.made
    state = membership.RingState(
        ring="ring-0", epoch=3, share_prefixes=True, speculate=True, model_type="llama", **SERVES
    )  # type: ignore[arg-type]
    rings.ring_state(state)
    serving = ring.events[-1]
    assert (serving.epoch, serving.max_rows, serving.prefill_chunk, serving.share_prefixes) == (
        3,
        4,
        64,
        True,
    )
    assert (serving.context, serving.min_trust, serving.roster_version) == (512, 10, 7)
    assert [member.id for member in serving.members] == ["one", "two"]
    assert [member.addresses for member in serving.members] == [("one:1",), ("two:1",)]
    ring.abilities = Abilities(["tools"])
    assert [(model.model_type, model.capabilities) for model in rings.models()] == [("llama", ["tools"])]


@pytest.mark.parametrize(
    "other",
    [{"phase": membership.RING_PHASE_DOWN}, {"deployment": "other"}, {"max_rows": 0}, {"prefill_chunk": 0}],
)
def test_what_they_do_not_agree_on_is_left(other: dict[str, Any]) -> None:
    rings, ring = watched()
    rings.ring_state(membership.RingState(ring="ring-1", **SERVES))  # type: ignore[arg-type]
    assert ring.events == ["leave"]
    rings.ring_state(membership.RingState(ring="ring-0", **(SERVES | other)))  # type: ignore[arg-type]
    assert ring.events == ["leave", "leave"]


async def test_connections_stand_to_members_of_the_valid_roster_only() -> None:
    bed = Bed(1)
    for members in (("one", "two"), ("one",)):
        bed.rings.use_roster(roster_of("ring-0", members=members))
        assert bed.members.kept == set(members)
    bed.rings.use_roster(None)
    assert bed.members.kept == set()


async def test_an_expired_roster_is_a_pause() -> None:
    """The coordinator sleeps. Rings are left at once; what waits and what comes is served once it wakes."""
    rings, ring = watched()
    rings.begin_watch()
    rings.ring_state(membership.RingState(ring="ring-0", **SERVES))  # type: ignore[arg-type]
    rings.all_told()
    rings.end_watch()
    for _ in range(2):
        rings.use_roster(None)
    ring.attached = False
    assert (ring.events[-2].epoch, ring.events[-1]) == (0, "leave")
    ask(rings, 1, min_trust=20)
    ask(rings, 2, ring="ring-0")
    assert ring.requests == ["r1", "r2"]
    rings.begin_watch()
    rings.use_roster(roster_of("ring-0"))
    rings.all_told()
    assert ring.events[-1].epoch == 0
    await settle()
    assert "close" not in ring.events


def test_a_ring_of_a_protocol_that_is_not_spoken_here_is_left() -> None:
    rings, ring = watched()
    newer = SERVES | {"protocol": PROTOCOL_VERSION + 1}
    rings.ring_state(membership.RingState(ring="ring-0", **newer))  # type: ignore[arg-type]
    assert ring.events == ["leave", "leave"]


def test_the_coordinator_says_how_long_requests_wait() -> None:
    rings, ring = watched()
    for told, waits in ((90, 90), (0, 90), (86400, 600)):
        rings.ring_state(membership.RingState(ring="ring-0", patience=told, **SERVES))  # type: ignore[arg-type]
        assert ring.patience.seconds == waits


async def test_a_ring_that_is_planned_anew_keeps_its_requests() -> None:
    """Its member was evicted: no roster holds it for a while. They wait, whatever trust they demand."""
    rings, ring = watched()
    rings.ring_state(membership.RingState(ring="ring-0", **SERVES))  # type: ignore[arg-type]
    rings.use_roster(roster_of())
    assert (ring.events[-1], "close" in ring.events) == ("leave", False)
    ring.attached = False
    ask(rings, 1, min_trust=20)
    assert ring.requests == ["r1"]
    rings.tick()
    assert ring.events[-1] == "tick"
    rings.use_roster(roster_of("ring-0"))
    assert ring.events[-1].epoch == SERVES.get("epoch", 0)
    await settle()


async def test_a_ring_is_gone_only_if_the_coordinator_has_named_all_and_not_this_one() -> None:
    """Before that the roster alone does not say so: the ring may be being planned anew."""
    for named in (True, False):
        rings, ring = watched()
        assert not rings.complete.is_set()
        rings.begin_watch()
        rings.use_roster(roster_of())
        if named:
            rings.ring_state(membership.RingState(ring="ring-0", **SERVES))  # type: ignore[arg-type]
        await settle()
        assert "close" not in ring.events
        rings.all_told()
        await settle()
        assert rings.complete.is_set()
        assert ("close" in ring.events) is not named


@pytest.mark.parametrize("gone", [False, True])
async def test_while_no_roster_is_in_use_the_next_one_tells_which_rings_are_gone(gone: bool) -> None:
    """This machine's clock is ahead, and the coordinator was started again: it names rings as they form."""
    rings, ring = watched()
    ask(rings, 1)
    rings.use_roster(None)
    rings.begin_watch()
    rings.all_told()
    await settle()
    assert "close" not in ring.events
    rings.use_roster(roster_of(*([] if gone else ["ring-0"])))
    await settle()
    assert ("close" in ring.events) is gone


def test_only_time_in_which_the_coordinator_is_heard_counts_against_a_ring() -> None:
    """Nobody could form it while the coordinator slept, or this machine did."""
    now, step = 1000.0, 2.0
    awake = AwakeClock(lambda: now, step=step)
    rings = Rings(
        FakeMembers(),  # type: ignore[arg-type]
        queue_limit=9,
        idle_prefill=True,
        metrics=Metrics(),
        signed_roster=lambda: (b"", b""),
        awake=awake,
    )
    rings.use_roster(roster_of("ring-0"))

    def passes(seconds: int, *, asleep: bool = False) -> None:
        nonlocal now
        for _ in range(1 if asleep else seconds):
            now += seconds if asleep else 1
            rings.tick()

    def ask_anew(number: int, **progress: Any) -> None:
        request = Request(f"r{number}", "key", 1, inference.Envelope(), "model")
        rings.submit(with_progress(request, **progress), Answer())

    passes(1000)  # the coordinator sleeps
    ask_anew(1)
    rings.begin_watch()
    passes(1000, asleep=True)  # this machine does
    passes(50)
    rings.end_watch()
    passes(1000)
    ask_anew(2)
    rings.begin_watch()
    passes(10)
    with pytest.raises(Unavailable, match="at the moment"):
        ask_anew(3)
    ask_anew(4, claimed=1)  # was accepted before, and goes on


async def test_what_waits_for_a_ring_that_is_closed_goes_to_another() -> None:
    rings, made = make(2)
    made[0].waiting = [(Request("r1", "key", 1, inference.Envelope(), "model"), Answer())]
    rings.ring_gone("ring-0")
    assert made[1].requests == ["r1"]
    await settle()


def test_a_model_is_as_old_as_its_first_roster() -> None:
    bed = Bed(1)
    bed.now = 2000.0
    bed.rings.use_roster(roster_of("ring-0"))
    assert [model.created for model in bed.rings.models()] == [1234]


async def test_a_ring_that_the_coordinator_takes_away_is_closed_and_others_stay() -> None:
    rings, made = make(2)
    rings.ring_gone("ring-9")
    rings.ring_gone("ring-0")
    await settle()
    assert [ring.events[-1] for ring in made] == ["close", "leave"]
    assert rings.deployments() == ["model"]
    rings.tick()
    assert [ring.events[-1] for ring in made] == ["close", "tick"]
    await rings.close()
    assert made[1].events[-1] == "close"
    assert rings.deployments() == []


def test_states_of_rings_that_are_in_no_roster_are_bounded() -> None:
    rings, _ = make(1)

    def state(name: str, kind: str) -> None:
        rings.ring_state(membership.RingState(ring=name, deployment=f"of {name}", model_type=kind))

    for number in range(MAX_RINGS):
        state(str(number), "first")
    state("one more", "first")
    state("0", "newer")
    models = {model.name: model.model_type for model in rings.models()}
    assert len(models) == MAX_RINGS + 1
    assert "of one more" not in models
    assert models["of 0"] == "newer"
    rings.begin_watch()
    rings.all_told()
    assert rings.deployments() == ["model"]


def test_of_rings_that_are_as_busy_the_one_with_most_memory_is_taken() -> None:
    rings, made = make(3)
    made[0].kv_usage = made[2].kv_usage = 0.5
    ask(rings, 1)
    made[0].serving.max_rows = 1000
    made[0].requests += ["x"]
    ask(rings, 2)
    assert [len(ring.requests) for ring in made] == [1, 1, 1]
    rings.cancel("r1")
    rings.cancel("r1")
    assert [ring.events.count("r1") for ring in made] == [0, 1, 0]


def test_how_busy_rings_are_is_told_of_those_that_serve() -> None:
    bed = Bed(3)
    rings, made = bed.rings, bed.made
    for number in range(5):
        ask(rings, number)
    made[0].attached, made[1].serving = False, None  # type: ignore[assignment]
    made[2].kv_usage = 0.25
    made[2].abilities = Abilities(["thinking"], vision_not_installed=True)
    rings.ring_state(membership.RingState(ring="ring-2", model_type="llama"))
    (serving,) = rings.signed_roster().serving
    assert (serving.ring, serving.rows, serving.model_type) == ("ring-2", 4, "llama")
    assert (serving.capabilities, serving.vision_not_installed) == (["thinking"], True)
    assert (serving.waiting, serving.running) == (0, len(made[2].requests))
    assert bed.counted("num_requests_running", "") == 5
    assert bed.counted("kv_cache_usage_perc", "") == 0.25
    assert (bed.counted("prefix_cache_tokens", ""), bed.counted("prefix_cache_bytes", "")) == (9, 15)


def test_a_sealed_prompt_waits_only_where_it_cannot_be_sealed_for_another() -> None:
    rings, made = make(2)
    made[0].attached = False
    with pytest.raises(Unavailable) as caught:
        ask(rings, 1, ring="ring-0")
    assert caught.value.reason == "RING_DOWN"
    made[1].attached = False
    ask(rings, 2, ring="ring-0")
    assert made[0].requests == ["r2"]


async def test_what_was_sealed_for_a_lost_ring_fails() -> None:
    _, made = make(2)
    envelope = inference.Envelope(sealed_for=inference.SealedFor(ring="ring-0"))
    answer = Answer()
    made[0].waiting = [(Request("r1", "key", 1, envelope, "model"), answer)]
    made[0].on_lost(made[0])
    with pytest.raises(Unavailable) as caught:
        await anext(answer)
    assert caught.value.reason == "RING_DOWN"
    assert made[1].requests == []
    made[0].waiting, made[1].attached = [(Request("r2", "key", 1, envelope, "model"), answer)], False
    made[0].on_lost(made[0])
    assert made[0].waiting, "it waits where there is no other"


# Models on demand

NOT_LOADED, LOADING = membership.LOAD_PHASE_NOT_LOADED, membership.LOAD_PHASE_LOADING
LOADED, YIELDING = membership.LOAD_PHASE_LOADED, membership.LOAD_PHASE_YIELDING


def on_demand(phase: Any, **fields: Any) -> membership.ModelState:
    return membership.ModelState(deployment="big", phase=phase, rings=["big-0"], context=512, **fields)


def big(bed: Bed) -> FakeRing:
    return next(ring for ring in bed.made if ring.deployment == "big")


def wishes(bed: Bed) -> membership.ModelDemand:
    demand = bed.rings.demand()
    assert demand is not None
    return demand.models[0]


async def test_a_request_for_a_model_that_is_not_loaded_waits_in_its_ring_and_is_reported() -> None:
    bed = Bed(1)
    assert bed.rings.demand() is None, "a coordinator of an earlier release gets no report"
    told = {"model_type": "llama", "digest": "ab" * 32, "card": {"parameters": 2500, "precision": "int4"}}
    bed.rings.model_state(on_demand(NOT_LOADED, aliases=["gpt"], **told))
    assert "big" in bed.rings.deployments()
    assert bed.rings.aliases() == {"gpt": "big"}
    big(bed).attached = False
    bed.rings.wanted.clear()
    ask(bed.rings, 1, model="big")
    assert big(bed).requests == ["r1"]
    assert bed.rings.wanted.is_set()
    assert (wishes(bed).active, wishes(bed).asked) == (1, 1)
    model = next(one for one in bed.rings.models() if one.name == "big")
    assert (model.availability, model.context) == (inference.MODEL_AVAILABILITY_NOT_LOADED, 512)
    assert (model.model_type, model.digest) == ("llama", "ab" * 32)
    assert model.card == ModelCard(parameters=2500, precision="int4")
    assert model.precision == "int4", "for a client of the release before"


@pytest.mark.parametrize(
    ("phase", "attached", "availability"),
    [
        (NOT_LOADED, True, inference.MODEL_AVAILABILITY_NOT_LOADED),
        (LOADING, False, inference.MODEL_AVAILABILITY_LOADING),
        (LOADED, True, inference.MODEL_AVAILABILITY_LOADED),
        (LOADED, False, inference.MODEL_AVAILABILITY_LOADING),
        (YIELDING, True, inference.MODEL_AVAILABILITY_LOADED),
        (YIELDING, False, inference.MODEL_AVAILABILITY_NOT_LOADED),
        (99, False, inference.MODEL_AVAILABILITY_UNSPECIFIED),
    ],
)
async def test_a_model_on_demand_is_never_down(phase: int, attached: bool, availability: int) -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(phase))
    big(bed).attached = attached
    (model,) = (one for one in bed.rings.models() if one.name == "big")
    assert model.availability == availability


async def test_a_ring_whose_model_may_be_loaded_never_loses_its_patience() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(LOADING))
    before = big(bed).hoped
    bed.rings.tick()
    assert big(bed).hoped == before + 1
    bed.rings.model_state(on_demand(LOADED))
    before = big(bed).hoped
    bed.rings.tick()
    assert big(bed).hoped == before


async def test_what_waits_survives_the_unloading_and_not_the_deletion() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(LOADED))
    bed.rings.all_told()
    big(bed).attached = False
    bed.rings.ring_gone("big-0")
    bed.rings.use_roster(roster_of("ring-0"))
    assert set(big(bed).events) == {"leave"}
    bed.rings.model_gone("big")
    await asyncio.sleep(0)
    assert big(bed).events[-1] == "close"
    assert "big" not in bed.rings.deployments()


async def test_a_model_that_cannot_be_loaded_fails_what_waits_and_what_comes() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(NOT_LOADED))
    request, answer = Request("r1", "key", 1, inference.Envelope(), "big"), Answer()
    big(bed).waiting = [(request, answer)]
    problem = membership.Problem(code="UNAVAILABLE", reason="DOES_NOT_FIT", message="too large")
    bed.rings.model_state(on_demand(NOT_LOADED, problem=problem))
    with pytest.raises(Unavailable) as caught:
        await anext(answer)
    assert caught.value.reason == "DOES_NOT_FIT"
    with pytest.raises(Unavailable):
        ask(bed.rings, 2, model="big")


async def test_a_request_with_less_time_than_the_load_takes_is_refused_with_the_time() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(LOADING, seconds=40, reason="one is unloaded for it"))
    hasty = Request("r1", "key", 1, inference.Envelope(), "big", patience=30.0)
    with pytest.raises(Unavailable) as caught:
        bed.rings.submit(hasty, Answer())
    assert (caught.value.reason, caught.value.metadata["retry_after"]) == ("MODEL_LOADING", "40")
    assert "one is unloaded for it" in caught.value.message
    ask(bed.rings, 2, model="big")


async def test_a_model_that_yields_begins_no_request() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(LOADED))
    bed.rings.model_state(on_demand(YIELDING))
    assert big(bed).holds
    assert wishes(bed).holding
    bed.rings.model_state(on_demand(LOADED))
    assert not big(bed).holds


async def test_loading_waits_for_a_ring_and_unloading_does_not() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(NOT_LOADED))
    big(bed).attached = False
    loading = asyncio.ensure_future(bed.rings.load("big", 60, "key"))
    await asyncio.sleep(0)
    assert (wishes(bed).waiting, wishes(bed).keep_alive) == (1, 60)
    bed.rings.model_state(on_demand(LOADED))
    big(bed).attached = True
    bed.rings.tick()
    await loading
    assert wishes(bed).waiting == 0
    await bed.rings.load("big", 0, "key")
    assert wishes(bed).keep_alive == 0
    bed.rings.model_state(on_demand(NOT_LOADED))
    assert not wishes(bed).HasField("keep_alive"), "it held for that load"


async def test_a_gateway_whose_clock_is_wrong_refuses_what_is_new_and_says_so() -> None:
    bed = Bed(1)
    bed.rings.clock_ahead = 3600
    with pytest.raises(Unavailable) as caught:
        ask(bed.rings, 1)
    assert (caught.value.reason, caught.value.metadata["retry_after"]) == ("ROSTER_EXPIRED", "60")
    assert "3600 s ahead" in caught.value.message
    with pytest.raises(Unavailable):
        await bed.rings.load("model", None, "")
    again = Request("r2", "key", 1, inference.Envelope(), "model")
    again.progress.claimed = 1
    bed.rings.submit(again, Answer())
    bed.rings.clock_ahead = 0
    ask(bed.rings, 3)


async def test_a_tenants_wish_for_a_model_ends_no_other_tenants() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(LOADED, keep_alive=900))
    ask(bed.rings, 1, model="big")
    assert not wishes(bed).HasField("keep_alive"), "as deployed"
    await bed.rings.load("big", 0, "another")
    assert wishes(bed).keep_alive in (899, 900), "from now on, for the tenant that named no time"
    await bed.rings.load("big", -1, "another")
    assert wishes(bed).keep_alive == -1
    await bed.rings.load("big", 0, "another")
    await bed.rings.load("big", 0, "")
    assert wishes(bed).keep_alive == 0, "nobody wants it any more"


@pytest.mark.parametrize("how", ["deleted", "refused"])
async def test_who_waits_for_a_model_hears_why_it_does_not_come(how: str) -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(NOT_LOADED))
    loading = asyncio.ensure_future(bed.rings.load("big", None, "key"))
    await asyncio.sleep(0)
    if how == "deleted":
        bed.rings.model_gone("big")
    else:
        problem = membership.Problem(code="UNAVAILABLE", reason="DOES_NOT_FIT")
        bed.rings.model_state(on_demand(NOT_LOADED, problem=problem))
    with pytest.raises((NotFound, Unavailable)) as caught:
        await loading
    assert caught.value.reason == {"deleted": "MODEL_NOT_FOUND", "refused": "DOES_NOT_FIT"}[how]


async def test_a_model_that_a_coordinator_no_longer_names_is_gone() -> None:
    bed = Bed(1)
    bed.rings.model_state(on_demand(NOT_LOADED))
    bed.rings.begin_watch()
    bed.rings.all_told()
    assert "big" not in bed.rings.deployments()
    await bed.rings.close()
