"""The models that an HTTP edge serves."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from sealring.mesh.errors import ConfigError, InvalidInput, NotFound, Unauthenticated, Unavailable
from sealring.mesh.names import served_name
from sealring.mesh.prompt.images import VISION
from sealring.mesh.system.addresses import is_loopback
from sealring.mesh.system.files import read_secret

NO_KEY = "none"
"""The key that tools get for an edge that asks for none: most tools refuse an empty one."""

SMALL = "small"
"""The name or alias of the model that programs get for titles, subagents and the like."""

_SECONDS = 10.0
_MOST, _MOST_SAID = 1 << 20, 200
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def key_for(url: str, key_file: Path) -> str | None:
    """The proxy's own key in `key_file`, where the edge at `url` is on this machine and asks for a key.

    Raises InvalidInput (BAD_ADDRESS), ConfigError (SECRET_FILE_UNSAFE).
    """
    host, port, path, kind = _parts(url)
    if kind is not http.client.HTTPConnection or not is_loopback(host):
        return None
    try:
        key = read_secret(key_file).decode("ascii", "replace").strip()
        with contextlib.closing(kind(host, port, timeout=_SECONDS)) as connection:
            connection.request("GET", f"{path}/v1/models")
            with connection.getresponse() as answer:
                return key if answer.status == 401 else None
    except (OSError, HTTPException):
        return None


class Served(NamedTuple):
    """A model by its own name, how many tokens its context holds, and whether it sees images."""

    name: str
    context: int
    sees: bool = False


def served(url: str, key: str | None, model: str = "") -> tuple[Served, Served]:
    """The model of this name, or the only one that is not small, and the small model.

    Small is what is named so, or has the alias; without one, both are the same.

    Raises InvalidInput (BAD_ADDRESS), ConfigError (KEY_IN_CLEAR), Unavailable (NO_EDGE), Unauthenticated
    (KEY_REFUSED), NotFound (MODEL_NOT_FOUND).
    """
    host, port, path, kind = _parts(url)
    if key is not None and kind is http.client.HTTPConnection and not is_loopback(host):
        raise ConfigError(
            f"{url[:80]} would get the API key in clear", hint="give an https:// URL", reason="KEY_IN_CLEAR"
        )
    try:
        connection = kind(host, port, timeout=_SECONDS)
        with contextlib.closing(connection):
            connection.request(
                "GET", f"{path}/v1/models", headers={"authorization": f"Bearer {key or NO_KEY}"}
            )
            with connection.getresponse() as answer:
                status, text = answer.status, answer.read(_MOST)
        if status in (401, 403):
            raise Unauthenticated(
                f"{url} refuses the API key, or wants one",
                hint="name the file of one: --api-key-file",
                reason="KEY_REFUSED",
            )
        if status >= 400:  # such as a member's proxy while the first machine is off
            raise Unavailable(
                f"{url} does not list its models: {json.loads(text)['error']['message'][:_MOST_SAID]}",
                hint="`sealring` alone says what this machine waits for",
                reason="NO_EDGE",
            )
        listed = json.loads(text)["data"]
        named = [one for one in listed if _NAME.fullmatch(one["id"])]
        models = {
            one["id"]: Served(
                one["id"], int(one["context_length"]), VISION in (one.get("capabilities") or ())
            )
            for one in named
        }
        aliases = {str(alias): one["id"] for one in named for alias in one.get("aliases", ())}
    except (OSError, ValueError, ArithmeticError, RecursionError, HTTPException, LookupError, TypeError):
        raise Unavailable(
            f"{url} does not list its models", hint="start `sealring proxy`, or give --url", reason="NO_EDGE"
        ) from None
    small = served_name(SMALL, list(models), aliases)
    others = [one for one in models if one != small] or list(models)
    chosen = model or (others[0] if len(others) == 1 else "")
    if chosen not in models:
        names = ", ".join(sorted(models)[:20])
        raise NotFound(
            f"there is no model {model!r}" if model else f"{len(others) or 'no'} models are served here",
            hint=f"say which: --model, one of {names}" if names else "serve one: sealring deploy MODEL",
            reason="MODEL_NOT_FOUND",
        )
    return models[chosen], models[small or chosen]


def _parts(url: str) -> tuple[str, int | None, str, type[http.client.HTTPConnection]]:
    """Host, port, path, and what connects to them."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            tls = parts.scheme == "https"
            kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
            return parts.hostname, parts.port, parts.path, kind
    except ValueError:  # an open bracket, or a port that is not a number
        pass
    raise InvalidInput(f"{url[:80]!r} is no URL", hint="give http://HOST:PORT", reason="BAD_ADDRESS")
