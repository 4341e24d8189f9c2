"""Text models that mlx-vlm has and mlx-lm has not, with the interface of mlx-lm's classes.

mlx-vlm keeps the text side of each family in a module of its own, `mlx_vlm.models.NAME.language`. Only that
module, the family's `config` and its main module are imported: a family's `__init__` imports processors, and
what these need. A model here returns logits and makes mlx-lm's caches, so that loading, profile, stages and
checks take it for one of mlx-lm's. Its parameters have the names of mlx-vlm's conversions.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from sealring.mesh.errors import ModelError
from sealring.node.engine import mlx_lm_import

INSTALL = "pip install 'sealring[vision]' (pipx inject sealring mlx-vlm; uv tool install 'sealring[vision]')"

_NAMED_ALIKE = "cohere2_moe flint inkling k2_horizon kolibri1 longcat_flash_sparse xing4_0"
MODEL_TYPES: Mapping[str, str] = {
    **{name: name for name in _NAMED_ALIKE.split()},
    "cohere2moe": "cohere2_moe",
    "inkling_mm_model": "inkling",
}
"""Folders of mlx-vlm's models by the model types of configurations."""

_TEXT = "language_model."
_TOWERS = ("vision_tower", "vision_model", "audio_tower")
_AS_GIVEN = SimpleNamespace(sanitize=lambda weights: weights)


def classes_of(config: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Classes of a model and of its arguments, around mlx-vlm's; None for a model type that is not served so.

    Raises ModelError (MODEL_NEEDS_PACKAGE) where mlx-vlm is not installed.
    """
    name = MODEL_TYPES.get(config["model_type"])
    if name is None:
        return None
    family = _family(name, config["model_type"])

    class Arguments(SimpleNamespace):
        @classmethod
        def from_dict(cls, given: dict[str, Any]) -> Arguments:
            whole = family.ModelConfig.from_dict(dict(given))
            text = getattr(whole, "text_config", None)
            if isinstance(text, Mapping):
                text = whole.text_config = family.TextConfig.from_dict(dict(text))
            return cls(model_type=given["model_type"], whole=whole, text=text or whole)

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self, args: Arguments) -> None:
            super().__init__()
            self.args, self.model_type = args, args.model_type
            made = family.language.LanguageModel
            given = (args.text, args.whole)[: len(inspect.signature(made).parameters)]
            self.language_model = made(*given)

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            logits: mx.array = self.language_model(inputs, cache=cache).logits
            return logits

        @property
        def layers(self) -> Any:
            return self.language_model.layers

        @property
        def quant_predicate(self) -> Callable[[str, nn.Module], Any]:
            own = getattr(self.language_model, "quant_predicate", None)
            return own or (lambda path, module: True)

        def make_cache(self) -> list[Any]:
            own = self.language_model
            made = own.make_cache() if hasattr(own, "make_cache") else [KVCache() for _ in own.layers]
            return [_of_mlx_lm(cache) for cache in made]

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            whole = family.Model.__new__(family.Model)  # without its towers
            nn.Module.__init__(whole)
            whole.config = whole.args = self.args.whole
            whole.language_model = self.language_model
            for tower in _TOWERS:
                setattr(whole, tower, _AS_GIVEN)
            made = whole.sanitize(weights) if hasattr(whole, "sanitize") else weights
            return {name: value for name, value in made.items() if name.startswith(_TEXT)}

    return Model, Arguments


def _family(name: str, model_type: str) -> Any:
    """What the modules of a family have that its text side needs."""
    try:
        for package in ("mlx_vlm", "mlx_vlm.speculative", f"mlx_vlm.models.{name}"):
            mlx_lm_import.register(package)
        config, language, main = (
            importlib.import_module(f"mlx_vlm.models.{name}.{part}") for part in ("config", "language", name)
        )
    except ImportError as error:
        raise ModelError(
            f"architecture {model_type} needs mlx-vlm, which is not installed",
            reason="MODEL_NEEDS_PACKAGE",
            hint=INSTALL,
            model_type=model_type,
        ) from error
    return SimpleNamespace(**vars(config), language=language, Model=main.Model)


def _of_mlx_lm(cache: Any) -> Any:
    """An empty cache of mlx-lm's class for one of mlx-vlm's of the same name, and what has none as it is."""
    kind = type(cache).__name__
    if kind == "CacheList":
        return CacheList(*map(_of_mlx_lm, cache.caches))
    if kind == "KVCache":
        return KVCache()
    if kind == "RotatingKVCache":
        return RotatingKVCache(max_size=cache.max_size, keep=cache.keep)
    if kind == "ArraysCache":
        return ArraysCache(len(cache.cache))
    return cache
