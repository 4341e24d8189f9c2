"""The gateway's part in `bench.ring`: announces the steps of an epoch and times what comes back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.models import OWN_PROMPTS
from sealring.mesh.ring import MAX_CHOICES
from sealring.node.engine import params
from sealring.v1 import control_pb2 as control

PARAMETER_BYTES = len(params.encode(params.RowParameters()))
ROWS_PER_PREFILL = 8
LONGEST_CHUNK = 2048


class Gateway:
    """Announces steps to all of `bench.ring_processes.Member`, the head first, and hears of them from it."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members
        self.number = 0
        self.done = 0

    def announce(self, **work: Any) -> int:
        self.number += 1
        step = control.Step(number=self.number, **work)
        for member in self._members:
            member.send(step=step)
        return self.number

    def wait(self) -> int:
        """The number of the next step that is done."""
        self.done += 1
        found: int = self._members[0].event("done").step
        return found

    def prefill(self, row: int, tokens: int, choices: int) -> None:
        """A prompt alone, in chunks, as many under way as a gateway allows."""
        for start in range(0, tokens, LONGEST_CHUNK):
            while self.number - self.done > len(self._members):
                self.wait()
            end = min(tokens, start + LONGEST_CHUNK)
            part = control.Chunk(row=row, start=start, end=end, prompt_tokens=tokens)
            if not start:
                part.params_bytes, part.choices = PARAMETER_BYTES, choices
            self.announce(prefill=control.Prefill(chunks=[part]))

    def prefill_whole(self, rows: Sequence[int], tokens: int) -> None:
        """Prefills the rows' prompts, of `tokens` tokens each, in one step."""
        whole = {"start": 0, "end": tokens, "prompt_tokens": tokens, "params_bytes": PARAMETER_BYTES}
        self.announce(prefill=control.Prefill(chunks=[control.Chunk(row=row, **whole) for row in rows]))

    def wait_all(self) -> None:
        while self.done < self.number:
            self.wait()


def admit(row: int, lane: int) -> control.Change:
    return control.Change(admit=control.Admit(row=row, lane=lane))


def prefill_rows(gateway: Gateway, rows: int, tokens: int) -> None:
    """Rows 1 to `rows`: each with its own prompt, or with copies of long ones."""
    numbers = range(1, rows + 1)
    if tokens > OWN_PROMPTS:
        for first in numbers[::MAX_CHOICES]:
            gateway.prefill(first, tokens, min(MAX_CHOICES, rows + 1 - first))
    else:
        for first in numbers[::ROWS_PER_PREFILL]:
            gateway.prefill_whole(numbers[first - 1 : first - 1 + ROWS_PER_PREFILL], tokens)
    gateway.wait_all()


@dataclass
class Lane:
    number: int
    rows: list[int]
    announced: int = 0
    done: list[float] = field(default_factory=list)


def decode(gateway: Gateway, lanes: int, rows: int, context: int, warm: int, steps: int) -> dict[str, Any]:
    """Tokens per second of `steps` steps of each lane after the first `warm`."""
    prefill_rows(gateway, lanes * rows, context)
    working = [Lane(lane, list(range(lane * rows + 1, (lane + 1) * rows + 1))) for lane in range(lanes)]
    lane_of: dict[int, Lane] = {}

    def announce(lane: Lane) -> None:
        admits = [admit(row, lane.number) for row in ([] if lane.announced else lane.rows)]
        lane_of[gateway.announce(changes=admits, decode=control.Decode(lane=lane.number))] = lane
        lane.announced += 1

    decode_from = gateway.number + 1 + lanes * warm
    for _ in range(2):
        for lane in working:
            announce(lane)
    while any(len(lane.done) < warm + steps for lane in working):
        lane = lane_of.pop(gateway.wait())
        lane.done.append(time.perf_counter())
        if lane.announced < warm + steps:
            announce(lane)
    begin = max(lane.done[warm - 1] for lane in working)
    end = min(lane.done[-1] for lane in working)
    made = sum(rows for lane in working for at in lane.done if begin < at <= end)
    return {"tokens_per_second": made / (end - begin), "decode_from": decode_from}
