"""The verdict on a target, by one rule for every benchmark.

A round measures all parts of a figure once, so that both sides of a ratio come from the same minutes of the
machine. Missed: a round missed the target. Met: at least three rounds were measured, and the worst of them
met it. Open: anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

MET, MISSED, OPEN = "met", "missed", "open"
ROUNDS = 3
"""Rounds that are needed to meet a target."""


@dataclass(frozen=True)
class Check:
    """A target and what each round measured; None: that round had nothing to measure."""

    name: str
    rounds: Sequence[float | None]
    target: float
    at_least: bool = False

    @property
    def worst(self) -> float | None:
        measured = [one for one in self.rounds if one is not None]
        return (min if self.at_least else max)(measured, default=None)

    @property
    def verdict(self) -> str:
        worst = self.worst
        if worst is not None and (worst < self.target if self.at_least else worst > self.target):
            return MISSED
        return OPEN if None in self.rounds or len(self.rounds) < ROUNDS else MET

    def as_data(self) -> dict[str, Any]:
        """The check as it is written in a report."""
        return asdict(self) | {"worst": self.worst, "verdict": self.verdict}


def ratios(
    ours: Sequence[float | None], theirs: Sequence[float | None], digits: int = 3
) -> list[float | None]:
    """Round by round; None where ours has no figure, or theirs none but zero."""
    pairs = zip(ours, theirs, strict=True)
    return [round(a / b, digits) if a is not None and b else None for a, b in pairs]


def joined(runs: Sequence[Sequence[Check]]) -> list[Check]:
    """The checks of several runs of one benchmark: the rounds of all of them, by name."""
    first: dict[str, Check] = {}
    for checks in runs:
        for one in checks:
            before = first.get(one.name)
            rounds = [*before.rounds, *one.rounds] if before else one.rounds
            first[one.name] = Check(one.name, rounds, one.target, one.at_least)
    return list(first.values())
