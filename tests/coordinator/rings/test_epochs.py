"""The epoch machine: the good path, every way to end, and what holds over any sequence of events."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sealring.coordinator.rings.epochs import (
    FIRST_BACKOFF,
    LAST_BACKOFF,
    RETRY_SECONDS,
    STEADY_SECONDS,
    Action,
    Changed,
    Commit,
    End,
    Phase,
    Prepare,
    RingEpochs,
    Timeouts,
)
from sealring.mesh.errors import Unavailable
from sealring.mesh.system.pace import LOADING, STARTING, Reached
from sealring.v1 import membership_pb2

MEMBERS = ("a", "b", "c")
NAMES = {member: f"node-{member}" for member in MEMBERS}
OUTLIVED = 3
HALF = Reached(LOADING, 1, 2)
LINKS = [membership_pb2.LinkInfo(from_rank=0, to_rank=1, suite="x")]


def machine(*, first: int = 1, undecided: bool = False, weights: int = 0) -> RingEpochs:
    counter = itertools.count(first)
    timeouts = Timeouts(prepare=120, commit=60, grace=6)
    bytes_of = dict.fromkeys(MEMBERS, weights)
    return RingEpochs(NAMES, lambda: next(counter), timeouts, undecided=undecided, weights=bytes_of)


def bring_online(ring: RingEpochs, now: float = 0.0) -> list[Action]:
    return [action for member in MEMBERS for action in ring.online(member, now)]


def serve(ring: RingEpochs, now: float = 0.0) -> None:
    bring_online(ring, now)
    ring.tick(now + LAST_BACKOFF)
    epoch = ring.epoch
    for member in MEMBERS:
        ring.prepared(member, epoch, LINKS, now)
    for member in MEMBERS:
        ring.up(member, epoch, now)
    assert ring.phase is Phase.SERVING


def test_the_commit_of_a_tensor_ring_names_where_each_rank_is_found() -> None:
    ring = machine()
    bring_online(ring)
    for member in ("c", "a"):
        assert ring.prepared(member, 1, LINKS, 1, f"{member}:1") == []
    assert ring.prepared("b", 1, LINKS, 1, "b:1") == [Commit(1, ("a:1", "b:1", "c:1")), Changed()]


def test_the_commit_says_with_what_each_rank_computes() -> None:
    ring = machine()
    bring_online(ring)
    for member in ("c", "a"):
        assert ring.prepared(member, 1, LINKS, 1, "", member.encode()) == []
    assert ring.prepared("b", 1, LINKS, 1, "", b"b") == [Commit(1, (), (b"a", b"b", b"c")), Changed()]


def test_the_good_path() -> None:
    ring = machine()
    assert ring.online("a", 0) == []
    assert ring.online("b", 0) == []
    assert ring.online("c", 0) == [Prepare(1), Changed()]
    assert ring.prepared("a", 1, LINKS, 1) == []
    assert ring.prepared("a", 1, LINKS, 1) == []
    assert ring.prepared("b", 1, LINKS, 1) == []
    assert ring.prepared("c", 1, LINKS, 1) == [Commit(1), Changed()]
    assert [ring.up(member, 1, 2) for member in MEMBERS] == [[], [], [Changed()]]
    assert ring.phase is Phase.SERVING
    assert ring.links == LINKS
    assert ring.deadline() is None


def test_a_fault_ends_the_epoch_and_the_next_waits_for_the_back_off() -> None:
    ring = machine()
    serve(ring)
    assert ring.fault("b", 1, "carrier died", 5) == [End(1, "carrier died"), Changed()]
    assert ring.reason == "carrier died"
    assert ring.deadline() == 5 + FIRST_BACKOFF
    assert ring.tick(5.1) == []
    assert ring.tick(5.2) == [Prepare(2), Changed()]


def test_the_back_off_doubles_up_to_its_limit_and_starts_anew_after_a_good_epoch() -> None:
    ring = machine()
    bring_online(ring)
    waits, now = [], 0.0
    for _ in range(8):
        ring.fault("a", ring.epoch, "no", now)
        due = ring.deadline()
        assert due is not None
        waits.append(round(due - now, 6))
        now = due
        ring.tick(now)
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    for member in MEMBERS:
        ring.prepared(member, ring.epoch, [], now)
    for member in MEMBERS:
        ring.up(member, ring.epoch, now)
    now += STEADY_SECONDS
    ring.fault("a", ring.epoch, "no", now)
    assert ring.deadline() == now + FIRST_BACKOFF


def test_old_epochs_and_strangers_change_nothing() -> None:
    ring = machine()
    serve(ring)
    ring.fault("a", 1, "no", 1)
    ring.tick(20)
    assert ring.epoch == 2
    assert ring.fault("a", 1, "late", 20) == []
    assert ring.prepared("a", 1, LINKS, 20) == []
    assert ring.up("a", 2, 20) == []
    assert ring.fault("z", 2, "stranger", 20) == []
    assert ring.online("z", 20) == []
    assert ring.offline("z", 20) == []
    assert ring.prepared("z", 2, LINKS, 20) == []
    assert ring.phase is Phase.PREPARING


def test_a_member_that_goes_away_ends_it_and_its_return_forms_the_next() -> None:
    ring = machine()
    serve(ring)
    assert ring.offline("c", 100) == [End(1, "node-c is offline"), Changed()]
    assert ring.deadline() is None
    assert ring.tick(1000) == []
    assert ring.online("c", 1000) == [Prepare(2), Changed()]


def test_a_serving_ring_outlives_a_short_loss_of_the_stream() -> None:
    ring = machine()
    serve(ring)
    assert ring.lost("b", 10) == []
    assert ring.deadline() == 16
    assert ring.online("b", 15) == []
    assert ring.tick(17) == []
    assert ring.lost("b", 20) == []
    assert ring.lost("b", 25) == []
    assert ring.tick(26) == [End(1, "node-b is offline"), Changed()]


def test_an_attended_ring_goes_on_without_a_member_that_only_the_coordinator_misses() -> None:
    ring = machine()
    serve(ring)
    ring.lost("b", 10)
    ring.attended(1, 15)
    ring.attended(0, 20)
    assert ring.tick(20.9) == []
    assert ring.tick(21) == [End(1, "node-b is offline"), Changed()]
    ring.attended(1, 21)
    assert ring.deadline() is None


def test_a_serving_ring_of_which_nothing_is_heard_goes_on_until_somebody_comes() -> None:
    ring = machine()
    serve(ring)
    for member in MEMBERS:
        ring.lost(member, 10)
    assert (ring.deadline(), ring.tick(1000)) == (None, [])
    assert ring.online("a", 1000, serving=1) == []
    assert ring.deadline() == 1006
    assert ring.online("b", 1001, serving=1) == []
    assert ring.tick(1006) == [End(1, "node-c is offline"), Changed()]
    assert ring.online("c", 1007, serving=1) == [Prepare(2), Changed()], "it is over, whoever still has it"


def test_an_epoch_that_outlived_the_coordinator_goes_on() -> None:
    ring = machine(first=8, undecided=True)
    assert ring.undecided
    first, second = (
        membership_pb2.LinkInfo(from_rank=rank, to_rank=rank + 1, suite="test") for rank in (0, 1)
    )
    assert ring.online("b", 0, serving=7, links=[first, second]) == [Changed()]
    assert (ring.phase, ring.epoch, ring.undecided) == (Phase.SERVING, 7, False)
    assert ring.reason == "the coordinator hears nothing of node-a, node-c"
    assert ring.online("a", 5, serving=7, links=[first]) == []
    assert ring.links == [first, second]
    assert ring.online("c", 5, serving=7) == []
    assert ring.reason == ""
    assert ring.deadline() is None
    assert ring.fault("c", 7, "no", 20) == [End(7, "no"), Changed()]
    assert ring.tick(21) == [Prepare(8), Changed()]


def test_a_member_that_does_not_come_back_ends_what_was_adopted() -> None:
    ring = machine(undecided=True)
    ring.online("b", 0, serving=7)
    ring.online("a", 5, serving=7)
    assert ring.tick(6) == [End(7, "node-c is offline"), Changed()]


def test_an_epoch_that_is_over_for_one_member_is_not_adopted() -> None:
    """Nor any later, when the machine has ended one itself."""
    ring = machine(first=8, undecided=True)
    assert ring.online("a", 0) == []
    assert ring.online("b", 0, serving=7) == []
    assert ring.online("c", 0, serving=7) == [Prepare(8), Changed()]
    assert machine().online("a", 0, serving=7) == []
    ring = machine(first=9, undecided=True)
    for epoch in (7, 8):
        ring.online("a", 0, serving=epoch)
        ring.fault("a", 7, "no", 0)
    assert (ring.phase, ring.epoch) == (Phase.WAITING, 7)


def test_a_forming_ring_does_not() -> None:
    ring = machine()
    bring_online(ring)
    assert ring.lost("b", 1) == [End(1, "node-b is offline"), Changed()]


def test_a_fault_while_a_stream_is_missing_waits_for_its_return() -> None:
    ring = machine()
    serve(ring)
    ring.lost("b", 10)
    ring.fault("a", 1, "neighbour lost", 10)
    assert ring.tick(50) == []
    assert ring.online("b", 50) == [Prepare(2), Changed()]


def test_deadlines_end_what_takes_too_long_and_progress_moves_them() -> None:
    ring = machine()
    nobody = "node-a, node-b, node-c did not finish"
    bring_online(ring)
    assert ring.advanced("a", 1, HALF, 100) == []
    assert ring.progress == {"a": HALF}
    assert ring.slowest == ("b", Reached(STARTING), 0.0), "others have said nothing yet"
    assert ring.tick(130) == []
    ring.advanced("a", 1, HALF, 219)
    assert ring.tick(220) == [
        End(1, f"preparing took too long: {nobody}"),
        Changed(),
    ]
    ring.tick(221)
    for member in MEMBERS:
        ring.prepared(member, 2, [], 221)
    assert ring.tick(281) == [
        End(2, f"committing took too long: {nobody}"),
        Changed(),
    ]


def test_what_is_told_of_a_load_goes_on_in_the_next_epoch_until_one_serves() -> None:
    ring = machine(weights=100)
    bring_online(ring)
    for member in MEMBERS:
        ring.advanced(member, 1, HALF, 0)
    told = ring.slowest[2]
    assert told > 0
    ring.fault("a", 1, "its engine ended", 1)
    ring.tick(2)
    ring.advanced("a", 2, Reached(STARTING), 2)
    assert (ring.epoch, ring.slowest) == (2, ("a", Reached(STARTING), told))
    serve(ring, 2)
    ring.fault("a", 2, "its engine ended", 500)
    ring.tick(502)
    assert (ring.epoch, ring.slowest[2]) == (3, 0.0)


def test_the_culprits_own_word_replaces_what_its_neighbours_said() -> None:
    ring = machine()
    serve(ring)
    ring.fault("c", 1, "node-c: the connection to a neighbour was lost", 10, root=False)
    assert ring.reason == "node-c: the connection to a neighbour was lost"
    assert ring.fault("a", 1, "node-a: the gateway has gone", 10, root=False) == []
    assert ring.fault("b", 1, "node-b: the engine ended", 10) == [Changed()]
    ring.tick(11)
    assert ring.fault("a", 1, "node-a: something else", 11) == [], "the first root cause stands"
    assert ring.reason == "node-b: the engine ended"
    assert ring.phase is Phase.PREPARING


def test_a_member_that_goes_is_the_cause_of_what_its_neighbours_said() -> None:
    for order in ("word first", "silence first", "silence much later"):
        ring = machine()
        serve(ring)
        if order == "silence first":
            ring.lost("b", 10)
        ring.fault("c", 1, "node-c: the connection to a neighbour was lost", 10, root=False)
        if order == "word first":
            assert ring.lost("b", 10) == [Changed()]
        if order == "silence much later":
            ring.tick(11)
            ring.offline("b", 17)
        assert ring.reason == "node-b is offline"


def test_who_is_missing_is_the_cause_of_what_others_tell_and_not_of_what_is_ones_own() -> None:
    for root, cause in ((False, "node-b is offline"), (True, "node-c: the engine ended")):
        ring = machine()
        serve(ring)
        ring.lost("b", 10)
        assert ring.fault("c", 1, "node-c: the engine ended", 10, root=root) == [End(1, cause), Changed()]
        assert ring.fault("a", 1, "node-a: another", 10) == []
        assert ring.online("b", 11) == [Prepare(2), Changed()]


def test_what_is_said_of_another_epoch_counts_in_no_phase() -> None:
    ring = machine()
    serve(ring)
    ring.fault("a", 1, "no", 1)
    ring.tick(20)
    due = ring.deadline()
    for epoch in (1, 3):
        for member in MEMBERS:
            assert ring.prepared(member, epoch, LINKS, 30) == []
            assert ring.advanced(member, epoch, HALF, 30) == []
            assert ring.up(member, epoch, 30) == []
    assert (ring.phase, ring.deadline(), ring.progress, ring.links) == (Phase.PREPARING, due, {}, [])
    for member in MEMBERS:
        ring.prepared(member, 2, [], 40)
    assert ring.phase is Phase.COMMITTING
    for epoch in (1, 3):
        for member in MEMBERS:
            assert ring.up(member, epoch, 50) == []
    assert (ring.phase, ring.deadline()) == (Phase.COMMITTING, 100)
    for member in ("a", "z", "b", "b"):
        assert ring.up(member, 2, 50) == []
    assert ring.up("c", 2, 50) == [Changed()]
    assert (ring.phase, ring.progress) == (Phase.SERVING, {})


def test_each_step_of_a_member_gives_the_others_time() -> None:
    ring = machine()
    bring_online(ring)
    assert ring.deadline() == 120
    ring.advanced("a", 1, HALF, 10)
    assert ring.deadline() == 130
    ring.advanced("a", 1, HALF, 20)
    assert ring.deadline() == 130
    ring.advanced("a", 1, Reached("shaking hands"), 30)
    assert ring.deadline() == 150
    ring.prepared("a", 1, [], 40)
    assert ring.deadline() == 160
    ring.prepared("a", 1, [], 50)
    assert ring.deadline() == 160
    assert ring.tick(159) == []
    assert ring.tick(160)[0] == End(1, "preparing took too long: node-b, node-c did not finish")


def test_a_ring_says_whom_it_waits_for() -> None:
    ring = machine()
    assert ring.reason == "node-a, node-b, node-c are offline"
    ring.online("a", 0)
    ring.online("c", 0)
    assert ring.reason == "node-b is offline"
    ring.online("b", 0)
    assert ring.reason == "forming"
    serve(ring)
    assert ring.reason == ""


def test_a_number_that_cannot_be_stored_is_the_reason_and_tried_again() -> None:
    full = [True]

    def next_epoch() -> int:
        if full[0]:
            raise Unavailable("no space is left")
        return 7

    ring = RingEpochs(NAMES, next_epoch, Timeouts())
    assert bring_online(ring) == [Changed()]
    assert ring.reason == "the coordinator cannot begin an epoch: no space is left"
    assert ring.deadline() == RETRY_SECONDS
    assert ring.tick(RETRY_SECONDS) == [], "the same reason is told once"
    full[0] = False
    assert ring.tick(2 * RETRY_SECONDS) == [Prepare(7), Changed()]


def test_a_closed_ring_stays_closed() -> None:
    ring = machine()
    serve(ring)
    assert ring.close("deleted") == [End(1, "deleted")]
    assert ring.tick(1000) == []
    assert ring.close("deleted") == []


class Machine(RuleBasedStateMachine):
    """Any order of any events, against a model of what members were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = machine(first=OUTLIVED + 1, undecided=True)
        self.now = 0.0
        self.begun: list[int] = []
        self.active: int | None = None
        self.committed: int | None = None
        self.heard_prepared: set[str] = set()
        self.heard_up: set[str] = set()

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Prepare):
                assert self.active is None
                assert not self.begun or action.epoch > self.begun[-1]
                self.begun.append(action.epoch)
                self.active = action.epoch
                self.heard_prepared, self.heard_up = set(), set()
            elif isinstance(action, Commit):
                assert action.epoch == self.active
                assert self.heard_prepared == set(MEMBERS)
                self.committed = action.epoch
            elif isinstance(action, End):
                assert action.epoch == self.active
                self.active = None

    @rule(member=st.sampled_from(MEMBERS))
    def online(self, member: str) -> None:
        self.apply(self.ring.online(member, self.now))

    @rule(member=st.sampled_from(MEMBERS), epoch=st.integers(0, OUTLIVED))
    def back(self, member: str, epoch: int) -> None:
        """A member comes with an epoch up that was formed before."""
        fresh = self.ring.undecided
        actions = self.ring.online(member, self.now, serving=epoch)
        if self.active is None and self.ring.phase is Phase.SERVING:
            assert fresh
            assert epoch
            assert actions == [Changed()]
            self.active = self.committed = epoch
            self.begun.append(epoch)
            self.heard_up = set(MEMBERS)
        self.apply(actions)

    @rule(back=st.integers(0, 1))
    def attended(self, back: int) -> None:
        before, late = self.ring.deadline(), self.active != self.ring.epoch - back
        self.ring.attended(self.ring.epoch - back, self.now)
        assert not late or self.ring.deadline() == before

    @rule(member=st.sampled_from(MEMBERS))
    def offline(self, member: str) -> None:
        self.apply(self.ring.offline(member, self.now))

    @rule(member=st.sampled_from(MEMBERS))
    def lost(self, member: str) -> None:
        self.apply(self.ring.lost(member, self.now))

    @rule(member=st.sampled_from(MEMBERS), back=st.integers(0, 1))
    def prepared(self, member: str, back: int) -> None:
        epoch = self.ring.epoch - back
        if epoch == self.active:
            self.heard_prepared.add(member)
        self.apply(self.ring.prepared(member, epoch, LINKS, self.now))

    @rule(member=st.sampled_from(MEMBERS), back=st.integers(0, 1))
    def up(self, member: str, back: int) -> None:
        epoch = self.ring.epoch - back
        if epoch == self.active == self.committed:
            self.heard_up.add(member)
        self.apply(self.ring.up(member, epoch, self.now))

    @rule(member=st.sampled_from(MEMBERS), back=st.integers(0, 1))
    def fault(self, member: str, back: int) -> None:
        self.apply(self.ring.fault(member, self.ring.epoch - back, "no", self.now))

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 200.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.ring.tick(self.now))

    @rule()
    def everyone_does_well(self) -> None:
        """From any state, members that come and answer get a serving ring."""
        for member in MEMBERS:
            self.apply(self.ring.online(member, self.now))
        self.now += LAST_BACKOFF
        self.apply(self.ring.tick(self.now))
        for member in MEMBERS:
            self.prepared(member, 0)
        for member in MEMBERS:
            self.up(member, 0)
        assert self.ring.phase is Phase.SERVING

    @invariant()
    def the_phase_is_what_the_members_were_told(self) -> None:
        assert (self.ring.phase is Phase.WAITING) == (self.active is None)
        if self.ring.phase is Phase.SERVING:
            assert self.committed == self.active
            assert self.heard_up == set(MEMBERS)
        if self.ring.phase in (Phase.PREPARING, Phase.COMMITTING):
            assert self.ring.deadline() is not None


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
