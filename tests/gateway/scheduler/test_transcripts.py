"""Steps of the scheduler in some situations, against those that were last reviewed.

A change of the scheduler that is meant to change this writes it anew and shows the difference in review:

    PYTHONPATH=tests/support python -m tests.gateway.scheduler.test_transcripts

A line holds the steps between two that change rows: `p64` a prefill of 64 tokens (`p8+8` of two rows), a
number that many decode steps; then the step's changes: `+3/1` row 3 joins lane 1, `-3` is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
from simulatedring import BETWEEN, FAST, LINEAR, SLOW, SimulatedRing

from sealring.v1 import control_pb2 as control

WRITTEN = Path(__file__).with_name("transcripts.txt")


class Told(SimulatedRing):
    """Writes down every step."""

    def attach(self) -> None:
        self.words: list[str] = []
        super().attach()

    def announce(self, step: control.Step) -> None:
        self.words += _words(step)
        super().announce(step)

    def transcript(self) -> str:
        parts = ([str(len(list(same)))] if word == "d" else list(same) for word, same in groupby(self.words))
        text = " ".join(word for part in parts for word in part)
        return text.replace(" \n ", "\n").rstrip()


def _words(step: control.Step) -> list[str]:
    changes = []
    for change in step.changes:
        if change.HasField("admit"):
            changes.append(f"+{change.admit.row}/{change.admit.lane}")
        elif change.HasField("evict"):
            changes.append(f"-{change.evict.row}")
    work = []
    if step.HasField("prefill"):
        work = ["p" + "+".join(str(chunk.end - chunk.start) for chunk in step.prefill.chunks)]
    elif step.HasField("decode"):
        work = ["d"]
    return [*changes, "\n", *work] if changes else work


def _beside(ring: Told, streams: int, prompts: list[int]) -> Told:
    """Long prompts beside streams, and after them a row more and a row less."""
    ring.stream(streams, tokens=20)
    for number, prompt in enumerate(prompts):
        ring.ask(f"long{number}", prompt, 2)
    ring.run(until=lambda: all(f"long{number}" in ring.arrivals for number in range(len(prompts))))
    ring.ask("more", 300, 40)
    ring.run(until=lambda: "more" in ring.ended)
    return ring


def _crowd(ring: Told, count: int) -> Told:
    for number in range(count):
        ring.ask(f"r{number}", 20 + 9 * number, 8 + 5 * number % 31)
    ring.run()
    return ring


def _drifting(ring: Told, count: int) -> Told:
    """Two rows of three end early, and no new ones come."""
    for number in range(count):
        ring.ask(f"r{number}", 30, 300 if number % 3 == 0 else 20 + number)
    ring.run()
    return ring


def _slower(ring: Told, streams: int, prompt: int) -> Told:
    """Prefill costs four times as much from the middle of a prompt on, and half as much for the next."""
    ring.stream(streams, tokens=20)
    ring.ask("long", prompt, 2)
    ring.run(until=lambda: sum(ring.chunks[streams:]) > prompt // 2)
    ring.chunk_factor = 4
    ring.run(until=lambda: "long" in ring.arrivals)
    ring.chunk_factor = 0.5
    ring.ask("next", prompt, 2)
    ring.run(until=lambda: "next" in ring.arrivals)
    return ring


def _rushes(ring: Told, streams: int) -> Told:
    """Short prompts that come together beside streams and behind a long one, again and again."""
    ring.stream(streams, tokens=20)
    ring.ask("long", 900, 4)
    for wave in range(3):
        until = len(ring.arrivals["stream0"]) + 8
        ring.run(until=lambda until=until: len(ring.arrivals["stream0"]) >= until)  # type: ignore[misc]
        for number in range(4):
            ring.ask(f"short{wave}-{number}", 24 + number, 6)
    ring.run(until=lambda: "long" in ring.ended and "short2-3" in ring.ended)
    return ring


SITUATIONS: dict[str, Callable[[], Told]] = {
    "two stages that compute rows in turn": lambda: _beside(Told(2, SLOW), 4, [700]),
    "three stages that compute rows in turn, two prompts": lambda: _beside(Told(3, SLOW), 6, [400, 300]),
    "two stages bound by memory": lambda: _beside(Told(2, FAST), 16, [4096]),
    "three stages between the two": lambda: _beside(Told(3, BETWEEN), 6, [1300] * 2),
    "one stage without fixed costs": lambda: _beside(Told(1, LINEAR), 4, [600]),
    "two stages of which members compute many rows in turn": lambda: _beside(Told(2, SLOW), 16, [500]),
    "four stages bound by memory": lambda: _beside(Told(4, FAST), 40, [4096, 700]),
    "one stage between the two": lambda: _beside(Told(1, BETWEEN), 16, [900]),
    "lanes that drift apart": lambda: _drifting(Told(3, BETWEEN), 16),
    "lanes that drift apart where rows are computed in turn": lambda: _drifting(Told(2, SLOW), 15),
    "a machine that gets slower and then faster": lambda: _slower(Told(2, BETWEEN), 6, 900),
    "a machine in turn that gets slower and then faster": lambda: _slower(Told(2, SLOW), 4, 400),
    "a machine bound by memory that gets slower and then faster": lambda: _slower(Told(2, FAST), 12, 2500),
    "rushes": lambda: _rushes(Told(2, SLOW), 3),
    "rushes where steps cost the same": lambda: _rushes(Told(3, FAST), 9),
    "a crowd on two stages": lambda: _crowd(Told(2, SLOW), 12),
    "a crowd on more stages than rows fill": lambda: _crowd(Told(4, FAST), 10),
    "a crowd with more rows than there is room for": lambda: _crowd(Told(2, BETWEEN, rows=4), 9),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_scheduler_does_what_it_did(name: str) -> None:
    sections = dict(part.split("\n", 1) for part in WRITTEN.read_text().split("# ")[1:])
    assert SITUATIONS[name]().transcript() == sections[name].strip()


if __name__ == "__main__":
    found = {name: situation().transcript() for name, situation in SITUATIONS.items()}
    WRITTEN.write_text("\n\n".join(f"# {name}\n{text}" for name, text in found.items()) + "\n")
