"""Requests given to rings, and to other rings once a ring is lost."""

from __future__ import annotations

from sealring.edge.inference.answer import Answer
from sealring.edge.metrics import Metrics
from sealring.gateway.rings.choice import Choice
from sealring.gateway.rings.ring import Ring
from sealring.gateway.scheduler.request import Request
from sealring.mesh.errors import Unavailable


class Dispatch:
    """Remembers which ring has each request."""

    def __init__(self, choice: Choice, metrics: Metrics) -> None:
        self._choice = choice
        self._metrics = metrics
        self._ring_of: dict[str, Ring] = {}

    def submit(self, request: Request, answer: Answer) -> None:
        """Gives a request to a ring. Raises as `Choice.ring_for`."""
        ring = self._choice.ring_for(request)
        if request.routing_key:
            self._metrics.routed.labels(request.deployment).inc()
        self._give(ring, request, answer)

    def cancel(self, request_id: str) -> None:
        """Ends a request; an id that is not here is ignored."""
        ring = self._ring_of.pop(request_id, None)
        if ring is not None:
            ring.cancel(request_id)

    def hand_over(self, lost: Ring) -> None:
        """Gives the requests that wait for a lost ring to the attached rings of its deployment."""
        if not self._choice.others(lost):
            return
        for request, answer in lost.take_waiting():
            try:
                ring = self._choice.instead_of(lost, request)
            except Unavailable as error:
                answer.fail(error)
                continue
            self._give(ring, request, answer)

    def _give(self, ring: Ring, request: Request, answer: Answer) -> None:
        self._ring_of[request.id] = ring
        ring.submit(request, answer)
