"""What of a request the rings are told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sealring.gateway.answer import Answer
from sealring.gateway.inference import RingBackend
from sealring.gateway.metrics import Metrics
from sealring.gateway.scheduler import Request
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.v1 import inference_pb2 as inference


class OneRing:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def deployments(self) -> list[str]:
        return ["model"]

    def submit(self, model: str, request: Request, answer: Answer, *, min_trust: int) -> None:
        self.requests.append(request)
        raise Unavailable("enough", reason="RING_DOWN")

    def cancel(self, request_id: str) -> None: ...


@pytest.mark.parametrize(
    ("fields", "priority", "patience"),
    [({}, 0, math.inf), ({"priority": -7, "deadline_ms": 1500}, -7, 1.5)],
)
async def test_priority_and_deadline_reach_the_scheduler(
    fields: dict[str, Any], priority: int, patience: float
) -> None:
    rings = OneRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    with pytest.raises(Unavailable):
        async for _ in backend.generate(inference.GenerateRequest(envelope=envelope, **fields), key="k"):
            pass
    (request,) = rings.requests
    assert (request.priority, request.patience, request.key) == (priority, patience, "k")


LONG = "what all turns of a conversation begin with " * 8


async def affinity_of(backend: RingBackend, rings: OneRing, tenant: str = "", **fields: Any) -> bytes:
    fields.setdefault("envelope", inference.Envelope(clear=inference.Prompt(text=LONG)))
    with pytest.raises(Unavailable):
        async for _ in backend.generate(inference.GenerateRequest(**fields), tenant=tenant):
            pass
    return rings.requests.pop().affinity


async def test_what_a_ring_is_preferred_by() -> None:
    """The key that was given, else how the prompt begins; each tenant's apart; of a sealed prompt nothing."""
    rings = OneRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    derived = await affinity_of(backend, rings)
    keyed = await affinity_of(backend, rings, prompt_cache_key="k")
    other = inference.Envelope(clear=inference.Prompt(text="something else " * 40))
    assert len({derived, keyed, b""}) == 3
    assert await affinity_of(backend, rings) == derived
    assert await affinity_of(backend, rings, envelope=other) not in (derived, keyed, b"")
    assert await affinity_of(backend, rings, envelope=other, prompt_cache_key="k") == keyed
    assert await affinity_of(backend, rings, prompt_cache_key="") == b""
    assert await affinity_of(backend, rings, "tenant") not in (derived, b"")
    assert await affinity_of(backend, rings, "tenant", prompt_cache_key="k") not in (keyed, b"")
    to = inference.SealedFor(ring="r", request_id=bytes(16), expires=9, roster_hash=bytes(32))
    sealed = inference.Envelope(sealed=LONG.encode(), sealed_for=to)
    assert await affinity_of(backend, rings, envelope=sealed) == b""
    again = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    assert await affinity_of(again, rings) != derived


@pytest.mark.parametrize(
    ("key", "sealed"), [("x" * 257, False), ("x" * 10_240, False), ("\0" * 257, False), ("mine", True)]
)
async def test_a_key_that_is_too_long_or_beside_a_sealed_prompt_is_refused(key: str, sealed: bool) -> None:
    rings = OneRing()
    backend = RingBackend(rings, Metrics())  # type: ignore[arg-type]
    envelope = inference.Envelope(clear=inference.Prompt(text="x"))
    if sealed:
        to = inference.SealedFor(ring="r", request_id=bytes(16), expires=9, roster_hash=bytes(32))
        envelope = inference.Envelope(sealed=b"x", sealed_for=to)
    with pytest.raises(InvalidInput) as caught:
        async for _ in backend.generate(inference.GenerateRequest(envelope=envelope, prompt_cache_key=key)):
            pass
    told = caught.value
    assert (told.reason, told.metadata["param"]) == ("BAD_PROMPT_CACHE_KEY", "prompt_cache_key")
    assert key not in told.message
    assert rings.requests == []
