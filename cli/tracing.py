"""A ring's trace as shares of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sealring.cli.terminal.output import enum_word
from sealring.v1 import admin_pb2, trace_pb2

SHOWN = (
    *("wait", "copy_in", "build", "launch", "compute", "copy_out", "seal", "send", "receive", "open"),
    *("recall", "store"),
)
"""Activities in the order of a record's way through a member, and those of its disk."""


@dataclass(frozen=True)
class MemberShares:
    """One member's shares of the time traced, in percent, by activity. They run beside each other."""

    rank: int
    name: str
    shares: dict[str, float]
    idle: float
    """Nothing of all that went on."""
    steps: int
    seconds: float
    """The part of the traced time that the member still had in its buffer."""
    clock_error: float
    """Milliseconds by which its times may be wrong against those of others."""
    drafted: int
    """Tokens that it guessed, as the head does, and of them those `accepted`, in the time traced."""
    accepted: int
    modelled: int
    """Guesses of the draft model or the MTP head among those tokens; the others it looked up."""
    recalled: int
    """Tokens of prefixes that it read from its disk, and those that it `stored` there."""
    stored: int


def _word(number: int) -> str:
    """`ACTIVITY_COPY_IN` as `copy_in`."""
    return enum_word(trace_pb2.Activity.DESCRIPTOR, number)


def member_shares(trace: admin_pb2.TraceRingResponse) -> list[MemberShares]:
    """The shares of each member's time by activity, of the members that sent a trace."""
    return [_shares(member, trace) for member in trace.members if not member.HasField("problem")]


def _shares(member: admin_pb2.MemberTrace, trace: admin_pb2.TraceRingResponse) -> MemberShares:
    end = trace.start + trace.duration
    begin = min(max(trace.start, member.since), end)
    length = max(1, end - begin)
    spans: dict[str, list[tuple[int, int]]] = {name: [] for name in SHOWN}
    steps = set()
    for span in member.spans:
        first, last = max(begin, span.start), min(end, span.start + span.duration)
        if last > first or begin <= span.start < end:
            spans.setdefault(_word(span.activity), []).append((first, last))
            steps.update([span.step] if span.step else [])  # the disk's work is of no step
    busy = _covered([one for several in spans.values() for one in several])
    return MemberShares(
        rank=member.rank,
        name=member.name,
        shares={name: 100 * _covered(several) / length for name, several in spans.items()},
        idle=100 * (length - busy) / length,
        steps=len(steps),
        seconds=length / 1e9,
        clock_error=member.clock_error / 1e6,
        drafted=member.drafted,
        accepted=member.accepted,
        modelled=member.modelled,
        recalled=member.recalled,
        stored=member.stored,
    )


def _covered(spans: Sequence[tuple[int, int]]) -> int:
    """Time that at least one of the spans covers."""
    total = reached = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, reached))
        reached = max(reached, last)
    return total
