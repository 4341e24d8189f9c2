"""How fast members were seen to run a model: what the next plan for it goes by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from sealring.v1 import admin_pb2, model_pb2

SLOW = 2.0
"""A member that is so many times slower than another one gets fewer layers than its memory would hold. Below
that memory decides: more of it is room for more rows, and a decode step is timed but once or a few times."""

_ALIKE = 2
"""Stages are compared whose bytes differ by less than this factor: part of a step's time is the same whatever
it reads, so that a stage of few layers looks slow on any machine."""

_MAX_KNOWN = 4096


class Speeds:
    """Bytes of weights a second by member and model. Kept for as long as the process lives."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()

    def note(self, stage: admin_pb2.StagePlan, profile: model_pb2.ModelProfile, step_us: int) -> None:
        """A member has loaded this stage, and a decode step of one row took it so many microseconds.

        The embedding counts for nothing: a step reads one row of it. What was seen of a stage that is larger
        by `_ALIKE` stays.
        """
        if not step_us:
            return
        read = sum(profile.layer_bytes[stage.first_layer : stage.end_layer])
        if stage.end_layer == profile.layers:
            read += profile.head_bytes + (profile.embed_bytes if profile.tied and stage.first_layer else 0)
        key = stage.member, profile.digest
        if self._known.get(key, (0, 0.0))[0] < _ALIKE * read:
            self._known[key] = read, read / (step_us / 1e6)
            self._known.move_to_end(key)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def of(self, member: str, digest: str) -> float:
        """0 where it is not known, or of a stage much smaller than another member's."""
        read, speed = self._known.get((member, digest), (0, 0.0))
        largest = max((read for (_, of), (read, _) in self._known.items() if of == digest), default=0)
        return speed if _ALIKE * read > largest else 0.0


def differ(speeds: Sequence[float]) -> bool:
    """Whether layers go by speed and not by memory: all are known, and one is slow."""
    return len(speeds) > 1 and min(speeds) > 0 and max(speeds) >= SLOW * min(speeds)
