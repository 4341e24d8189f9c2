"""When a request came to its ring, when its prompt began to be computed, and the ring's time that it took."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from sealring.mesh.system.pace import Pace
from sealring.v1 import inference_pb2 as inference

PREFILL_SECONDS = 2.0


@dataclass(slots=True)
class Timings:
    """Moments of one request, in seconds of `time.perf_counter`; 0 before they come."""

    routed: float = 0.0
    loaded: float = 0.0
    computed: float = 0.0
    ring: float = 0.0
    """Seconds of the ring's time so far, which is shared evenly by the requests that it computes at once."""

    @property
    def load_ms(self) -> int:
        """Milliseconds for which the request waited until its ring served; 0 if it served already."""
        return round(max(0.0, self.loaded - self.routed) * 1000)

    @property
    def queued(self) -> float | None:
        """Seconds from the ring to the first step; None while it has not come, or another gateway has it."""
        return self.computed - self.routed if self.computed else None


class Prefill:
    """How far the prompt of one request is, told at most every `PREFILL_SECONDS`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pace = Pace(clock)
        self._told = math.inf

    def at(self, done: int, prompt_tokens: int) -> inference.Prefilling | None:
        """What to tell now that `done` tokens of the prompt are computed; they never become less."""
        now, reached = self._clock(), self._pace.at("", min(done, prompt_tokens), prompt_tokens)
        self._told = min(self._told, now)
        if now < self._told + PREFILL_SECONDS:
            return None
        self._told = now
        left = reached.seconds_left
        return inference.Prefilling(done=reached.done, prompt_tokens=prompt_tokens, seconds_left=left)
