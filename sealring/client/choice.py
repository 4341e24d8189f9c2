"""Chooses the ring for a prompt: by trust in the verified roster first, then by the prefix that it has.

The choice is made here, by a key that stays here (mesh.prompt.routing); the gateway sees what was chosen.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Iterable
from operator import attrgetter

from sealring.mesh.errors import FailedPrecondition, NotFound
from sealring.mesh.names import model_differs, served_name
from sealring.mesh.prompt.images import VISION
from sealring.mesh.ring.routing import choose, ranked
from sealring.mesh.roster.model import Ring, Roster, ring_min_trust
from sealring.mesh.roster.rules import links_in_clear
from sealring.mesh.trust.levels import level_of
from sealring.v1 import inference_pb2 as inference

MOST = 16
"""Rings that are compared for a key, in the order in which it prefers them."""

_MAX_REQUESTS = 1 << 20


class RingLoads:
    """How busy rings are: by the gateway's hint, which nobody signed, and by what this client sent since."""

    def __init__(self, serving: Iterable[inference.RingLoad] = ()) -> None:
        hints = list(serving)
        self._told = {
            load.ring: (
                min(load.waiting, _MAX_REQUESTS) + min(load.running, _MAX_REQUESTS),
                min(max(1, load.rows), _MAX_REQUESTS),
            )
            for load in hints
        }
        self._seeing = {load.ring for load in hints if VISION in load.capabilities}
        self._lacking = {load.ring for load in hints if load.vision_not_installed}
        self._sent: Counter[str] = Counter()

    def __contains__(self, ring: str) -> bool:
        """Whether the gateway says that the ring serves."""
        return ring in self._told

    def sees(self, ring: str) -> bool | None:
        """Whether the ring's model sees images; None for a ring of which the gateway says nothing."""
        return ring in self._seeing if ring in self._told else None

    def lacks_vision(self, ring: str) -> bool:
        """Whether the ring's model would see if its head had `sealring[vision]`."""
        return ring in self._lacking

    def of(self, ring: str) -> tuple[int, int]:
        """Requests that are there, and rows that the ring can run."""
        requests, rows = self._told.get(ring, (0, 1))
        return requests + self._sent[ring], rows

    def sent(self, ring: str) -> None:
        """A request of this client is on its way there."""
        self._sent[ring] += 1

    def ended(self, ring: str) -> None:
        """One that was counted is over."""
        self._sent[ring] -= 1


def choose_ring(
    roster: Roster,
    model: str,
    min_trust: int,
    loads: RingLoads,
    routing_key: bytes,
    avoid: Collection[str] = (),
    digest: str = "",
    *,
    shows: bool = False,
) -> Ring:
    """A ring of `model` whose weakest member scores at least `min_trust`: the one that `routing_key` prefers
    if it is not too busy, without one the least busy.

    `loads` only chooses among rings that are trusted; rings named in `avoid` come last. For a prompt that
    `shows` an image those come first of which the gateway says that they see. With a `digest` the ring's
    model has it by the roster. Raises NotFound (MODEL_NOT_FOUND), FailedPrecondition
    (TRUST_BELOW_FLOOR, LINKS_IN_CLEAR, MODEL_DIFFERS).
    """
    name = _deployment(roster, model)
    rings = [ring for ring in roster.rings if ring.deployment == name]
    rings = [ring for ring in rings if digest in ("", ring.model_digest.hex())]
    if not rings:
        raise model_differs(name)
    if all(ring.clear_links for ring in rings):
        raise links_in_clear(name)
    rings = [ring for ring in rings if not ring.clear_links]
    trust = {ring.id: ring_min_trust(ring.members, roster.members) for ring in rings}
    trusted = [ring for ring in rings if trust[ring.id] >= min_trust]
    if not trusted:
        best = max(trust.values())
        raise FailedPrecondition(
            f"trust {level_of(min_trust)} is demanded and the best ring of {name} has {level_of(best)}",
            hint="lower min_trust, or ask for a model on members of a higher trust level",
            reason="TRUST_BELOW_FLOOR",
            param="min_trust",
            min_trust=best,
        )
    places = {
        ring.id: (shows and not loads.sees(ring.id), ring.id in avoid, ring.id not in loads)
        for ring in trusted
    }
    first = min(places.values())
    candidates = [ring for ring in trusted if places[ring.id] == first]
    if routing_key:
        order = ranked(routing_key, candidates, attrgetter("id"), MOST)
        return order[choose([loads.of(ring.id) for ring in order])]
    secrets.SystemRandom().shuffle(candidates)
    return min(candidates, key=lambda ring: _busy(*loads.of(ring.id)))


def _busy(requests: int, rows: int) -> float:
    return requests / rows


def _deployment(roster: Roster, model: str) -> str:
    names = sorted({ring.deployment for ring in roster.rings})
    if (known := served_name(model, names)) is not None:
        return known
    if names:
        what = f"there is no model {model[:128]!r}" if model else "the request names no model"
        hint = f"the models in the roster are: {', '.join(names[:20])}"
    else:
        what, hint = "no model is served", "an operator has one served with: sealring deploy MODEL"
    raise NotFound(
        what,
        hint=hint,
        reason="MODEL_NOT_FOUND",
        param="model",
    )
