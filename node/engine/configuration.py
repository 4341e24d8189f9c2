"""What configurations call the parts of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = "text_config"
_OTHERS = "llm_config", "language_config"
_BOTH = "thinker_config"
"""The text part and the tower of a model that also speaks."""


def with_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which the text part's is `text_config`, whatever its publisher calls that."""
    inner = config.get(_BOTH)
    found = {**inner, **config} if isinstance(inner, Mapping) else dict(config)
    named = (config[name] for name in _OTHERS if isinstance(config.get(name), Mapping))
    if (text := next(named, None)) is not None:
        found.setdefault(_TEXT, text)
    return found
