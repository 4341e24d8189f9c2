"""What configurations call the parts of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sealring.mesh.errors import ModelError

_TEXT = "text_config"
_OTHERS = "llm_config", "language_config"
_BOTH = "thinker_config"
"""The text part and the tower of a model that also speaks."""

_TAKEN: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("architectures", (list, str, type(None)), "a list of names"),
    ("text_config", (dict,), "an object"),
    ("quantization", (dict, type(None)), "an object"),
    ("quantization.group_size", (int, type(None)), "a number"),
    ("quantization.bits", (int, type(None)), "a number"),
)
"""Fields that mlx-lm's loader reads by itself and fails at with a word of Python's: what each may be."""


def with_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration in which the text part's is `text_config`, whatever its publisher calls that."""
    inner = config.get(_BOTH)
    found = {**inner, **config} if isinstance(inner, Mapping) else dict(config)
    named = (config[name] for name in _OTHERS if isinstance(config.get(name), Mapping))
    if (text := next(named, None)) is not None:
        found.setdefault(_TEXT, text)
    return found


def check_fields(folder: str, config: Mapping[str, Any]) -> None:
    """Raises ModelError (BAD_MODEL_CONFIG) for a field that is not what mlx-lm's loader takes it for."""
    for path, kinds, what in _TAKEN:
        above, _, name = path.rpartition(".")
        part = config.get(above) if above else config
        if part is None or (name not in part and not above) or isinstance(part.get(name, ""), kinds):
            continue
        given = f"is {json.dumps(part[name])[:40]}" if name in part else "is missing"
        raise ModelError(
            f"the configuration of {folder} is malformed: {path} {given}, and has to be {what}",
            reason="BAD_MODEL_CONFIG",
            hint=f"mend {path} in its config.json as its publisher has it, or download the model again",
        )
