"""How long whoever keeps a stream to the coordinator waits before opening it again."""

from __future__ import annotations

import random

_FIRST_SECONDS = 0.2
_LAST_SECONDS = 4.0
"""So everybody is back within 6 s of a coordinator that returns, and a thousand machines ask it 250 times a
second at most while it is away."""

_STEADY_SECONDS = 5.0


class Backoff:
    """Doubles from one failure to the next, with jitter, and begins anew after a stream that held."""

    def __init__(self) -> None:
        self._next = _FIRST_SECONDS

    def after(self, lasted: float) -> float:
        """Seconds to wait after a stream that lasted for so many."""
        if lasted > _STEADY_SECONDS:
            self._next = _FIRST_SECONDS
        pause = self._next * random.uniform(0.5, 1.5)  # noqa: S311
        self._next = min(2 * self._next, _LAST_SECONDS)
        return pause
