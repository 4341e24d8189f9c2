"""The exception tree as HTTP responses."""

from __future__ import annotations

import json

from starlette.responses import Response

from sealring.api.errors import error_of, error_status
from sealring.mesh.errors import SealringError

_REPEATED = frozenset({429, 503})
"""Of these the same request succeeds later."""

_LEFT_TO_CLIENTS = frozenset({408, 409})
"""Of these it may."""


def error_response(error: SealringError, path: str = "") -> Response:
    """In the form of the API whose path was asked for.

    `x-should-retry` is the word that OpenAI's and Anthropic's SDKs obey before any rule of their own.
    """
    status = error_status(error)
    headers = {}
    if status in _REPEATED:
        headers["x-should-retry"] = "true"
    elif 400 <= status < 500 and status not in _LEFT_TO_CLIENTS:
        headers["x-should-retry"] = "false"
    if "retry_after" in error.metadata:
        headers["retry-after"] = error.metadata["retry_after"]
    elif status == 503:
        headers["retry-after"] = "1"
    if error.code == "UNAUTHENTICATED":
        headers["www-authenticate"] = "Bearer"
    if "allow" in error.metadata:
        headers["allow"] = error.metadata["allow"]
    return Response(json.dumps(error_of(path, error)), status, headers, media_type="application/json")
