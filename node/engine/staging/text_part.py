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

from sealring.node.engine.configuration import with_parts

from .pictured import WRAPPED

_ROPE = "rope_theta", "partial_rotary_factor"

OF_TOWERS = re.compile(
    r"(^|\.)(vision\w*|visual|\w*projector|\w*_projection_adapter|connector|aligner|mlp1|patch_merge\w*"
    r"|embed_vision|image_newline|mlp_AR|speech_embeddings|view_separator)(\.|$)"
)
"""Names of the tensors of towers and projectors, in the checkpoints of all families."""

_AUDIO = "audio"

_LAYER = re.compile(r"(.*?)(?:layers\.)+(\d{1,9})\.")
_HEAD = re.compile(r"(.*?)(lm_head\..*)")
_TEXT = re.compile(r"(?:.*\.)?(?:language_model|text_model|language|thinker|llm)\.")


def text_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a model's text part, if it is one of WRAPPED; else None."""
    if config.get("model_type") not in WRAPPED:
        return None
    known = WRAPPED[config["model_type"]]
    text = with_parts(config).get("text_config") or (config if known else None)  # some have no parts
    if not isinstance(text, Mapping) or (text.get("model_type") in WRAPPED and not known):
        return None  # the latter could go on as deep as a file likes
    found = {"tie_word_embeddings": config.get("tie_word_embeddings", False)}
    rope = text.get("rope_parameters")  # newer configurations have these there alone
    found |= {name: rope[name] for name in _ROPE if name in rope} if isinstance(rope, Mapping) else {}
    return {**found, **text, **({"model_type": known} if known else {})}


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
            text = text_weights(weights, len(self.layers))
            made = self.language_model.sanitize(text) if hasattr(inner, "sanitize") else text
            return {f"language_model.{name}": value for name, value in made.items()}

    return Model, Arguments


def text_weights(weights: Mapping[str, mx.array], layers: int) -> dict[str, mx.array]:
    """The weights of the text part by its own names; those of towers are left out, and those of MTP heads,
    which are layers behind the `layers` of the model."""
    rest = {
        name: value for name, value in weights.items() if not OF_TOWERS.search(name) and _AUDIO not in name
    }
    before = {match[1] for match in map(_LAYER.match, rest) if match is not None}
    roots = {match[0] for match in map(_TEXT.match, before) if match is not None} or {""}
    before = {one for one in before if one.startswith(tuple(roots))}
    made = {}
    for name, value in rest.items():
        layer, head = _LAYER.match(name), _HEAD.match(name)
        root = next((one for one in roots if name.startswith(one)), None)
        if head is not None and any(one.startswith(head[1]) for one in before):
            made[head[2]] = value
        elif root is not None and (layer is None or int(layer[2]) < layers):
            made["model." * (root in before) + name.removeprefix(root)] = value
    return made
