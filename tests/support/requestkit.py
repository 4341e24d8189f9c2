"""Requests of the gateway, new ones and those that have come some way."""

from __future__ import annotations

from typing import Any

from sealring.gateway.scheduler import Request
from sealring.v1 import inference_pb2 as inference


def request_of(
    name: str, tokens: int, key: str = "", *, envelope: inference.Envelope | None = None, **more: Any
) -> Request:
    """A request for `tokens` tokens at most; `more` are other fields of it."""
    return Request(id=name, key=key, max_tokens=tokens, envelope=envelope or inference.Envelope(), **more)


def with_progress(request: Request, **values: Any) -> Request:
    """The request itself, after fields of its `progress` are set to `values`."""
    for name, value in values.items():
        setattr(request.progress, name, value)
    return request
