"""Usage, for services whose tests use none of it."""

from __future__ import annotations

from sealring.v1 import inference_pb2 as inference


async def nothing_used(asked: inference.GetUsageRequest) -> inference.GetUsageResponse:
    return inference.GetUsageResponse()
