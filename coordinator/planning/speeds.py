"""How fast members were seen to run a model: what the next plan for it goes by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from sealring.coordinator.planning.demand import read_bytes
from sealring.mesh.ring.limits import MAX_PREFILL_CHUNK, MAX_ROWS
from sealring.mesh.ring.spread import Times, between
from sealring.v1 import admin_pb2, membership_pb2, model_pb2

SLOW = 2.0
"""A member gets fewer layers than its memory would hold if it is slower than another one by this factor.

Below it memory decides: more of it is room for more rows, and decode steps are timed only a few times.
"""

_ALIKE = 2
"""Stages are compared whose bytes differ by less than this factor: part of a step's time is the same whatever
it reads, so that a stage of few layers looks slow on any machine."""

_MAX_KNOWN, _MAX_DEVICE = 4096, 16

_MAX_TIMES = 32
"""Times of one stage that count: more than a node sends."""

IN_TURN: Times = ((1, 1.0), (2, 2.0))
"""Rows that together gain nothing."""


@dataclass(frozen=True)
class Rate:
    """How fast a machine runs one model's decode steps (the formulae are in `costs.py`).

    Bytes of weights a second at one row, and the times as long that a step of more rows takes (`rows`, 1 at
    one row; a row more costs as much as the first where nobody timed any). Then seconds that a layer takes
    besides, and bytes of KV caches a second; both 0 where all that is known is a step as a whole. `metal`: on
    a Mac's GPU. `prefill`: bytes of weights a second of a long chunk, times its tokens; 0 where unknown.
    """

    bytes_per_second: float
    rows: Times = IN_TURN
    layer_seconds: float = 0.0
    kv_bytes_per_second: float = 0.0
    metal: bool = False
    prefill: float = 0.0

    def times(self, rows: float) -> float:
        """Times as long as a step of one row that one of `rows` rows reads and computes."""
        return between(self.rows, rows)


class Speeds:
    """Rates by member and model, each of what computes there. Kept for as long as the process lives."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[str, int, Rate]] = OrderedDict()

    def note(
        self,
        stage: admin_pb2.StagePlan,
        profile: model_pb2.ModelProfile,
        timed: membership_pb2.EpochPrepared,
    ) -> None:
        """A member has loaded this stage, and says how long decode steps of it took, and a long chunk.

        What was seen of a stage that is larger by `_ALIKE` stays, if it was on the same device.
        """
        times = _relative(timed)
        if times is None:
            return
        seconds, rows = times
        read = read_bytes(profile, stage.first_layer, stage.end_layer)
        key, device = (stage.member, profile.digest), timed.computes_on[:_MAX_DEVICE]
        known = self._known.get(key)
        if known is None or known[0] != device or known[1] < _ALIKE * read:
            rate = Rate(read / seconds, rows, metal=timed.metal, prefill=_prefill(stage, profile, timed))
            self._known[key] = device, read, rate
            self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def of(self, member: str, digest: str, computes_on: str) -> Rate | None:
        """The rate for a model of what computes at a member; None if it is unknown, or was timed on a stage
        much smaller than another's."""
        largest = max((read for (_, of), (_, read, _) in self._known.items() if of == digest), default=0)
        device, read, rate = self._known.get((member, digest), ("", 0, None))
        return rate if device == computes_on and _ALIKE * read > largest else None


def _prefill(
    stage: admin_pb2.StagePlan, profile: model_pb2.ModelProfile, timed: membership_pb2.EpochPrepared
) -> float:
    """As in Rate, of the layers with which the stage computes prompts."""
    if not timed.chunk_us or not 1 < timed.chunk_tokens <= MAX_PREFILL_CHUNK:
        return 0.0
    first, end = stage.first_layer, stage.end_layer
    if stage.prompt_end_layer:
        first, end = stage.prompt_first_layer, stage.prompt_end_layer
    return 1e6 * timed.chunk_tokens * sum(profile.layer_bytes[first:end]) / timed.chunk_us


def _relative(timed: membership_pb2.EpochPrepared) -> tuple[float, Times] | None:
    """Seconds of a step of one row, and times as long that steps of more take; None if one row was not timed.
    Of what a node says of more than MAX_ROWS rows nothing counts."""
    found = {
        one.rows: one.microseconds / 1e6
        for one in timed.times[:_MAX_TIMES]
        if 1 <= one.rows <= MAX_ROWS and one.microseconds and not one.context
    }
    if 1 not in found:
        return None
    times = tuple(sorted(found.items()))
    first = times[0][1]
    return first, tuple((size, took / first) for size, took in times) if len(times) > 1 else IN_TURN


def differ(speeds: Sequence[float]) -> bool:
    """Whether layers go by speed and not by memory: all are known, and one is slow."""
    return len(speeds) > 1 and min(speeds) > 0 and max(speeds) >= SLOW * min(speeds)
