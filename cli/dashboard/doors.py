"""The addresses on this machine at which programs are answered just now."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from contextlib import closing

DOORS = (("127.0.0.1", 8080), ("127.0.0.1", 8081))
"""The usual ports of a gateway or a member's door, and of `sealring proxy`."""

_SECONDS = 1.0
_MOST = 256


def open_doors(places: Sequence[tuple[str, int]] = DOORS) -> list[str]:
    """URLs of those that answer as an edge of sealring does; another program's port is none."""
    return [f"http://{host}:{port}" for host, port in places if _answers(host, port)]


def _answers(host: str, port: int) -> bool:
    try:
        with closing(http.client.HTTPConnection(host, port, timeout=_SECONDS)) as connection:
            connection.request("GET", "/health/live")
            with connection.getresponse() as answer:
                return answer.status == 200 and answer.read(_MOST) == b'{"status": "live"}'
    except (OSError, http.client.HTTPException):
        return False
