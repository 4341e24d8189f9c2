"""The exception tree as HTTP responses."""

from __future__ import annotations

import json

from starlette.responses import Response

from sealring.api.errors import error_of, error_status
from sealring.mesh.errors import SealringError


def error_response(error: SealringError, path: str = "") -> Response:
    """In the form of the API whose path was asked for."""
    headers = {}
    if "retry_after" in error.metadata:
        headers["retry-after"] = error.metadata["retry_after"]
    elif error_status(error) == 503:
        headers["retry-after"] = "1"
    if error.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    if "allow" in error.metadata:
        headers["allow"] = error.metadata["allow"]
    return Response(
        json.dumps(error_of(path, error)), error_status(error), headers, media_type="application/json"
    )
