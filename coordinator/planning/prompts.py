"""Chooses a cut for prompts that is another than that for answers, by how fast members were seen to prefill.

A prompt goes through its ring in chunks, so that the stage that takes longest for a token decides. Layers are
divided by memory, or by the speed of decoding. Where a member prefills much faster than the next it computes
prompts with some layers of that one too: both hold them (`prompt_split`, decision 114). It takes place where

- every member's speed was seen with this model, and the model's caches travel;
- prompts gain PAYS or more;
- the context stays, and so do the rows that were asked for, or half of those that there would be.

Members that prefill faster come first, unless the operator gave an order or links decide.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    before, possible = _seconds(demand, ring, [0] * len(ring)), _rows(demand, ring)
    least = min(rows, possible) if asked else max(1, min(rows, possible) // 2)
    found = [(each, _doubled(demand, each, least)) for each in rings]
    rated = ((one, more, 1 / _seconds(demand, one, more)) for one, more in found)
    cuts = [PromptCut(one, more, rate, before * rate) for one, more, rate in rated]
    best = max(cuts, key=lambda cut: cut.gain)
    return best if any(best.doubled) and best.gain >= PAYS else None


def _seconds(demand: Demand, ring: PlannedRing, doubled: Sequence[int]) -> float:
    """Seconds for a token of a prompt in the stage that takes longest."""
    begin, end, longest = 0, 0, 0.0
    for (member, layers), more in zip(ring, doubled, strict=True):
        end += layers
        longest = max(longest, sum(demand.weights[begin : end + more]) / member.prefill)
        begin = end + more
    return longest


def _rows(demand: Demand, ring: PlannedRing) -> int:
    """Rows of the whole context that every member has memory for."""
    begin, found = 0, []
    for (member, layers), extra in zip(ring, demand.extras(len(ring)), strict=True):
        end = begin + layers
        left = member.room - extra - sum(demand.per_layer[begin:end])
        found.append(1 + left // max(1, sum(demand.row[begin:end])))
        begin = end
    return max(1, min(found))


def _doubled(demand: Demand, ring: PlannedRing, rows: int) -> tuple[int, ...]:
    """The fewest layers that members hold beside their own with which prompts are fastest."""
    before = [0, *accumulate(demand.weights)]
    held = [0, *accumulate(one + rows * row for one, row in zip(demand.weights, demand.row, strict=True))]
    ends = list(accumulate(layers for _, layers in ring))
    most = []  # the end of what each may hold: what it has memory for, and no more than the next has
    for rank, ((member, layers), extra) in enumerate(zip(ring, demand.extras(len(ring)), strict=True)):
        begin = ends[rank] - layers
        fits = bisect_right(held, held[begin] + member.room - extra) - 1
        most.append(max(ends[rank], min([fits, *ends[rank + 1 : rank + 2]])))
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0.0, 0, ())}
    """By the end of the ranks so far: seconds of the slowest, layers that are held twice, which ranks do."""
    for rank, (member, _) in enumerate(ring):
        reached = {}
        for end in range(ends[rank], most[rank] + 1):
            own = end - ends[rank]
            ways = [
                (max(took, (before[end] - before[first]) / member.prefill), twice + own, (*which, own))
                for first, (took, twice, which) in best.items()
                if first < end
            ]
            if ways:
                reached[end] = min(ways)
        best = reached
    return best[ends[-1]][2]
