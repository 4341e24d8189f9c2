"""Drafters that read hidden states of the model that they guess for: mlx-vlm's modules, with one face.

| kind | guesses | mlx-vlm's module |
|---|---|---|
| DFlash, DFlash2, DSpark | a block of tokens in one pass, by hidden states alone | `BlockDrafter` |
| EAGLE-3 | one token after another, mostly of a smaller vocabulary | `ChainDrafter` |

A drafter has the model's embedding and mostly its output head. It is to the tail what an MTP head is: each
token goes in with the hidden states that it was sampled from. Here these are the outputs of some layers of
the model, side by side.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

from sealring.mesh.errors import ModelError
from sealring.mesh.ring.composition import MAX_DRAFTS
from sealring.mesh.system.extras import INSTALL_VISION
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.caches import Cache
from sealring.node.engine.sampling import Sampler

_PACKAGES = ("mlx_vlm", "mlx_vlm.speculative", "mlx_vlm.speculative.drafters")
"""Each `__init__` imports what needs packages that are not installed."""

_LENGTHS = (256, 512)
"""Tokens of two runs: whole blocks of mlx-lm's caches, which grow by 256."""

_HINT = "take the drafter that was made for this model, of this size"

_PLAIN = (
    *("gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_moe", "qwen3_next"),
)

FAMILIES: Mapping[str, Sequence[str]] = {
    "DFlash": _PLAIN,
    "DFlash2": _PLAIN,
    "DSpark": _PLAIN,
    "EAGLE-3": _PLAIN,
    "DFlash for Gemma 4": ("gemma4", "gemma4_text"),
    "DFlash for Laguna": ("laguna",),
}
"""Model types that a drafter of a kind may guess for: a layer returns the state that mlx-vlm's modules read,
and these find the embedding."""

MODULES: Mapping[str, str] = {
    "qwen3_dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "qwen3_dspark": "DSpark",
    "eagle3": "EAGLE-3",
    "gemma4_dflash": "DFlash for Gemma 4",
    "laguna_dflash": "DFlash for Laguna",
}
"""Kinds of drafter by mlx-vlm's modules."""

_OTHERS = ("_dflash", "_dspark", "_assistant")
"""Ends of the names of further modules of drafters, for models that none of these guesses for."""


def kind_of(config: Mapping[str, Any]) -> str | None:
    """The kind of drafter that a folder with this configuration has, as `mlx_vlm.utils.get_model_type` tells
    them apart, or the module of a kind that guesses for no model here; None for what is no drafter."""
    module = str(config.get("model_type") or config.get("speculators_model_type") or "").lower()
    architectures, blocks = config.get("architectures") or (), config.get("dflash_config")
    if not module:
        return None
    if "DFlash2DraftModel" in architectures:
        module = "dflash2"
    elif "Gemma4DSparkModel" in architectures:
        module = "gemma4_dspark"
    elif isinstance(blocks, Mapping):
        rank = config.get("markov_rank") or blocks.get("markov_rank") or 0
        module = "dspark" if blocks.get("projector_type") == "dspark" or rank else f"{module}_dflash"
    return MODULES.get(module, module if module.endswith(_OTHERS) else None)


def classes_of(kind: str) -> tuple[Any, Any]:
    """mlx-vlm's classes of a drafter and its configuration. Raises ModelError (MODEL_NEEDS_PACKAGE)."""
    try:
        for package in _PACKAGES:
            mlx_lm_import.register(package)
        own = next(module for module, named in MODULES.items() if named == kind)
        module = importlib.import_module(f"{_PACKAGES[-1]}.{own}")
    except ImportError as error:
        raise ModelError(
            f"a drafter of kind {kind} needs mlx-vlm, which is not installed",
            reason="MODEL_NEEDS_PACKAGE",
            hint=INSTALL_VISION,
        ) from error
    return module.Model, module.ModelConfig


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter's configuration says of it and of the model that it guesses for. `layers` of that model
    are read, which rise; `block` tokens are guessed in one pass, 0: one after another. A `depth` of 0 says
    nothing of the number of the model's layers."""

    kind: str
    layers: tuple[int, ...]
    width: int
    words: int
    depth: int
    block: int

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> DrafterFacts:
        """By the configuration of the folder `name`. Raises ModelError (also DRAFT_KIND_UNKNOWN)."""
        kind = kind_of(config) or "no drafter"
        if kind not in FAMILIES:
            raise ModelError(
                f"{name} is {kind}, and no drafter of a known kind: {', '.join(FAMILIES)}",
                reason="DRAFT_KIND_UNKNOWN",
                hint="take a drafter of one of these kinds, or a small model of the same family",
            )
        try:
            made = classes_of(kind)[1].from_dict(dict(config))
            if kind == "EAGLE-3":
                text = made.transformer_layer_config
                layers = tuple(sorted(map(int, made.capture_layer_ids)))
                return cls(kind, layers, int(made.target_hidden_size), int(text.vocab_size), 0, 0)
            most = min(int(made.block_size), int(getattr(made, "runtime_block_size", 0) or made.block_size))
            asked = config.get("dflash_config") or {}
            told = asked.get("num_target_layers", config.get("num_target_layers", 0))
            layers = tuple(sorted(map(int, made.target_layer_ids)))
            if not 0 <= int(made.mask_token_id) < int(made.vocab_size):  # MLX would read behind the embedding
                raise ValueError(f"mask_token_id is {made.mask_token_id}")
            size = made.hidden_size, made.vocab_size, told, min(MAX_DRAFTS, max(1, most - 1))
            return cls(kind, layers, *map(int, size))
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ModelError(
                f"the configuration of the drafter {name} is not usable: {error}"[:300],
                reason="CONFIG_INVALID",
                hint=_HINT,
            ) from error

    def check(self, name: str, model: str, config: Mapping[str, Any]) -> None:
        """Raises ModelError (DRAFT_NOT_ALIKE) unless this drafter, `name`, was made for a model like `model`,
        which has this configuration."""
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        family = str(config.get("model_type"))
        facts = {
            "hidden size": (self.width, text.get("hidden_size")),
            "vocabulary": (self.words, text.get("vocab_size")),
            "number of layers": (self.depth or text.get("num_hidden_layers"), text.get("num_hidden_layers")),
        }
        wrong = [f"a {what} of {own}, not {other}" for what, (own, other) in facts.items() if own != other]
        if family not in FAMILIES[self.kind]:
            wrong = [f"models of the families {', '.join(sorted(FAMILIES[self.kind]))}, not {family}"]
        if wrong:
            raise ModelError(
                f"the {self.kind} drafter {name} does not fit {model}: it is for {'; '.join(wrong)}",
                reason="DRAFT_NOT_ALIKE",
                hint=_HINT,
            )


class DrafterModel:
    """One drafter, bound to the model that it guesses for. Not for use by several threads at a time."""

    def __init__(self, model: Any, facts: DrafterFacts, tail: nn.Module, embeds: nn.Module) -> None:
        """`model` is mlx-vlm's, with lazy weights. `tail` is the model's last stage, with its output head,
        and `embeds` has its embedding, whose arrays are lazy too where the tail has none."""
        self.facts, self._model = facts, model
        self.width = facts.width * len(facts.layers)
        self._bind(tail, embeds)
        self.kv_bytes_per_token = self._growth()
        """Bytes of its caches per token of a row, by two lazy runs."""
        there = {id(leaf) for _, leaf in tree_flatten(tail.parameters())}
        made = [*(leaf for _, leaf in tree_flatten(model.parameters())), *self._made()]
        self.kept = [leaf for leaf in made if id(leaf) not in there]
        """The arrays that the drafter needs besides those of the tail."""

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the model's embedding that the drafter reads, of a model whose output head is another
        matrix: its tail has none of its own."""
        return 0

    def _bind(self, tail: nn.Module, embeds: nn.Module) -> None:
        raise NotImplementedError

    def _made(self) -> list[mx.array]:
        """Arrays that the module has made of its weights, and keeps."""
        return []

    @property
    def weight_bytes(self) -> int:
        """The bytes of `kept`."""
        return sum(array.nbytes for array in self.kept)

    def make_cache(self) -> Cache:
        """Empty caches of one row."""
        raise NotImplementedError

    def fill(self, tokens: mx.array, hidden: mx.array, cache: Cache) -> mx.array:
        """Computes tokens, uint32 [1, tokens], with the hidden states [1, tokens, width] that they were
        sampled from, where nothing is to be guessed. What it returns is lazy, and not wanted."""
        raise NotImplementedError

    def guess(
        self, tokens: mx.array, hidden: mx.array, cache: Cache, count: int, sampler: Sampler
    ) -> mx.array:
        """Computes tokens as `fill` does, and guesses `count` ones behind them, uint32 [count]."""
        raise NotImplementedError

    def _growth(self) -> int:
        sizes = []
        for tokens in _LENGTHS:
            cache = self.make_cache()
            self.fill(mx.zeros((1, tokens), mx.uint32), mx.zeros((1, tokens, self.width)), cache)
            sizes.append(sum(part.nbytes for part in cache))
        return int(max(0, sizes[1] - sizes[0]) // (_LENGTHS[1] - _LENGTHS[0]))


class BlockDrafter(DrafterModel):
    """Guesses a block of tokens in one pass. Its caches hold keys and values of hidden states alone."""

    def _bind(self, tail: nn.Module, embeds: nn.Module) -> None:
        bind = classes_of("DFlash")[0].bind  # the others' look for mlx-vlm's own classes of models
        bind(self._model, tail)
        output, self._model.embed_tokens = self._model.lm_head, None
        bind(self._model, embeds)
        self._model.lm_head = output

    @property
    def embedding_bytes(self) -> int:
        if not isinstance(self._model.lm_head, nn.Module):
            return 0
        return sum(leaf.nbytes for _, leaf in tree_flatten(self._model.embed_tokens.parameters()))

    def _made(self) -> list[mx.array]:
        fused = getattr(self._model, "_fused_context_kv_weight", None)
        return [] if fused is None else [fused]

    def make_cache(self) -> Cache:
        config = self._model.config
        window = getattr(config, "draft_window_size", None)
        return [
            RotatingKVCache(max_size=int(window or config.sliding_window - 1), keep=0)
            if window or kind == "sliding_attention"
            else KVCache()
            for kind in config.layer_types
        ]

    def fill(self, tokens: mx.array, hidden: mx.array, cache: Cache) -> mx.array:
        filled: mx.array = self._model._hidden(tokens[:, -1:], hidden, cache)
        return filled

    def guess(
        self, tokens: mx.array, hidden: mx.array, cache: Cache, count: int, sampler: Sampler
    ) -> mx.array:
        def each(logits: mx.array) -> mx.array:
            if logits.ndim < 3:
                return sampler(logits)
            return mx.stack([sampler(logits[:, place]) for place in range(logits.shape[1])], axis=1)

        block = self._model.draft_block(tokens[:, -1], hidden, cache, 1 + count, each, mx.uint32)
        guessed: mx.array = block[0].astype(mx.uint32)
        return guessed


class ChainDrafter(DrafterModel):
    """Guesses one token after another, each by its own state of the one before."""

    def _bind(self, tail: nn.Module, embeds: nn.Module) -> None:
        model = self._model
        model.bind(embeds)
        self._ids = None
        if model.d2t is not None:  # of the folder: MLX would write behind the logits
            self._ids = mx.clip(mx.arange(model.draft_vocab_size) + model.d2t, 0, self.facts.words - 1)

    def make_cache(self) -> Cache:
        return [KVCache() for _ in self._model.layers]

    def fill(self, tokens: mx.array, hidden: mx.array, cache: Cache) -> mx.array:
        self._model._cache, self._model._next_position = cache, 1 + cache[0].offset
        filled: mx.array = self._model._forward_tokens(tokens, hidden, mx.uint32)
        return filled

    def guess(
        self, tokens: mx.array, hidden: mx.array, cache: Cache, count: int, sampler: Sampler
    ) -> mx.array:
        guesses: list[mx.array] = []
        for _ in range(count):
            hidden = self.fill(tokens, hidden, cache)[:, -1:]
            guesses.append(sampler(self._logits(hidden)[:, -1]).astype(mx.uint32))
            tokens = guesses[-1][None]
        for part in cache:
            part.trim(count - 1)
        return mx.concatenate(guesses)

    def _logits(self, hidden: mx.array) -> mx.array:
        """Logits of the model's vocabulary; tokens that the drafter has not are never guessed."""
        logits: mx.array = self._model._logits(hidden)
        if self._ids is None:
            return logits
        full = mx.full((*logits.shape[:-1], self.facts.words), -mx.inf, logits.dtype)
        full[..., self._ids] = logits
        return full


def bound(model: Any, facts: DrafterFacts, tail: nn.Module, embeds: nn.Module) -> DrafterModel:
    """A drafter's model behind a tail, as DrafterModel takes them."""
    made: Callable[..., DrafterModel] = BlockDrafter if facts.block else ChainDrafter
    return made(model, facts, tail, embeds)
