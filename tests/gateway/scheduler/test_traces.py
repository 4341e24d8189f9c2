"""A thousand seeded schedules, against what the scheduler made of them when they were last reviewed.

Seeds draw the ring (stages, rows, memory, prefixes, drafts), what clients ask and cancel, and when epochs
end. A line of `traces/summaries.txt` has a seed, a digest of all actions, the number of steps, and how many
of them have drafts. A change of the scheduler that is meant to change some writes them anew, and says in its
commit how many and why:

    PYTHONPATH=tests/support:. python tests/gateway/scheduler/test_traces.py --update

`--show SEED` prints a schedule, to be compared with what another commit makes of it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from sealring.gateway.scheduler import NO_MODEL, AnnounceStep, Request, SourceFacts, StepCosts
from sealring.mesh.errors import SealringError
from sealring.v1 import control_pb2 as control
from tests.gateway.scheduler.test_scheduler_properties import IMAGES, PAIRS, SchedulerMachine

FOLDER = Path(__file__).with_name("traces")
SUMMARIES = FOLDER / "summaries.txt"
EVENTS = 30
SEEDS = range(1001)
OFTEN = 40
"""Every fortieth schedule is made in every run of the tests."""

WHOLE = (2, 3)
"""Seeds of the schedules that are there in full, to be read."""


class Traced(SchedulerMachine):
    """Draws what `SchedulerMachine` lets hypothesis draw from one seed, and writes down all actions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.draws = random.Random(seed)
        one = self.draws.choice
        self.start(
            stages=one([1, 2, 2, 3]),
            max_rows=one([8, 8, 3, 1]),
            chunk=one([64, 16, 256]),
            budget=one([4000, 20_000, 100_000, 600]),
            support=one(control.PrefixSupport.values()),
            speculate=one([True, False]),
            draft_runs=one([64, 2, 1, 0]),
            marks=one([0, 50, 4000]),
            costs=one([StepCosts(), PAIRS]),
            draft=one([0.0, 0.001]),
        )
        assert self.facts_of is not None
        seconds = self.facts_of.sources[control.DRAFT_SOURCE_MODEL].seconds
        if seconds and one([True, False]):
            head = SourceFacts(seconds, 1, ahead=True)
            sources = {**NO_MODEL, control.DRAFT_SOURCE_MTP_HEAD: head}
            self.facts_of = replace(self.facts_of, sources=sources)
        self.attach()
        for _ in range(EVENTS):
            self.event()
            self.load_adds_up()
            self.gateway_and_members_agree()
            self.something_is_under_way()
            self.lanes_follow_rows()
        self.teardown()

    def event(self) -> None:
        """One that can be now."""
        one, some = self.draws.choice, self.draws.randint
        if self.ring is None:
            self.attach()
        what = one(
            ["submit", "burst", "beside", "cancel", "turn", "open", *["steps"] * 4, "drop", "time", "lose"]
        )
        if what == "submit":
            self.submit(
                one("abc"),
                some(1, 1500),
                one([0, 1, 2, 3, 17, 600]),
                some(1, 700),
                some(0, 2),
                one([0, 100, 700, 1500]),
                one([(0, math.inf), (0, math.inf), (-10, math.inf), (10, 1.0), (0, 0.5)]),
                one([1, 1, 2, 4]),
                one(["", "", "tells", "sealed"]),
                one([(), *IMAGES]),
            )
        elif what == "burst":
            self.submit_burst(some(2, 6), [some(1, 60) for _ in range(6)], [some(1, 40) for _ in range(6)])
        elif what == "beside":
            long = [some(300, 1500) for _ in range(some(0, 4))]
            self.submit_short_beside_long(one("abcd"), long, some(0, 40), one([True, False]))
        elif what == "cancel":
            self.submit_and_cancel(some(2, 4), one([10, 400]), some(0, 40))
        elif what == "turn":
            prompts = [some(60, 500) for _ in range(some(2, 5))]
            self.submit_in_turn(some(0, 2), prompts, some(1, 30), one(IMAGES))
        elif what == "open" and self.ring is not None and self.ring.opening:
            self.answer_open(one([False] * 7 + [True]), one([0, 0, 1, 5]))
        elif what == "steps":
            self.read_all()
            self.steps_done(some(1, 120), one([0.0, 0.01, 0.01, 1.0]))
        elif what == "drop" and self.open_requests:
            self.drop(one(sorted(self.open_requests)))
        elif what == "time":
            self.time_passes(one([0.0, 0.6, 2.0]))
        elif what == "lose":
            self.lose_epoch(one([False, False, False, True]))

    def perform(self, actions: list[Any]) -> None:
        for action in actions:
            self.lines.append(f"{type(action).__name__} {_words(action)}")
            super().perform([action])
            if isinstance(action, AnnounceStep) and self.ring is not None:
                self.lines[-1] += f" {self.ring.digest.hex()[:8]}"

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)

    @property
    def summary(self) -> str:
        steps = [line for line in self.lines if line.startswith("AnnounceStep")]
        drafts = sum("drafts" in line for line in steps)
        return f"{hashlib.sha256(self.text.encode()).hexdigest()[:12]} {len(steps)} {drafts}"


def _words(value: object) -> str:
    if isinstance(value, Message):
        return text_format.MessageToString(value, as_one_line=True)
    if isinstance(value, Request):
        return value.id
    if isinstance(value, SealringError):
        return value.reason
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "(" + ", ".join(map(_words, value)) + ")"
    return repr(value)


def _param(seed: int) -> object:
    return pytest.param(seed, marks=[pytest.mark.sweep] * (seed % OFTEN > 0))


@pytest.mark.parametrize("seed", map(_param, SEEDS))
def test_schedules_are_what_they_were(seed: int) -> None:
    assert f"{seed} {Traced(seed).summary}" == SUMMARIES.read_text().splitlines()[seed]


@pytest.mark.parametrize("seed", WHOLE)
def test_schedules_read_as_they_did(seed: int) -> None:
    assert Traced(seed).text.splitlines() == _whole(seed).read_text().splitlines()


def _whole(seed: int) -> Path:
    return FOLDER / f"{seed}.txt"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--update", action="store_true")
    what.add_argument("--show", type=int, metavar="SEED")
    options = parser.parse_args()
    if options.update:
        SUMMARIES.write_text("".join(f"{seed} {Traced(seed).summary}\n" for seed in SEEDS))
        for seed in WHOLE:
            _whole(seed).write_text(Traced(seed).text)
    else:
        sys.stdout.write(Traced(options.show).text)
