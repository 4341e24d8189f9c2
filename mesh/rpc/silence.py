"""Finds the other end of a stream silent, in seconds, where work waits for it.

gRPC's pings are set for the life of a connection. Pings every two seconds would wake an idle machine day and
night, so gRPC pings seldom (`mesh/rpc/server.py`), and both ends of a standing stream say something more
often while there is work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

GRACE_SECONDS = 1.0
"""The last part of a silence. A process that stood still reads in it what was said meanwhile."""

ANSWER_SECONDS = 2.0
"""An answer of a machine that is there takes no longer."""


class Silence:
    """Calls `on_silence` when something expected has not come in time. Use it from one event loop."""

    def __init__(self, on_silence: Callable[[], None]) -> None:
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None

    @property
    def expecting(self) -> bool:
        """Whether something is expected."""
        return self._timer is not None

    def expect(self, seconds: float) -> None:
        """Something comes within `seconds`, and GRACE_SECONDS; what was expected before has come."""
        self.heard()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._late)

    def heard(self) -> None:
        """It has come, or nothing is expected any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._over)

    def _over(self) -> None:
        self._timer = None
        self._on_silence()
