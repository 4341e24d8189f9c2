"""Models that mlx-lm does not have, and whose text part it has.

Many models that see are a known text model behind a tower. Their configuration holds that of the text model,
and their weights have its names behind a prefix. Their towers are mlx-vlm's (`node/engine/vision/tower.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

WRAPPED = frozenset(["idefics3", "internvl_chat", "smolvlm"])
"""Model types of which `vision/check.py` has shown that they compute as mlx-vlm's whole model does."""

_LAYER = re.compile(r"(.*?)layers\.0\.")
_HEAD = re.compile(r"(?:^|\.)(lm_head\..*)")
_TEXT = re.compile(r"(^|\.)(language_model|text_model)\.")


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a model's text part, if it is one of WRAPPED; else None."""
    text = config.get("text_config", config.get("llm_config"))
    if config.get("model_type") not in WRAPPED or not isinstance(text, Mapping):
        return None
    if text.get("model_type") in WRAPPED:  # and so on, as deep as a file likes
        return None
    tied = config.get("tie_word_embeddings", False)
    return {"tie_word_embeddings": tied, **text}


def wrapped(inner: Any, arguments: Any) -> tuple[Any, Any]:
    """Classes of a model and its arguments around those of its text part."""

    class Arguments(SimpleNamespace):
        @classmethod
        def from_dict(cls, config: dict[str, Any]) -> Arguments:
            text = text_config(config)
            return cls(model_type=config["model_type"], text_config=text, text=arguments.from_dict(text))

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self, args: Arguments) -> None:
            super().__init__()
            self.args, self.model_type = args, args.model_type
            self.language_model = inner(args.text)
            if hasattr(self.language_model, "make_cache"):
                self.make_cache = self.language_model.make_cache

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = self.language_model(inputs, cache=cache)
            return logits

        @property
        def layers(self) -> Any:
            return self.language_model.layers

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            text = text_weights(weights)
            made = self.language_model.sanitize(text) if hasattr(inner, "sanitize") else text
            return {f"language_model.{name}": value for name, value in made.items()}

    return Model, Arguments


def text_weights(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights of the text part by its own names; those of the tower are left out."""
    found = (_LAYER.match(name) for name in weights)
    prefixes = {match[1] for match in found if match is not None and _TEXT.search(match[1])}
    made = {}
    for name, value in weights.items():
        if head := _HEAD.search(name):
            made[head[1]] = value
        elif prefix := next((one for one in prefixes if name.startswith(one)), ""):
            made["model." + name.removeprefix(prefix)] = value
    return made
