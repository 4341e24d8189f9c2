"""Has members and gateways follow what the epochs of a ring have decided. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from sealring.coordinator.planning.planner import end_held
from sealring.coordinator.rings import epochs
from sealring.coordinator.rings.actions import Action, Formed, Note, Send, Tell
from sealring.coordinator.rings.epochs import Phase
from sealring.coordinator.rings.running import RunningRing
from sealring.coordinator.rings.state import State
from sealring.mesh.errors import FailedPrecondition
from sealring.v1 import membership_pb2
from sealring.v1.membership_pb2 import CoordinatorMessage, WatchResponse

FORMER = 4
"""Rings that a commit names: conversations of before have mostly gone on in one of them."""

_FORMER_DEPLOYMENTS = 64


def follow(state: State, running: RunningRing, decided: Sequence[epochs.Action], now: float) -> list[Action]:
    """What a ring's epochs have `decided`, as messages to members and gateways."""
    name, actions = running.plan.ring, list[Action]()
    for one in decided:
        if isinstance(one, epochs.Prepare):
            try:
                running.protocol = state.protocol(running)
            except FailedPrecondition as error:  # members that share no protocol
                over = running.machine.fault(running.machine.members[0], one.epoch, str(error), now)
                return actions + follow(state, running, over, now)
            roster = state.wanted.roster
            for stage in running.plan.stages:
                made = running.prepare(stage, one.epoch, roster.version, roster.hash, running.protocol)
                actions.append(Send(stage.member, CoordinatorMessage(prepare=made)))
        elif isinstance(one, epochs.Commit):
            commit = membership_pb2.CommitEpoch(
                ring=name, epoch=one.epoch, group_addresses=one.addresses, caches=one.caches
            )
            actions += _add_former(state, running, commit)
            sent = CoordinatorMessage(commit=commit)
            actions += [Send(stage.member, sent) for stage in running.plan.stages]
        elif isinstance(one, epochs.End):
            actions += ended(running, one)
        else:
            actions += _changed(state, running)
    return actions


def ended(
    running: RunningRing, action: epochs.End, *, unload: bool = False, staying: Collection[str] = ()
) -> Iterator[Action]:
    """An epoch's end at every member. With `unload` members drop their stages, except those `staying`."""
    for stage in running.plan.stages:
        end = membership_pb2.EndEpoch(
            ring=running.plan.ring,
            epoch=action.epoch,
            reason=action.reason,
            unload=unload and stage.member not in staying,
        )
        yield Send(stage.member, CoordinatorMessage(end=end))


def _add_former(state: State, running: RunningRing, commit: membership_pb2.CommitEpoch) -> Iterator[Action]:
    """Adds the rings of a deployment over which epochs were committed before, and notes this one."""
    if running.backend or len(commit.caches) != len(running.plan.stages):
        return
    stages = [
        membership_pb2.FormerStage(
            member=stage.member, first_layer=stage.first_layer, end_layer=end_held(stage), caches=each
        )
        for stage, each in zip(running.plan.stages, commit.caches, strict=True)
    ]
    name, own = running.spec.name, membership_pb2.FormerRing(stages=stages)
    known = state.former.pop(name, [])
    others = [each for each in known if each != own]
    commit.former.extend(others[:FORMER])
    state.former[name] = [own, *others][: FORMER + 1]
    if len(state.former) > _FORMER_DEPLOYMENTS:
        del state.former[next(iter(state.former))]
    if state.former[name] != known:
        yield Formed()


def _changed(state: State, running: RunningRing) -> Iterator[Action]:
    machine, name = running.machine, running.plan.ring
    phase, why = machine.phase.value, machine.reason
    yield Note("ring_changed", {"ring": name, "epoch": machine.epoch, "phase": phase, "why": why})
    if machine.phase is Phase.SERVING:
        state.not_moved.pop(name, None)
        running.served = machine.epoch
        running.groupless.clear()
    yield Tell(WatchResponse(ring=running.state()))
