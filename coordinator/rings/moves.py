"""Which rings are planned anew over the nodes that are online, and when. Pure; times are arguments.

A member is lost if it was evicted or banned, drains, is trusted too little, or is away for longer than a
grace period. Choices by hand stay: a ring keeps to the nodes that the deployment names, and to the layers of
its split; with both it waits. A number of stages gives way until as many nodes are online again and no
request uses the ring. The rings of a member that drains move once all are idle, one after another. A tensor
ring whose group does not come up becomes a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sealring.coordinator.rings.actions import Action, Drained, Move, Note
from sealring.coordinator.rings.state import State
from sealring.coordinator.store import StoredDeployment
from sealring.mesh.errors import SealringError
from sealring.v1 import admin_pb2

RETRY_SECONDS = 60.0
"""Time after which a move that has failed is tried again, unless nodes or what is stored change earlier."""


@dataclass
class _Drain:
    """A member that drains: its rings move at `due` at the latest. Is it the drain of an earlier coordinator,
    the member has until `back_by` to connect."""

    due: float
    back_by: float
    tried: set[str] | None = None
    """The rings whose moves were begun, once moves have."""

    move: Move | None = None
    over: bool = False


class Moves:
    """The moves that are due, one of a ring at a time. Seconds are of a clock that stands still in sleep."""

    def __init__(self, state: State, grace: float) -> None:
        self._state = state
        self._grace = grace
        self._drains: dict[str, _Drain] = {}
        self._away: dict[tuple[str, str], float] = {}
        self._quiet: dict[str, float] = {}
        self._tried: dict[str, Move] = {}
        self._begun: dict[str, Move] = {}

    @property
    def draining(self) -> set[str]:
        """The members that drain and serve meanwhile."""
        return {member for member, drain in self._drains.items() if not drain.over}

    def stored(self, now: float, wall: float, *, first: bool) -> None:
        """What is stored has changed; it is the `first` that this coordinator reads. Begins drains and takes
        them back. There may be room for moves that have failed."""
        self.look_anew()
        known = self._state.wanted.members
        for member in [one for one in self._drains if one not in known or not known[one].draining]:
            move = self._drains.pop(member).move
            self._begun = {ring: one for ring, one in self._begun.items() if one is not move}
        for member, one in known.items():
            if one.draining > wall and member not in self._drains:
                back_by = now + self._grace if first else now
                self._drains[member] = _Drain(now + one.draining - wall, back_by)

    def look_anew(self) -> None:
        """Forgets which moves have failed: nodes or what is stored have changed."""
        self._tried.clear()

    def note(self, now: float) -> list[tuple[str, str]]:
        """Notes since when members are away, and rings that are short of stages quiet; the rings and members
        that have been away too long. While the coordinator hears of no node at all, it is cut off itself, and
        no member counts as away."""
        planned, state = self._state.wanted.planned, self._state
        away = [(ring.ring, member) for _, ring in planned for member in state.awaited(ring.ring)]
        heard = any(True for _ in state.sessions)
        self._away = {where: self._away.get(where, now) for where in away if heard}
        self._quiet = {
            ring.ring: self._quiet.get(ring.ring, now)
            for one, ring in planned
            if len(ring.stages) < one.asked.stages
            and all(state.is_idle(stage.member, ring.ring) for stage in ring.stages)
        }
        return [where for where, since in self._away.items() if now >= since + self._grace]

    def due(self, now: float) -> list[Action]:
        """The moves to begin, and the drains that are over."""
        return [*self._of_lost(now), *self._of_drains(now)]

    def fall_back(self, ring: str, why: str, now: float) -> list[Action]:
        """A tensor ring's group does not come up."""
        found = [(one, plan) for one, plan in self._state.wanted.planned if plan.ring == ring]
        return [self._begin(*one, now, pipeline=why) for one in found if ring not in self._begun]

    def still(self, move: Move, now: float) -> bool:
        """Whether a move has its reason yet: members may be back, or no longer drain."""
        planned = next((one for one, ring in self._state.wanted.planned if ring == move.ring), None)
        if planned is None or self._begun.get(move.ring.ring) is not move:
            return False
        if move.lost:
            return self._lost(planned, move.ring, now) | self.draining >= move.lost
        return bool(move.pipeline) or move.ring.ring in self._quiet

    def moved(self, move: Move, error: SealringError | None) -> Iterator[Action]:
        """A move has ended, without an error if the ring has moved."""
        ring = move.ring.ring
        if self._begun.get(ring) is not move:  # its drain was taken back
            return
        del self._begun[ring]
        if error is not None:
            if move.lost:
                self._state.not_moved[ring] = error.message
            fields = {"ring": ring, "reason": error.reason, "why": error.message}
            yield Note("ring_not_moved", fields, serious=bool(move.lost or move.pipeline))
        elif move.pipeline:
            yield Note("tensor_fell_back", {"ring": ring, "why": move.pipeline}, serious=True)

    @property
    def waits(self) -> bool:
        """Whether time alone brings moves."""
        return bool(self.draining or self._away or self._quiet or self._tried)

    def _of_lost(self, now: float) -> Iterator[Action]:
        """Moves of rings that lost members, or may grow: each unless it was tried a moment ago."""
        for deployment, ring in self._state.wanted.planned:
            name, lost = ring.ring, self._lost(deployment, ring, now)
            if not lost and now < self._quiet.get(name, math.inf) + self._grace:
                self._tried.pop(name, None)
                continue
            before = self._tried.get(name)
            known = before is not None and (before.ring, before.lost) == (ring, lost)
            again = before is None or not known or now >= before.at + RETRY_SECONDS
            if again and name not in self._begun:
                yield self._begin(deployment, ring, now, lost=lost)

    def _of_drains(self, now: float) -> Iterator[Action]:
        for member, drain in self._drains.items():
            if drain.over or (drain.move is not None and drain.move in self._begun.values()):
                continue
            rings = [
                (one, ring)
                for one, ring in self._state.wanted.planned
                if any(stage.member == member for stage in ring.stages)
            ]
            if drain.tried is None:
                idle = all(self._state.is_idle(member, ring.ring) for _, ring in rings)
                if self._state.sessions.find(member) is None:
                    idle = now >= drain.back_by
                if not idle and now < drain.due:
                    continue
                drain.tried = set()
                if not idle:
                    yield Note("drain_timeout", {"member": member}, serious=True)
            left = [(one, ring) for one, ring in rings if ring.ring not in drain.tried]
            if not left:
                drain.over = True
                yield Drained(member)
            elif left[0][1].ring not in self._begun:
                drain.tried.add(left[0][1].ring)
                drain.move = self._begin(*left[0], now, lost=frozenset({member}))
                yield drain.move

    def _begin(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan, now: float, **why: Any) -> Move:
        move = Move(deployment.name, ring, now, **why)
        self._tried[ring.ring] = self._begun[ring.ring] = move
        return move

    def _lost(self, deployment: StoredDeployment, ring: admin_pb2.RingPlan, now: float) -> frozenset[str]:
        """The members that the ring has to do without."""
        awaited = self._state.awaited(ring.ring)
        gone = {one for one in awaited if now >= self._away.get((ring.ring, one), now) + self._grace}
        return frozenset(gone | self._state.obstacles(deployment, ring).keys())
