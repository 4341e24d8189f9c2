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
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from sealring.mesh.errors import ModelError
from sealring.mesh.system.extras import INSTALL_VISION
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.caches.indexed import IndexedKVCache
from sealring.node.engine.caches.pools import Pools, Unfilled
from sealring.node.engine.caches.state import RunningSums, States

_NAMED_ALIKE = (
    "cohere2_moe deepseek_v4 ernie4_5_moe_vl flint glm5_next glm_moe_dsa hunyuan_vl hy_v4 inkling jina_vlm "
    "k2_horizon kolibri1 longcat_flash_sparse molmo molmo2 moondream2 moondream3 qwen4_exp xing4_0 youtu_vl "
    "z1t"
)
MODEL_TYPES: Mapping[str, str] = {
    **{name: name for name in _NAMED_ALIKE.split()},
    "cohere2moe": "cohere2_moe",
    "inkling_mm_model": "inkling",
    "jvlm": "jina_vlm",
    "moondream1": "moondream2",
}
"""Folders of mlx-vlm's models by the model types of configurations."""

_TEXT = "language_model"
_TEXT_OF = {"moondream2": "text", "moondream3": "text"}
"""What whole models call their text side, where not `language_model`."""

_PARTS = {"text_config": "TextConfig", "vision_config": "VisionConfig"}
_TOWERS = ("vision_tower", "vision_model", "audio_tower")
_PAST_LAYERS = "_supports_batch_invariant_decode"
"""What a text side says of a decode of its own, which does not call the layers."""

_DELTAS, _POSITIONS = "_rope_deltas", "_position_ids"
"""What a text side notes of a prompt's positions, for all prompts in one place."""

_TABLE_SCALE = ".ngram_embedding.weight_scale"
_AS_GIVEN = SimpleNamespace(sanitize=lambda weights: weights)


def comes_first(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has a class for the model type that knows less than this configuration says: layers
    of GLM-5.2 that share an indexer."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern") or ()
    shares = any(str(kind) in ("shared", "S") for kind in kinds) or config.get("index_topk_freq", 1) > 1
    return config.get("model_type") == "glm_moe_dsa" and shares


def classes_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Classes of a model of one of MODEL_TYPES and of its arguments, around mlx-vlm's.

    Raises ModelError (MODEL_NEEDS_PACKAGE) where mlx-vlm is not installed.
    """
    name = MODEL_TYPES[config["model_type"]]
    family, called = _family(name, config["model_type"]), _TEXT_OF.get(name, _TEXT)

    class Arguments(SimpleNamespace):
        @classmethod
        def from_dict(cls, given: dict[str, Any]) -> Arguments:
            given = {name: _without_paths(value) for name, value in given.items()}
            whole = family.ModelConfig.from_dict(given)
            for name, kind in _PARTS.items():
                if isinstance(part := getattr(whole, name, None), Mapping):
                    setattr(whole, name, getattr(family, kind).from_dict(dict(part)))
            return cls(
                model_type=given["model_type"], whole=whole, text=getattr(whole, "text_config", None) or whole
            )

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self, args: Arguments) -> None:
            super().__init__()
            self.args, self.model_type = args, args.model_type
            made = family.language.LanguageModel
            asked = inspect.signature(made).parameters.values()
            kinds = (getattr(one.annotation, "__name__", one.annotation) for one in asked)
            given = (args.whole if kind == "ModelConfig" else args.text for kind in kinds)
            self.language_model = made(*given)
            if name == "jina_vlm":  # whose head the whole model makes
                text = args.text
                self.language_model.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
            if hasattr(made, _PAST_LAYERS):
                setattr(self.language_model, _PAST_LAYERS, lambda: False)

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            own = self.language_model
            for name, none in ((_DELTAS, mx.zeros((inputs.shape[0], 1), mx.int32)), (_POSITIONS, None)):
                if hasattr(own, name):  # of the prompt before, whose images may have moved its positions
                    setattr(own, name, none)
            logits: mx.array = own(inputs, cache=cache).logits
            return logits

        @property
        def layers(self) -> Any:
            return self.language_model.layers

        @property
        def quant_predicate(self) -> Callable[[str, nn.Module], Any]:
            own = getattr(self.language_model, "quant_predicate", lambda path, module: True)

            def predicate(path: str, module: nn.Module) -> Any:
                how = own(path, module)
                return how if not isinstance(how, dict) or "bits" in how else True

            return predicate

        def make_cache(self) -> list[Any]:
            own = self.language_model
            return own.make_cache() if hasattr(own, "make_cache") else [KVCache() for _ in own.layers]

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            whole = family.Model.__new__(family.Model)  # without its towers
            nn.Module.__init__(whole)
            whole.config = whole.args = self.args.whole
            setattr(whole, called, self.language_model)
            for tower in (one for one in _TOWERS if not hasattr(family.Model, one)):
                setattr(whole, tower, _AS_GIVEN)
            weights = _with_table(weights)
            made = whole.sanitize(weights) if hasattr(whole, "sanitize") else weights
            named = ((key.removeprefix(f"{_TEXT}.").removeprefix(f"{called}."), key) for key in made)
            return {f"{_TEXT}.{short}": made[key] for short, key in named if short != key}

    return Model, Arguments


def _without_paths(part: Any) -> Any:
    """A part of a configuration without the path of a file that mlx-vlm would read as Qwen4's table."""
    return {**part, "ple_storage": None} if isinstance(part, dict) and "ple_storage" in part else part


def _with_table(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Qwen4's table of 8-bit floats times its scale. mlx-vlm does the same, but where experts have no scales
    any more it raises."""
    made = dict(weights)
    for name in weights:
        if name.endswith(_TABLE_SCALE):
            scale = made.pop(name).reshape(())
            for key in [key for key in made if key.startswith(f"{name.removesuffix('weight_scale')}shard_")]:
                made[key] = mx.from_fp8(made[key], dtype=mx.bfloat16) * scale
    return made


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
            hint=INSTALL_VISION,
            model_type=model_type,
        ) from error
    lent = {**_LENT, **_LENT_TO.get(name, {})}
    for module in (
        language,
        importlib.import_module(f"mlx_vlm.models.{_ALSO.get(name, f'{name}.language')}"),
    ):
        vars(module).update({one: lent[one] for one in lent.keys() & vars(module).keys()})
    return SimpleNamespace(**vars(config), language=language, Model=main.Model)


def _lazy(**further: Any) -> ModuleType:
    """`mlx.core` with three functions less. Nothing is launched: a stage's graph is built before its weights
    are read, and before its input arrives. And nothing is compiled for all shapes: `argpartition` goes by the
    first shape then, so that Hy4 chooses wrong keys of longer rows and reads behind the end of shorter
    ones."""
    module = ModuleType(mx.__name__)
    none = {name: lambda *_: None for name in ("async_eval", "eval")}
    vars(module).update(vars(mx), compile=lambda call, **_: mx.compile(call), **none)
    vars(module).update(further)
    return module


def _put_from_first(array: mx.array, indices: mx.array, values: mx.array, axis: int) -> mx.array:
    """As `mx.put_along_axis`, with no index below 0. Qwen4 marks blocks that no token chooses by -1, and MLX
    writes in front of a row of fewer tokens than a block."""
    return mx.put_along_axis(array, mx.maximum(indices, 0), values, axis=axis)


_LENT: Mapping[str, Any] = {
    "ArraysCache": States,
    "CacheList": CacheList,
    "HyV4KVCache": KVCache,
    "KVCache": KVCache,
    "PoolingCache": Pools,
    "RotatingKVCache": RotatingKVCache,
    "mx": _lazy(),
}
"""What a family's module finds in the place of its own imports."""

_LENT_TO: Mapping[str, Mapping[str, Any]] = {
    # The last of a layer's caches has keys and values of all heads, in the published GLM 5.3 Flash 64 KiB a
    # token beside 1 KiB of latents, from which they can be computed.
    "glm5_next": {"CacheList": lambda *parts: CacheList(*parts[:-1], Unfilled())},
    # A pass of a few tokens is one pass: by single tokens its windows dropped more than a note of them has.
    "deepseek_v4": {"PoolingCache": lambda ratio: Pools(ratio, overlaps=ratio == 4), "DECODE_BLOCK_SIZE": 1},
    "qwen4_exp": {"QSAKVCache": IndexedKVCache, "mx": _lazy(put_along_axis=_put_from_first)},
    "z1t": {"Z1TCache": RunningSums},
}
"""What other families do not get."""

_ALSO: Mapping[str, str] = {"hy_v4": "hy_v4.indexer", "qwen4_exp": "qwen3_5.gated_delta"}
"""A further module that a family's text side needs, which gets the same."""
