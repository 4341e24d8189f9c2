"""The choice of a ring for a request among the rings of its deployment."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sealring.edge.metrics import Metrics
from sealring.gateway.rings.epoch import below_floor, ring_down
from sealring.gateway.rings.ring import Ring
from sealring.gateway.rings.table import RingTable
from sealring.gateway.scheduler.request import Request
from sealring.mesh.errors import NotFound, Unavailable
from sealring.mesh.ring.routing import choose, ranked
from sealring.mesh.roster.rules import links_in_clear

SAMPLE = 16
"""Rings of a deployment that are compared for a request, drawn at random where there are more.

The least busy of a few is nearly as good as the least busy of all, at a cost that does not grow with the
number of rings.
"""


class RingChoice:
    """Chooses the ring that a prompt is sealed for, else one that is fit for it: the ring that the request's
    routing key prefers unless it is too busy, without a key the least busy."""

    def __init__(self, table: RingTable, metrics: Metrics) -> None:
        self._table = table
        self._metrics = metrics

    def ring_for(self, request: Request) -> Ring:
        """The ring for a request that comes from its client.

        Raises NotFound (MODEL_NOT_FOUND), FailedPrecondition (TRUST_BELOW_FLOOR, LINKS_IN_CLEAR), Unavailable
        (RING_DOWN, RING_GONE).
        """
        rings = self._rings(request.deployment)
        if sealed_for := request.envelope.sealed_for.ring:
            rings = _sealed_route(rings, sealed_for)
        elif request.routing_key:
            ready = [ring for ring in rings if ring.attached and self._fit(ring, request)]
            if ready:
                return self._preferred(request, ready)
        drawn = [ring for ring in _draw(rings) if ring.attached and self._fit(ring, request)]
        return min(drawn, key=_busy) if drawn else self._search(request, rings)

    def instead_of(self, lost: Ring, request: Request) -> Ring:
        """Another ring for a request that waits for a lost one; the lost one where no other is fit.

        Raises Unavailable (RING_DOWN) for a prompt that is sealed for the lost ring.
        """
        if request.envelope.sealed_for.ring:
            raise _sealed_elsewhere("RING_DOWN")
        fit = [ring for ring in self.others(lost) if self._fit(ring, request)]
        if not fit:
            return lost
        if request.routing_key:
            return self._preferred(request, fit)
        return min(_draw(fit), key=_busy)

    def others(self, lost: Ring) -> list[Ring]:
        """The other rings of its deployment that are attached."""
        return [ring for ring in self._table.of(lost.deployment) if ring is not lost and ring.attached]

    def _rings(self, deployment: str) -> Sequence[Ring]:
        rings = self._table.of(deployment)
        if not rings and deployment in self._table.deployments():
            raise ring_down(f"no ring can serve {deployment!r} at the moment")
        if not rings:
            raise NotFound(f"there is no model {deployment!r}", reason="MODEL_NOT_FOUND", param="model")
        return rings

    def _preferred(self, request: Request, rings: Sequence[Ring]) -> Ring:
        """The ring that keeps the prefixes of the request's key, or the next one in the key's order."""
        order = ranked(request.routing_key, rings, _name, SAMPLE)
        at = choose([_requests(ring) for ring in order])
        if at:
            self._metrics.routed_away.labels(request.deployment).inc()
        return order[at]

    def _search(self, request: Request, rings: Sequence[Ring]) -> Ring:
        """The least busy of all rings that may have a request, or the error that names the reason.

        A request that was accepted before its epoch ended waits for a ring however long that is down.
        """
        floor, accepted = request.min_trust, request.progress.all_attempts > 0
        # the trust of a ring that is planned anew is unknown; what waits for it is checked when it serves
        trusted = [ring for ring in rings if self._table.trust(ring, unknown=floor) >= floor]
        if not trusted:
            if all(self._table.in_clear(ring) for ring in rings):
                raise links_in_clear(request.deployment)
            raise below_floor(floor, max(map(self._table.trust, rings)))
        ready = [ring for ring in trusted if ring.attached] or [
            ring for ring in trusted if ring.patient or accepted
        ]
        if not ready:
            raise ring_down(f"no ring serves {request.deployment!r} at the moment")
        return min(ready, key=_busy)

    def _fit(self, ring: Ring, request: Request) -> bool:
        """Whether a ring has enough trust, and sees if the prompt shows images."""
        return self._table.trust(ring) >= request.min_trust and (not request.shows or ring.abilities.sees)


def _sealed_route(rings: Sequence[Ring], name: str) -> list[Ring]:
    """The one ring whose head can open a prompt. A request waits for it only where no other ring is attached.

    Raises Unavailable (RING_GONE, RING_DOWN): the client seals again, for another ring.
    """
    found = [ring for ring in rings if ring.name == name]
    if not found:
        raise _sealed_elsewhere("RING_GONE")
    if not found[0].attached and any(ring.attached for ring in rings):
        raise _sealed_elsewhere("RING_DOWN")
    return found


def _sealed_elsewhere(reason: str) -> Unavailable:
    return Unavailable(
        "the ring that the prompt was sealed for does not serve at the moment",
        hint="fetch the roster and seal again, for another ring",
        reason=reason,
    )


def _draw(rings: Sequence[Ring]) -> Sequence[Ring]:
    return rings if len(rings) <= SAMPLE else random.sample(rings, SAMPLE)


def _busy(ring: Ring) -> tuple[float, float]:
    """Requests per row that the ring could run, then memory: the less the better."""
    load = ring.load()
    return ((load.waiting + load.running) / _rows(ring), load.kv_usage)


def _requests(ring: Ring) -> tuple[int, int]:
    """Requests of the ring, and rows that it could run."""
    load = ring.load()
    return load.waiting + load.running, _rows(ring)


def _rows(ring: Ring) -> int:
    return ring.serving.max_rows if ring.serving else 1


def _name(ring: Ring) -> str:
    return ring.name
