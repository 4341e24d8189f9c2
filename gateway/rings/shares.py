"""A ring's time, shared evenly by the requests that it computes at once."""

from __future__ import annotations

from sealring.edge.inference.timings import Timings
from sealring.mesh.clock import Clock


class RingShares:
    """Adds to the `ring` seconds of requests: all together have as many as the ring has computed.

    A counter runs with the time divided by the requests under way, as the virtual time of processor sharing.
    A request's share is by how much the counter rose while it was computed, so each event costs the same with
    one request and with hundreds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun: dict[str, tuple[Timings, float]] = {}
        self._counter = self._since = 0.0

    def begin(self, request_id: str, timings: Timings) -> None:
        """A request is computed from now on; one that is already goes on."""
        if request_id not in self._begun:
            self._begun[request_id] = timings, self._now()

    def end(self, request_id: str) -> None:
        """A request is computed no longer; one that was not is ignored."""
        if request_id in self._begun:
            now = self._now()
            timings, begun = self._begun.pop(request_id)
            timings.ring += now - begun

    def end_all(self) -> None:
        for request_id in list(self._begun):
            self.end(request_id)

    def _now(self) -> float:
        now = self._clock()
        if self._begun:
            self._counter += (now - self._since) / len(self._begun)
        self._since = now
        return self._counter
