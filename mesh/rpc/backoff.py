"""Back-off: how long to wait after a failure before the next attempt."""

from __future__ import annotations

import random

_FIRST_SECONDS = 0.2
_LAST_SECONDS = 4.0
"""So everybody is back within 6 s of a coordinator that returns, and a thousand machines ask it 250 times a
second at most while it is away."""

_STEADY_SECONDS = 5.0
_SPREAD = 0.5


class Backoff:
    """Doubles from one failure to the next and begins anew after what held; the defaults are for streams.

    Seconds: the `first` pause, the `last` and longest, and the `steady` time from which
    on an attempt has held. Pauses differ by the share `spread`, so
    that not all who failed together come again together.
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
        """Seconds to wait after an attempt that held for so many."""
        if lasted >= self._steady:
            self._next = self._first
        pause = self._next * random.uniform(1 - self._spread, 1 + self._spread)  # noqa: S311
        self._next = min(2 * self._next, self._last)
        return pause
