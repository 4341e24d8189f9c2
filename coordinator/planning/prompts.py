"""Chooses a cut for prompts that is another than that for answers, by how fast members were seen to prefill.

A prompt goes through its ring in chunks, so that the stage that takes longest for a token decides. Layers are
divided by memory, or by the speed of decoding. Where a member prefills much faster than the next it computes
prompts with some layers of that one too: both hold them (`prompt_split`, decision 114). What this takes:

- Every member's speed was seen with this model, and the model's caches travel.
- Prompts gain PAYS or more, also where links are slow: each token's caches of doubled layers cross them.
- The context stays, and so do the rows that were asked for, or half of those that there would be.

Members that prefill faster come first, unless the operator gave an order or links decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from sealring.coordinator.planning.arrangement import PlannedRing, may_lead, shares_of
from sealring.coordinator.planning.demand import Demand
from sealring.coordinator.planning.links import WORTH, Network
from sealring.mesh.units import size

PAYS = 1.2
"""Times as fast as with one cut, from which prompts have a cut of their own: weights that are held twice are
memory for rows, and steps are timed a few times only."""


@dataclass(frozen=True)
class PromptCut:
    """A ring whose members hold `doubled` layers each beside their own, for prompts alone, which gain that
    many times. `rate`: tokens of chunks a second while the slowest stage has some."""

    ring: PlannedRing
    doubled: tuple[int, ...]
    rate: float
    gain: float

    def why(self, demand: Demand) -> str:
        """A line for people."""
        speeds = [(member.prefill, member.name) for member, _ in self.ring]
        (fast, first), (slow, last) = max(speeds), min(speeds)
        ends = list(accumulate(layers for _, layers in self.ring))
        prompts = [end + more for end, more in zip(ends, self.doubled, strict=True)]
        split = ",".join(str(end - begin) for begin, end in zip([0, *prompts], prompts, strict=False))
        twice = sum(
            sum(demand.weights[end : end + more]) for end, more in zip(ends, self.doubled, strict=True)
        )
        return (
            f"prompts are computed with {split} layers, {self.gain:.1f} times as fast as with one cut (about "
            f"{self.rate:.0f} tokens/s), for "
            f"{first} was seen to prefill {fast / slow:.1f} times as fast as {last}; {size(twice)} are held "
            "twice (--prompt-split 0: none)"
        )


def prompt_cut(
    demand: Demand, ring: PlannedRing, network: Network, rows: int, *, asked: bool, ordered: bool
) -> PromptCut | None:
    """The cut for prompts of a ring, whose members it may put into another order unless that was given
    (`ordered`); None where one cut will do. `rows` are those to have memory for: all of them if they were
    `asked` for."""
    members = [member for member, _ in ring]
    if len(ring) < 2 or not all(member.prefill for member in members):
        return None
    rings, fastest = [ring], sorted(members, key=lambda member: -member.prefill)
    near = network.round_seconds(fastest) <= WORTH * network.round_seconds(members)
    if not ordered and fastest != members and near and may_lead(demand, fastest):
        layers = shares_of(demand, fastest)
        rings += [list(zip(fastest, layers, strict=True))] if layers else []
    possible, ends = _rows(demand, ring), list(accumulate(layers for _, layers in ring))
    least = min(rows, possible) if asked else max(1, min(rows, possible) // 2)
    before, *_ = _fastest(demand, network, ring, ends)
    rings = [each for each in rings if _rows(demand, each) >= least]
    found = [(each, *_fastest(demand, network, each, _most(demand, each, least))) for each in rings]
    cuts = [PromptCut(one, more, 1 / took, before / took) for one, took, _, more in found if any(more)]
    best = max(cuts, key=lambda cut: cut.gain, default=None)
    return best if best and best.gain >= PAYS else None


def _rows(demand: Demand, ring: PlannedRing) -> int:
    """Rows of the whole context that every member has memory for."""
    begin, found = 0, []
    for (member, layers), extra in zip(ring, demand.extras(len(ring)), strict=True):
        end = begin + layers
        left = member.room - extra - sum(demand.per_layer[begin:end])
        found.append(1 + left // max(1, sum(demand.row[begin:end])))
        begin = end
    return max(1, min(found))


def _most(demand: Demand, ring: PlannedRing, rows: int) -> list[int]:
    """The end of the layers that each has memory for; no later than that of the next one's own."""
    each = zip(demand.per_layer, demand.row, strict=True)
    held = [0, *accumulate(one + (rows - 1) * row for one, row in each)]
    ends, most = list(accumulate(layers for _, layers in ring)), []
    for rank, ((member, layers), extra) in enumerate(zip(ring, demand.extras(len(ring)), strict=True)):
        begin = ends[rank] - layers
        fits = bisect_right(held, held[begin] + member.room - extra) - 1
        most.append(max(ends[rank], min([fits, *ends[rank + 1 : rank + 2]])))
    return most


def _fastest(
    demand: Demand, network: Network, ring: PlannedRing, most: Sequence[int]
) -> tuple[float, int, tuple[int, ...]]:
    """The least seconds for a token of a prompt in the slowest stage, or over the slowest link. Then the
    fewest layers for it that members hold beside their own: together, and each."""
    before, sent = [0, *accumulate(demand.weights)], [0, *accumulate(demand.travelling)]
    ends = list(accumulate(layers for _, layers in ring))
    links = (network.between(one.id, other.id) for (one, _), (other, _) in pairwise(ring))
    speeds = [*(one.bytes_per_second for one in links), inf]
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}  # by the end of the last rank
    for rank, ((member, _), speed) in enumerate(zip(ring, speeds, strict=True)):
        reached = {}
        for end in range(ends[rank], most[rank] + 1):
            own = end - ends[rank]
            hop = (demand.handoff + sent[end] - sent[ends[rank]]) / speed
            ways = [
                (max(took, hop, (before[end] - before[first]) / member.prefill), twice + own, (*which, own))
                for first, (took, twice, which) in best.items()
                if first < end
            ]
            if ways:
                reached[end] = min(ways)
        best = reached
    return best[ends[-1]]
