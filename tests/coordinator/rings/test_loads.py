"""Models on demand: loaded when asked for, unloaded when idle or for another one, never while they answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sealring.coordinator.rings.loads import RETRY_SECONDS, TRIES, Heard, LoadPhase, Loads, Policy, fewest
from sealring.mesh.errors import ResourceExhausted

TURN = 60.0
HALF_HOUR = Policy(1800.0)


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never waits."""
    with pytest.raises(StopIteration) as caught:
        work.send(None)
    return caught.value.value


def deployed(**policies: Policy) -> Loads:
    loads = Loads(TURN)
    loads.sync({name: (policy, False) for name, policy in policies.items()}, 0.0)
    return loads


def load(loads: Loads, name: str, now: float) -> None:
    """Loads a model that has room."""
    loads.hear(name, Heard(waiting=1, used=True), now)
    loads.models[name].enter(LoadPhase.LOADING, now)
    loads.serving(name, now)
    loads.hear(name, Heard(), now)


def phases(loads: Loads) -> dict[str, LoadPhase]:
    return {name: one.phase for name, one in loads.models.items()}


def test_a_model_is_loaded_when_it_is_asked_for_and_not_before() -> None:
    loads = deployed(a=HALF_HOUR, b=HALF_HOUR)
    assert not loads.waiting(0.0)
    loads.hear("b", Heard(waiting=1), 2.0)
    loads.hear("a", Heard(waiting=1), 1.0)
    assert loads.waiting(2.0) == ["a", "b"]
    loads.sync({"a": (HALF_HOUR, True), "b": (HALF_HOUR, False)}, 3.0)
    loads.serving("a", 13.0)
    assert phases(loads) == {"a": LoadPhase.LOADED, "b": LoadPhase.WAITING}
    assert loads.models["a"].took == 10.0


def test_the_last_client_that_goes_ends_the_wish() -> None:
    loads = deployed(a=HALF_HOUR)
    loads.hear("a", Heard(waiting=1), 1.0)
    loads.hear("a", Heard(), 2.0)
    assert not loads.waiting(2.0)


@pytest.mark.parametrize(("keep_alive", "unloaded"), [(900.0, True), (math.inf, False)])
def test_an_idle_model_is_unloaded_after_its_keep_alive(keep_alive: float, unloaded: bool) -> None:
    loads = deployed(a=Policy(keep_alive))
    load(loads, "a", 0.0)
    assert not loads.tick(899.0)
    loads.tick(900.0)
    loads.hear("a", Heard(holding=True), 901.0)
    assert loads.tick(901.0) == (["a"] if unloaded else [])


def test_a_model_is_used_until_its_last_answer_ends() -> None:
    """Nothing is heard of it meanwhile."""
    loads = deployed(a=Policy(900.0))
    load(loads, "a", 0.0)
    loads.hear("a", Heard(active=True, used=True), 10.0)
    loads.hear("a", Heard(), 5000.0)
    assert loads.tick(5000.0) == []
    assert loads.models["a"].phase is LoadPhase.LOADED
    assert loads.expires("a") == 5900.0


def test_a_use_while_it_is_about_to_be_unloaded_keeps_it() -> None:
    loads = deployed(a=Policy(900.0))
    load(loads, "a", 0.0)
    loads.tick(900.0)
    assert loads.models["a"].phase is LoadPhase.YIELDING
    loads.hear("a", Heard(waiting=1, holding=True), 901.0)
    assert not loads.tick(901.0)
    assert loads.models["a"].phase is LoadPhase.LOADED


def test_a_clients_keep_alive_takes_the_place_of_the_operators_after_the_models_turn() -> None:
    loads = deployed(a=Policy(900.0))
    load(loads, "a", 0.0)
    loads.hear("a", Heard(used=True, holding=True, keep_alive=0.0), 10.0)
    assert loads.tick(10.0) == [], "it would be loaded again and again"
    assert loads.expires("a") == TURN
    assert loads.tick(TURN) == ["a"]


def test_the_longest_idle_unpinned_model_makes_room() -> None:
    loads = deployed(a=HALF_HOUR, b=HALF_HOUR, c=Policy(1800.0, pinned=True), d=HALF_HOUR)
    for name, used in (("c", 0.0), ("b", 1.0), ("a", 2.0)):
        load(loads, name, used)
    loads.hear("b", Heard(active=True), 50.0)
    loads.hear("d", Heard(waiting=1), 100.0)
    assert loads.victims("d", 100.0).now == ("a", "b")
    loads.make_room("d", ["a"], 100.0)
    assert loads.freed("d") is None
    loads.hear("a", Heard(holding=True), 101.0)
    assert loads.freed("d") == ["a"]


def test_a_model_that_was_loaded_a_moment_ago_stays_for_its_turn() -> None:
    loads = deployed(a=HALF_HOUR, b=HALF_HOUR)
    load(loads, "a", 0.0)
    loads.hear("b", Heard(waiting=1), 10.0)
    victims = loads.victims("b", 10.0)
    assert (victims.now, victims.later, victims.at) == ((), ("a",), TURN)
    assert loads.seconds("b", 10.0) == 50.0
    loads.postponed("b", victims, 10.0)
    assert "a" in loads.models["b"].reason
    loads.make_room("b", ["a"], 10.0)
    assert loads.models["a"].phase is LoadPhase.LOADED, "too early"
    loads.make_room("b", ["a"], TURN)
    assert loads.models["a"].phase is LoadPhase.YIELDING


def test_room_is_not_made_for_a_model_that_nobody_wants_any_more() -> None:
    loads = deployed(a=HALF_HOUR, b=HALF_HOUR)
    load(loads, "a", 0.0)
    loads.hear("b", Heard(waiting=1), 99.0)
    loads.make_room("b", ["a"], 99.0)
    loads.sync({"a": (HALF_HOUR, True)}, 100.0)
    assert phases(loads) == {"a": LoadPhase.LOADED}
    assert loads.yielded_to == ""


def test_who_makes_room_for_a_model_that_is_refused_stays() -> None:
    loads = deployed(a=HALF_HOUR, b=HALF_HOUR)
    load(loads, "a", 0.0)
    loads.hear("b", Heard(waiting=1), 99.0)
    loads.make_room("b", ["a"], 99.0)
    loads.refused("b", ResourceExhausted("too large", reason="DOES_NOT_FIT"), 100.0)
    assert phases(loads) == {"a": LoadPhase.LOADED, "b": LoadPhase.NOT_LOADED}
    assert loads.yielded_to == ""


def test_a_model_that_does_not_fit_is_refused_for_a_while() -> None:
    loads = deployed(a=HALF_HOUR)
    loads.hear("a", Heard(waiting=1), 1.0)
    loads.refused("a", ResourceExhausted("too large", reason="DOES_NOT_FIT"), 1.0)
    loads.hear("a", Heard(waiting=1), 2.0)
    assert not loads.waiting(2.0)
    assert loads.models["a"].error is not None
    loads.hear("a", Heard(waiting=1), 1.0 + RETRY_SECONDS)
    assert loads.waiting(1.0 + RETRY_SECONDS) == ["a"]
    assert loads.models["a"].error is None


def test_rings_that_do_not_form_are_placed_anew_and_then_given_up() -> None:
    loads = deployed(a=HALF_HOUR)
    for now in range(TRIES):
        loads.hear("a", Heard(waiting=1), now)
        assert loads.waiting(now) == ["a"]
        loads.sync({"a": (HALF_HOUR, True)}, now)
        loads.stuck("a", "beta is offline", now)
    error = loads.models["a"].error
    assert error is not None
    assert error.reason == "MODEL_NOT_LOADED"
    assert "beta is offline" in error.message


def test_what_a_restarted_coordinator_finds_loaded_has_its_turn_and_its_keep_alive_anew() -> None:
    loads = Loads(TURN)
    loads.sync({"a": (Policy(900.0), True), "b": (HALF_HOUR, False)}, 1000.0)
    loads.hear("b", Heard(waiting=1), 1001.0)
    assert loads.victims("b", 1001.0).now == ()
    loads.serving("a", 1002.0)
    assert loads.victims("b", 1002.0 + TURN).now == ("a",)
    assert loads.models["a"].used == 1002.0


def test_as_few_as_possible_are_unloaded() -> None:
    sizes = {"a": 1, "b": 8, "c": 4}

    def room(needed: int) -> Callable[[Sequence[str]], Any]:
        async def fits(freed: Sequence[str]) -> bool:
            return sum(sizes[one] for one in freed) >= needed

        return fits

    assert finished(fewest("abc", room(0))) == []
    assert finished(fewest("abc", room(1))) == ["a"]
    assert finished(fewest("abc", room(5))) == ["b"], "a alone is not enough, and b does without it"
    assert finished(fewest("abc", room(12))) == ["b", "c"]
    assert finished(fewest("abc", room(14))) is None


class Household(RuleBasedStateMachine):
    """Some models, memory for not all of them, gateways that keep to the protocol, and a coordinator that
    does what the machine says."""

    NAMES = "abcd"

    def __init__(self) -> None:
        super().__init__()
        self.loads = Loads(TURN)
        self.now = 0.0
        self.capacity = 10
        self.sizes: dict[str, int] = {}
        self.policies: dict[str, Policy] = {}
        self.has: set[str] = set()
        self.under_way = dict.fromkeys(self.NAMES, 0)
        self.waits = dict.fromkeys(self.NAMES, 0)
        self.forming: set[str] = set()
        self.loaded_at = dict.fromkeys(self.NAMES, -math.inf)
        self.used = dict.fromkeys(self.NAMES, False)

    @initialize(
        sizes=st.lists(st.integers(1, 9), min_size=4, max_size=4),
        keep=st.lists(st.sampled_from([0.0, 30.0, 900.0, math.inf]), min_size=4, max_size=4),
        pinned=st.sets(st.sampled_from(NAMES), max_size=1),
    )
    def deploy(self, sizes: list[int], keep: list[float], pinned: set[str]) -> None:
        self.sizes = dict(zip(self.NAMES, sizes, strict=True))
        self.policies = {
            name: Policy(seconds, name in pinned) for name, seconds in zip(self.NAMES, keep, strict=True)
        }
        self.sync()

    def sync(self) -> None:
        self.loads.sync({name: (one, name in self.has) for name, one in self.policies.items()}, self.now)

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        if name in self.policies:
            self.waits[name] += 1
            self.used[name] = True
            self.step()

    @rule(name=st.sampled_from(NAMES))
    def answer(self, name: str) -> None:
        self.under_way[name] = max(0, self.under_way[name] - 1)
        self.step()

    @rule(name=st.sampled_from(NAMES))
    def go_away(self, name: str) -> None:
        self.waits[name] = 0
        self.step()

    @rule(seconds=st.sampled_from([1.0, 20.0, 70.0, 1000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.step()

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        self.policies.pop(name, None)
        self.has.discard(name)
        self.forming.discard(name)
        self.waits[name] = self.under_way[name] = 0
        self.sync()
        self.step()

    @precondition(lambda self: self.forming)
    @rule()
    def form(self) -> None:
        name = min(self.forming)
        self.forming.discard(name)
        self.loaded_at[name] = self.now
        self.loads.serving(name, self.now)
        self.step()

    @precondition(lambda self: self.forming)
    @rule()
    def break_down(self) -> None:
        name = min(self.forming)
        self.forming.discard(name)
        self.has.discard(name)
        self.loads.stuck(name, "a node died", self.now)
        self.step()

    def step(self) -> None:
        """One look of the coordinator."""
        for name in self.policies:
            phase = self.loads.models[name].phase
            if phase is LoadPhase.LOADED:
                self.under_way[name] += self.waits[name]
                self.waits[name] = 0
            if self.loads.models[name].error is not None:
                self.waits[name] = 0
            heard = Heard(
                self.under_way[name] > 0, self.waits[name], self.used[name], phase is LoadPhase.YIELDING
            )
            self.used[name] = False
            self.loads.hear(name, heard, self.now)
        for name in self.loads.tick(self.now):
            self.free(name)
        for _ in range(3 * len(self.NAMES)):
            waiting = self.loads.waiting(self.now)
            for name in waiting:
                self.place(name)
            if not waiting:
                return
        raise AssertionError("the coordinator looks for room all the time while nothing changes")

    def place(self, name: str) -> None:
        if self.loads.yielded_to == name:
            freed = self.loads.freed(name)
            if freed is not None:
                self.put(name, freed)
            return
        victims = self.loads.victims(name, self.now)
        chosen = finished(fewest(victims.now, self.fits(name)))
        if chosen == []:
            self.put(name, [])
        elif self.loads.yielded_to:
            self.loads.postponed(name, victims, self.now)
        elif chosen:
            for one in chosen:
                assert self.now >= self.loaded_at[one] + TURN or not self.under_way[one]
            self.loads.make_room(name, chosen, self.now)
        elif finished(self.fits(name)([*victims.now, *victims.later])):
            self.loads.postponed(name, victims, self.now)
        else:
            self.loads.refused(name, ResourceExhausted("too large"), self.now)

    def fits(self, name: str) -> Callable[[Sequence[str]], Any]:
        async def fits(freed: Sequence[str]) -> bool:
            taken = sum(self.sizes[one] for one in self.has - set(freed))
            return taken + self.sizes[name] <= self.capacity

        return fits

    def put(self, name: str, freed: list[str]) -> None:
        for one in freed:
            assert not self.policies[one].pinned
            assert self.now >= self.loaded_at[one] + TURN, "each has its turn"
            self.free(one)
        self.has.add(name)
        self.forming.add(name)
        self.sync()

    def free(self, name: str) -> None:
        assert not self.under_way[name], "no answer is cut off"
        self.has.discard(name)
        self.forming.discard(name)

    @invariant()
    def holds_no_more_than_there_is(self) -> None:
        assert sum(self.sizes[name] for name in self.has) <= self.capacity

    @invariant()
    def knows_what_has_rings(self) -> None:
        held = {
            name
            for name, one in self.loads.models.items()
            if one.phase in (LoadPhase.LOADING, LoadPhase.LOADED, LoadPhase.YIELDING)
        }
        assert held == self.has

    def teardown(self) -> None:
        """Once every answer ends and every ring forms, each model that is asked for gets its turn or an
        error."""
        waited = {name for name in self.policies if self.waits[name]}
        for _ in range(40):
            self.under_way = dict.fromkeys(self.NAMES, 0)
            for name in sorted(self.forming):
                self.loaded_at[name] = self.now
                self.loads.serving(name, self.now)
            self.forming.clear()
            self.now += 20.0
            self.step()
        assert not [name for name in waited if self.waits[name]]


TestHousehold = Household.TestCase
TestHousehold.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
