"""What of a request the rings are told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gateway.answer import Answer
from gateway.inference import RingBackend
from gateway.metrics import Metrics
from gateway.scheduler import Request
from mesh.errors import Unavailable
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
