"""How long a model on demand stays loaded, as Ollama's clients write it in every API."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from sealring.mesh.ring.limits import MAX_KEEP_ALIVE

_DURATION = re.compile(r"(-?)((?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ns|us|µs|ms|s|m|h))+|[0-9]{1,12})\Z", re.ASCII)
_PART = re.compile(r"([0-9.]+)([a-zµ]*)")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(given: Any) -> int | None:
    """A number of seconds, or a duration as Go writes it (`1h30m`), in whole seconds; -1 for ever.

    Raises PydanticCustomError.
    """
    if given is None:
        return None
    text = f"{given:f}s" if isinstance(given, float) else str(given)
    found = _DURATION.match(text)
    if isinstance(given, bool) or found is None:
        raise PydanticCustomError("keep_alive", "it is neither a number of seconds nor a duration such as 5m")
    if found[1]:
        return -1
    seconds = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(found[2]))
    return round(min(seconds, MAX_KEEP_ALIVE))


KeepAlive = Annotated[
    int | None, BeforeValidator(seconds_of), WithJsonSchema({"type": ["number", "string", "null"]})
]
"""The type of the field `keep_alive`."""
