"""Sleep is a pause: what a machine's sleep, or a process that stands still, does to each deadline."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealring.coordinator.rings.driver import ClusterDriver
from sealring.coordinator.rings.epochs import End, RingEpochs, Timeouts
from sealring.coordinator.rings.loads import LoadPhase, Loads, Policy
from sealring.coordinator.rings.plans import Plans
from sealring.gateway.rings.control import ControlStreams
from sealring.gateway.rings.models import ModelStates
from sealring.gateway.rings.ring import Shared
from sealring.gateway.scheduler import Fail, Request, Scheduler
from sealring.mesh.clock import AwakeClock, awake_clock
from sealring.v1 import inference_pb2 as inference

ROOT = Path(__file__).parents[1]
ROOMS = ("coordinator", "gateway", "node/daemon", "node/control", "edge", "sealring/client", "mesh")

ASKED_AGAIN = """
    coordinator/nodes/diagnoses.py:Diagnoses.ask coordinator/nodes/models.py:Models.change
    coordinator/nodes/profiles.py:Profiles._ask_one coordinator/nodes/survey.py:Survey._wait_for_beats
    coordinator/main.py:Coordinator._build coordinator/rings/link_survey.py:LinkSurvey.__init__
    coordinator/rings/link_survey.py:LinkSurvey._measure coordinator/rings/traces.py:Traces._offset
    coordinator/rings/traces.py:Traces._member coordinator/services/scheduling.py:_message
    coordinator/services/membership.py:MembershipService._message coordinator/standby/terms.py:_tell
    coordinator/standby/follow.py:stand_by coordinator/standby/follow.py:Follower.fetch
    gateway/backend.py:RingBackend._until_complete gateway/rings/control.py:MemberStream.attach
    node/control/service.py:ControlService._first node/daemon/carrier_process.py:knock
    node/daemon/diagnosis.py:Diagnosis.__init__ node/daemon/diagnosis.py:try_address
    node/daemon/diagnosis.py:ask_child node/daemon/epoch.py:MemberEpoch._guard
    node/daemon/link_setup.py:LinkSetup._establish node/daemon/link_setup.py:LinkSetup._call
    node/daemon/measuring.py:Measuring.__init__ node/daemon/measuring.py:Measuring.measure
    node/daemon/measuring.py:Measuring._over node/daemon/measuring.py:Measuring.Measure
    node/daemon/measuring.py:Measuring.Measure.going node/daemon/measuring.py:_fastest
    node/daemon/rotation.py:StepGate.__init__ node/daemon/rotation.py:Rotation.change
    sealring/client/asynchronous.py:AsyncClient._view sealring/client/transport.py:_Exchange._in_time
    mesh/member/bootstrap.py:fetch_leaf mesh/member/certificate_keeper.py:CertificateKeeper._over_mtls
    mesh/member/enrolment.py:enrol mesh/member/enrolment.py:enrol.fresh_nonce
    mesh/member/introduction.py:Introduction.exchange mesh/member/joincode.py:token_for
    mesh/member/renewal.py:renew_by_identity mesh/rpc/reach.py:first_of mesh/rpc/reach.py:connected
    mesh/member/client.py:ClientKeeper._renew mesh/rpc/tls.py:PeerChannel.pause
    mesh/system/addresses.py:listens
"""
"""The end of one exchange, of one measurement or of one epoch's forming, which is begun again: by this code
or by who asked, whose error says so. Nothing that was accepted is lost."""

CLOSES = """
    coordinator/services/membership.py:_parted gateway/backend.py:RingBackend.drain
    gateway/rings/control.py:ControlStreams._part node/daemon/carrier_process.py:CarrierProcess.stop
    node/daemon/engine_process.py:EngineProcess.stop node/daemon/fetching.py:Fetcher._let_go
    node/daemon/seat.py:Seat._free node/daemon/session.py:CoordinatorSession.goodbye
    node/daemon/supervisor.py:Child._exits_within node/daemon/supervisor.py:Frames._abort_later
    node/daemon/supervisor.py:within node/daemon/supervisor.py:finish
    edge/http/server.py:_Server.main_loop
"""
"""What is ending already is ended by force instead."""

LOOKS = """
    edge/http/server.py:Accepting._take_in mesh/system/power.py:power
    coordinator/members/announcer.py:Announcer._pause coordinator/rings/driver.py:ClusterDriver.run
    coordinator/streams/sessions.py:Sessions.throw_out mesh/member/coordinators.py:Coordinators.pause
    gateway/rings/control.py:ControlStreams._pause gateway/rings/ring.py:Ring.run
    gateway/rings/watch.py:Watch._beat gateway/rings/watch.py:Door.news
    gateway/rings/watch.py:Watch._report
    node/control/service.py:GatewayStream.answer node/control/service.py:GatewayStream._gateway_silent
    node/daemon/engines.py:EngineKeeper._keep_spare_a_while node/daemon/fetching.py:Fetcher._wait
    node/daemon/fetching.py:_until_ended node/daemon/rotation.py:Rotation._due
    node/daemon/session.py:CoordinatorSession._interval node/daemon/session.py:CoordinatorSession._beat
    node/daemon/session.py:CoordinatorSession._look
    node/daemon/session.py:CoordinatorSession._something_before_heartbeat
    edge/http/answers.py:EventStream.begin edge/http/answers.py:_Writer.__enter__
    edge/http/answers.py:_Writer.write edge/http/answers.py:_Writer.keep_alive
    edge/inference/timers.py:AwakeTimer._wait edge/inference/timers.py:SendWatch._wait
    mesh/member/coordinators.py:Coordinators.follow mesh/rpc/silence.py:Silence.expect
    mesh/rpc/silence.py:Silence._late gateway/usage/store.py:UsageStore._opened
"""
"""Something is looked at, said or tried at this time; that it is late decides nothing. Timers that decide
count looks."""

STRANGERS = """
    coordinator/auth/nonces.py:Attempts.__init__ coordinator/services/certificates.py:RenewalService.__init__
    coordinator/services/enrolment.py:EnrolmentService.__init__ coordinator/services/enrolment.py:_next
    coordinator/members/challenges.py:Challenges.__init__ edge/access/gate.py:Gate.__init__
    edge/access/gate.py:Shares.__init__
    edge/access/interceptor.py:_first edge/http/body.py:read_body edge/http/guard.py:Guard._answer_unread
    edge/http/conversation.py:Conversation.run edge/http/conversation.py:Conversation._answer_all
    edge/http/conversation.py:Conversation._send_error edge/http/protocol.py:EdgeProtocol._watch_headers
    mesh/rpc/connections.py:ConnectionWatch._watch
    mesh/rpc/interceptor.py:_Requests.hear_first mesh/rpc/interceptor.py:_guard_stream.guarded
    mesh/rpc/limits.py:Buckets.__init__
"""
"""Bounds on what nobody has accepted yet, and rates. A caller that is refused may come again."""

SIGNED = """
    coordinator/roster/publisher.py:RosterPublisher.__init__
    coordinator/roster/publisher.py:RosterPublisher.change
    coordinator/roster/publisher.py:RosterPublisher.renew_forever mesh/rpc/interceptor.py:Lease.extend
"""
"""The life of a signature, which sleep does not stop."""

USERS = """
    sealring/client/synchronous.py:Client.__init__
    sealring/client/asynchronous.py:AsyncClient.load sealring/client/asynchronous.py:AsyncClient._stream
    sealring/client/attempt.py:Attempts.__init__ sealring/client/core.py:Newest.__init__
"""
"""The time that a user gave for a call, and for how long a roster is taken for fresh."""

SHOWN = """
    coordinator/nodes/description.py:describe_node coordinator/nodes/diagnoses.py:Diagnoses.__init__
    coordinator/nodes/questions.py:Questions.ask coordinator/services/membership.py:MembershipService.Session
    coordinator/streams/sessions.py:Sessions.__init__ node/daemon/handler.py:CoordinatorHandler._diagnose
"""
"""Times that people see, and clocks that are compared."""

NAMED = [
    where
    for group in (ASKED_AGAIN, CLOSES, LOOKS, STRANGERS, SIGNED, USERS, SHOWN)
    for where in group.split()
]
"""All else goes by `awake_clock`, which counts next to nothing of a sleep, or by `wall_clock` and
`boot_clock`, by which signatures live."""

_CALLS = {"timeout", "timeout_at", "wait_for", "time", "time_ns", "monotonic", "monotonic_ns"}
_CALLS |= {"call_later", "call_at"}


def reads_a_clock(node: ast.AST) -> bool:
    """Whether a call is or has a time limit, or asks a clock that is not of `mesh.clock`."""
    if isinstance(node, ast.Call):
        limited = any(keyword.arg == "timeout" for keyword in node.keywords)
        return limited or (isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS)
    if isinstance(node, ast.Attribute):  # a clock as a default
        return isinstance(node.value, ast.Name) and node.value.id == "time" and node.attr in _CALLS
    return isinstance(node, ast.Name) and node.id == "monotonic_clock"


def places(node: ast.AST, name: str) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        name += f".{node.name}"
    if reads_a_clock(node):
        yield name.replace(":.", ":")
    for child in ast.iter_child_nodes(node):
        yield from places(child, name)


def test_it_is_decided_of_every_deadline_what_sleep_does_to_it() -> None:
    found = set[str]()
    for file in (file for room in ROOMS for file in (ROOT / room).rglob("*.py")):
        path = str(file.relative_to(ROOT))
        if path != "mesh/clock.py":
            found.update(places(ast.parse(file.read_text("utf-8")), f"{path}:"))
    assert sorted(NAMED) == sorted(found)


@pytest.mark.parametrize(
    ("made", "argument"),
    [
        (ClusterDriver, "clock"),
        (Plans, "clock"),
        (Shared, "clock"),
        (Shared, "formable"),
        (ControlStreams, "clock"),
    ]
    + [(made, "awake") for made in (ModelStates,)],
)
def test_what_is_given_up_is_given_up_by_time_awake(made: Callable[..., Any], argument: str) -> None:
    assert inspect.signature(made).parameters[argument].default is awake_clock


LIMIT = 9.0
"""Seconds of each machine's deadline below."""


def queued(now: float) -> Callable[[float], bool]:
    scheduler = Scheduler(queue_limit=1)
    scheduler.submit(Request("a", "", 1, inference.Envelope(), patience=LIMIT), now)
    return lambda now: any(isinstance(each, Fail) for each in scheduler.expire(now))


def preparing(now: float) -> Callable[[float], bool]:
    epochs = RingEpochs({"a": "node-a"}, lambda: 1, Timeouts(prepare=LIMIT))
    epochs.online("a", now)
    return lambda now: any(isinstance(each, End) for each in epochs.tick(now))


def missed(now: float) -> Callable[[float], bool]:
    epochs = RingEpochs({"a": "node-a", "b": "node-b"}, lambda: 1, Timeouts(grace=LIMIT))
    for member in epochs.members:
        epochs.online(member, now)
    for member in epochs.members:
        epochs.prepared(member, 1, [], now)
    for member in epochs.members:
        epochs.up(member, 1, now)
    epochs.lost("b", now)
    return lambda now: any(isinstance(each, End) for each in epochs.tick(now))


def unused(now: float) -> Callable[[float], bool]:
    loads = Loads(turn=0.0)
    loads.sync({"m": (Policy(LIMIT, False), True)}, now)
    loads.serving("m", now)
    return lambda now: not loads.tick(now) and loads.models["m"].phase is LoadPhase.YIELDING


@pytest.mark.parametrize("machine", [queued, preparing, missed, unused])
@given(
    st.lists(st.tuples(st.floats(0.1, 1.0), st.sampled_from((0.0, 0.0, 3.0, 1e5))), min_size=5, max_size=20)
)
@settings(max_examples=30)
def test_sleep_of_any_length_brings_no_deadline(
    machine: Callable[[float], Callable[[float], bool]], looks: list[tuple[float, float]]
) -> None:
    """Seconds awake, and then asleep, before each look. A sleep counts as two seconds at most."""
    raw = 0.0
    clock = AwakeClock(lambda: raw, step=2.0)
    over = machine(clock())
    awake = sleeps = 0.0
    for seconds, asleep in looks:
        raw += seconds + asleep
        awake, sleeps = awake + seconds, sleeps + (asleep > 0)
        ended = over(clock())
        assert not ended or awake + 2 * sleeps >= LIMIT - 1e-6
        if ended:
            return
        assert awake <= LIMIT + 1e-6
