"""Which ring gets a prompt: trusted enough by the verified roster first, then the least busy."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable

from mesh.errors import FailedPrecondition, NotFound
from mesh.roster import Ring, Roster, ring_min_trust
from sealring.v1 import inference_pb2 as inference


def choose_ring(
    roster: Roster,
    model: str,
    min_trust: int,
    serving: Iterable[inference.RingLoad] = (),
    avoid: Collection[str] = (),
) -> Ring:
    """A ring of `model` whose weakest member scores at least `min_trust`.

    `serving` is the gateway's unsigned hint and only chooses among rings that are trusted; rings named in
    `avoid` come last. Raises NotFound (MODEL_NOT_FOUND), FailedPrecondition (TRUST_BELOW_FLOOR).
    """
    name = _deployment(roster, model)
    rings = [ring for ring in roster.rings if ring.deployment == name]
    trust = {ring.id: ring_min_trust(ring.members, roster.members) for ring in rings}
    trusted = [ring for ring in rings if trust[ring.id] >= min_trust]
    if not trusted:
        best = max(trust.values())
        raise FailedPrecondition(
            f"a trust of {min_trust} is demanded and the best ring of {name} has {best}",
            hint="lower min_trust, or ask for a model that better attested members serve",
            reason="TRUST_BELOW_FLOOR",
            param="min_trust",
            min_trust=best,
        )
    loads = {load.ring: (load.waiting + load.running) / max(1, load.rows) for load in serving}
    secrets.SystemRandom().shuffle(trusted)
    return min(trusted, key=lambda ring: (ring.id in avoid, ring.id not in loads, loads.get(ring.id, 0.0)))


def _deployment(roster: Roster, model: str) -> str:
    names = sorted({ring.deployment for ring in roster.rings})
    if model in names:
        return model
    if not model and len(names) == 1:
        return names[0]
    shown = ", ".join(names[:20]) or "none"
    raise NotFound(
        f"there is no model {model[:128]!r}" if model else "the request names no model",
        hint=f"the models in the roster are: {shown}",
        reason="MODEL_NOT_FOUND",
        param="model",
    )
