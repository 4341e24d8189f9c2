"""Asks an HTTP edge which model it serves."""

from __future__ import annotations

import http.client
import json
import re
from urllib.parse import urlsplit

from sealring.mesh.errors import InvalidInput, NotFound, Unavailable

_SECONDS = 10.0
_MOST = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def served(url: str, key: str, model: str = "") -> tuple[str, int]:
    """The model of this name, or the only one, and how many tokens its context holds.

    Raises InvalidInput (BAD_ADDRESS), Unavailable (NO_EDGE), NotFound (MODEL_NOT_FOUND).
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidInput(f"{url[:80]!r} is no URL", hint="give http://HOST:PORT", reason="BAD_ADDRESS")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=_SECONDS)
        connection.request("GET", f"{parts.path}/v1/models", headers={"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        told = json.loads(answer.read(_MOST))
        connection.close()
        models = {one["id"]: int(one["context_length"]) for one in told["data"] if _NAME.fullmatch(one["id"])}
    except (OSError, ValueError, http.client.HTTPException, LookupError, TypeError):
        raise Unavailable(
            f"{url} does not tell its models", hint="start `sealring proxy`, or give --url", reason="NO_EDGE"
        ) from None
    chosen = model or (next(iter(models)) if len(models) == 1 else "")
    if chosen not in models:
        names = ", ".join(sorted(models)[:20])
        raise NotFound(
            f"there is no model {model!r}" if model else "there is more than one model, or none",
            hint=f"give --model, one of: {names}",
            reason="MODEL_NOT_FOUND",
        )
    return chosen, models[chosen]
