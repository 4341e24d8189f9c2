"""Requests of the gateway that have come some way."""

from __future__ import annotations

from typing import Any

from sealring.gateway.scheduler import Request


def with_progress(request: Request, **values: Any) -> Request:
    """The request itself, after fields of its `progress` are set to `values`."""
    for name, value in values.items():
        setattr(request.progress, name, value)
    return request
