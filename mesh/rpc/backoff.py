"""Back-off: the pause after a failure before the next attempt."""

from __future__ import annotations

import random

_FIRST_SECONDS = 0.2
_LAST_SECONDS = 4.0
"""With the spread, every machine is back within 6 s of a coordinator's return, and a thousand machines try at
most 250 times a second while it is away."""

_STEADY_SECONDS = 5.0
_SPREAD = 0.5


class Backoff:
    """Pauses that double with each failure and start again after a success; the defaults are for streams.

    In seconds: the `first` pause, the `last` and longest, and the time after which an attempt counts as
    `steady`, a success. Pauses vary by the share `spread`, so that machines that failed together do not retry
    together.
    """

    def __init__(
        self,
        first: float = _FIRST_SECONDS,
        last: float = _LAST_SECONDS,
        *,
        steady: float = _STEADY_SECONDS,
        spread: float = _SPREAD,
    ) -> None:
        self._first = self._next = first
        self._last = last
        self._steady = steady
        self._spread = spread

    def after(self, lasted: float) -> float:
        """Seconds to wait after an attempt that `lasted` seconds."""
        if lasted >= self._steady:
            self._next = self._first
        pause = self._next * random.uniform(1 - self._spread, 1 + self._spread)  # noqa: S311
        self._next = min(2 * self._next, self._last)
        return pause
