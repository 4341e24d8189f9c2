"""The head that some models ship to guess one token more: multi-token prediction (DeepSeek-V3,
arXiv:2412.19437, section 2.2).

It is two norms, a projection of a token's embedding and the hidden state before it, one layer of the model's
own kind, and a norm. Embedding and output head are the model's. mlx-lm drops its weights while it loads a
model. Here they are loaded as those of a model of one layer, by mlx-lm's own code for the architecture, so
that this code renames, stacks and converts them as it does the model's own layers. In the embedding's place
stands the projection. So no architecture's layer is written again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from sealring.mesh.errors import ModelError
from sealring.node.engine.caches import Cache

from .anatomy import full_cache
from .interception import Call, intercept_call
from .second_source import comes_first

_EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings")
_NORMS = ("norm", "norm_f")
_LAYERS = re.compile(r"(.+)\.layers\.0\.")
_CARRIED = "input_layernorm.weight"
"""The name under which a head's own norms pass through mlx-lm's conversion: one that it knows as a norm."""

_LENGTHS = (256, 512)
"""Tokens of two runs: whole blocks of mlx-lm's caches, which grow by 256."""

_ONE_LAYER = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""Settings of a model whose only layer is the head's, by the names that architectures have for them: one with
attention over all tokens and, in a mixture of experts, with experts."""


@dataclass(frozen=True)
class HeadNames:
    """How checkpoints of some architectures name the parts of the head. All names begin with `prefix`, in
    which `{layers}` is the number of the model's layers. The others are expressions for what follows.
    Whatever fits none of them is of the layer, or of several where `layers` comes before their numbers."""

    prefix: str
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    norm: str = r"shared_head\.norm"
    layers: str = ""
    shared: str = r"embed_tokens|shared_head\.head"
    """Copies of the model's own embedding and output head."""
    hidden_first: bool = False
    """Whether the projection takes the hidden state before the embedding."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the head's configuration, beside _ONE_LAYER."""
    copied: Mapping[str, str] = field(default_factory=dict)
    """Settings of the head's configuration that the model's has under other names."""

    def layer_name(self, rest: str) -> str:
        """The name in a model of the head alone, from its layers on, of a layer's parameter."""
        return rest if self.layers and rest.startswith(self.layers) else f"layers.0.{rest}"


_NEXT = HeadNames("model.layers.{layers}.")
_BLOCK = HeadNames(
    "mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
    layers="layers.",
    settings={"full_attention_interval": 1},
)
_NEMOTRON = HeadNames(
    "mtp.",
    embedding_norm=r"layers\.0\.enorm",
    hidden_norm=r"layers\.0\.hnorm",
    projection=r"layers\.0\.eh_proj",
    norm=r"layers\.\d+\.final_layernorm",
    layers="layers.",
    copied={"hybrid_override_pattern": "mtp_hybrid_override_pattern"},
)
_MIMO = HeadNames(
    "model.mtp_layers.0.",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    hidden_first=True,
)
_EXAONE = replace(_BLOCK, settings={"layer_types": ["full_attention"], "is_moe_layer": [False]})
_BAILING = replace(_NEXT, norm="final_layernorm", settings={"layer_group_size": 1})
FORMATS: dict[str, HeadNames] = {
    "bailing_hybrid": _BAILING,
    "deepseek_v3": _NEXT,
    "deepseek_v32": _NEXT,
    "exaone_moe": _EXAONE,
    "glm4_moe": _NEXT,
    "glm4_moe_lite": _NEXT,
    "glm_moe_dsa": _NEXT,
    "kimi_k2": _NEXT,
    "mimo": _MIMO,
    "nemotron_h": _NEMOTRON,
    "qwen3_5": _BLOCK,
    "qwen3_5_moe": _BLOCK,
    "qwen3_next": _BLOCK,
}
"""By model type."""


def format_of(config: Mapping[str, Any]) -> HeadNames | None:
    """How a model of this configuration names its head; None if none is known of this architecture."""
    return None if comes_first(config) else FORMATS.get(config.get("model_type", ""))


def has_head(config: Mapping[str, Any], names: set[str]) -> bool:
    """Whether there are weights of a head among those of these names."""
    found = format_of(config)
    return found is not None and any(name.startswith(_prefix(found, config)) for name in names)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _prefix(form: HeadNames, config: Mapping[str, Any]) -> str:
    return form.prefix.format(layers=_text(config)["num_hidden_layers"])


def one_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model whose only layer is the head's. Raises ModelError (NO_MTP_HEAD)."""
    form = format_of(config)
    if form is None:
        raise no_head(str(config.get("model_type")))
    text = _text(config)
    changed = {name: value for name, value in _ONE_LAYER.items() if name in text} | dict(form.settings)
    changed |= {name: text[own] for name, own in form.copied.items() if own in text}
    made = dict(config)
    if text is config:
        made |= changed
    else:
        made["text_config"] = dict(text) | changed
    for key in ("quantization", "quantization_config"):
        if isinstance(config.get(key), Mapping):
            made[key] = _settings_of_one(config[key], _prefix(form, config), form)
    return made


def _settings_of_one(settings: Mapping[str, Any], prefix: str, form: HeadNames) -> dict[str, Any]:
    """The settings of single parameters that are the head's, by their new names, and those of all."""
    found = {}
    for name, value in settings.items():
        if name.startswith(prefix):
            found[f"model.{form.layer_name(name.removeprefix(prefix))}"] = value
        elif "layers." not in name:
            found[name] = value
    return found


def classes_of_one(config: Mapping[str, Any], model: Any, arguments: Any) -> tuple[Any, Any]:
    """mlx-lm's classes of an architecture for a model whose only layer is the head's, as
    `mlx_lm.utils.load_model` takes them; `config` is that of the whole model."""
    form = format_of(config)
    if form is None:
        raise no_head(str(config.get("model_type")))
    known, prefix = form, _prefix(form, config)
    width = _text(config)["hidden_size"]
    eps = float(_text(config).get("rms_norm_eps") or _text(config).get("layer_norm_epsilon") or 1e-6)

    class OneLayer(model):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.fusion = _Fusion(width, eps, known.hidden_first)

        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return _sanitized(known, prefix, weights, getattr(super(), "sanitize", lambda same: same))

    return OneLayer, arguments


def classes_without(config: Mapping[str, Any], model: Any, arguments: Any) -> tuple[Any, Any]:
    """mlx-lm's classes of an architecture, which leave the head out also where a file is converted
    already."""
    form = format_of(config)
    if form is None:
        return model, arguments
    prefix = _prefix(form, config)

    class Whole(model):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            convert = getattr(super(), "sanitize", lambda same: same)
            found: dict[str, mx.array] = convert(
                {name: value for name, value in weights.items() if not name.startswith(prefix)}
            )
            return found

    return Whole, arguments


def _sanitized(
    form: HeadNames,
    prefix: str,
    weights: Mapping[str, mx.array],
    convert: Callable[[dict[str, mx.array]], dict[str, mx.array]],
) -> dict[str, mx.array]:
    """The head's weights as mlx-lm's code converts those of a first layer."""
    others = [name for name in weights if not name.startswith(prefix)]
    stem = next((match[1] for name in others if (match := _LAYERS.match(name))), "model")
    given: dict[str, mx.array] = {}
    for name in others:
        own = name.removeprefix(f"{stem}.")
        if "lm_head." in name or own.split(".")[0] in _EMBEDDINGS or "conv1d." in name:
            given[name] = weights[name]  # a convolution tells some code how the file was written
    norm = next((norm for norm in _NORMS if f"{stem}.{norm}.weight" in weights), _NORMS[0])
    parts = {
        form.embedding_norm: f"layers.0.fusion_embedding.{_CARRIED}",
        form.hidden_norm: f"layers.0.fusion_hidden.{_CARRIED}",
        form.projection: "layers.0.fusion_projection.",
        form.norm: f"{norm}.",
    }
    for name, value in weights.items():
        rest = name.removeprefix(prefix)
        if rest == name or re.match(form.shared, rest):
            continue
        for own, made in parts.items():
            if match := re.fullmatch(rf"(?:{own})\.(\w+)", rest):
                given[f"{stem}.{made}{match[1] if made.endswith('.') else ''}"] = value
                break
        else:
            given[f"{stem}.{form.layer_name(rest)}"] = value
    found = {}
    for name, value in convert(given).items():
        _, carried, own = name.partition(".0.fusion_")
        if carried:
            found[f"fusion.{own.replace(_CARRIED, 'weight')}"] = value
        elif "conv1d." not in name:
            found[name] = value
    return found


class _Fusion(nn.Module):  # type: ignore[misc]
    """What the head's layer gets, [rows, tokens, width], of the tokens' embeddings and hidden states."""

    def __init__(self, width: int, eps: float, hidden_first: bool) -> None:
        super().__init__()
        self.embedding = nn.RMSNorm(width, eps=eps)
        self.hidden = nn.RMSNorm(width, eps=eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self._hidden_first = hidden_first

    def __call__(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        both = [self.embedding(embedded), self.hidden(hidden.astype(embedded.dtype))]
        fused: mx.array = self.projection(mx.concatenate(both[::-1] if self._hidden_first else both, axis=-1))
        return fused


class _Fused(nn.Module):  # type: ignore[misc]
    """Stands in the embedding's place."""

    def __init__(self, embedding: Any, fusion: _Fusion) -> None:
        super().__init__()
        self.embedding = embedding
        self._fusion = fusion
        self.given: list[mx.array] = []

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._fusion(self.embedding(tokens), self.given.pop())

    def as_linear(self, hidden: mx.array) -> mx.array:
        made: mx.array = self.embedding.as_linear(hidden)
        return made


class MtpHead:
    """The head of one model. Not for use by several threads at a time."""

    def __init__(self, model: nn.Module, whole: nn.Module, *, shares: bool) -> None:
        """`model` is of `classes_of_one`, with lazy weights, and `whole` the one that it guesses for, which
        has the output head and the last norm, and the embedding too if the head `shares` it."""
        place, embedding = _embedding(model)
        own = {id(leaf) for _, leaf in tree_flatten(model.parameters())}
        if (output := _output(model)) is not None:
            own -= {id(leaf) for _, leaf in tree_flatten(_at(model, output).parameters())}
            _put(model, output, _at(whole, output))
        if shares:
            own -= {id(leaf) for _, leaf in tree_flatten(embedding.parameters())}
            embedding = _at(whole, place)
        self.kept = [leaf for _, leaf in tree_flatten(model.parameters()) if id(leaf) in own]
        """The arrays that the head needs besides those of the whole model."""
        self.width: int = model.fusion.embedding.weight.shape[0]
        self._model = model
        self._fused = _Fused(embedding, model.fusion)
        _put(model, place, self._fused)
        inside = place.rpartition(".")[0]
        outer = _at(model, inside)
        self._no_state: list[None] = []
        if hasattr(outer, "ssm_idx"):
            # the cache that makes a mask for recurrent states, of which there are none
            self._no_state, outer.ssm_idx = [None], len(full_cache(model))
        norm = next(name for name in _NORMS if name in outer)
        self.normed: Callable[[mx.array], mx.array] = _at(whole, inside)[norm]
        """What the whole model does with its last layer's output before its output head."""
        self._out: list[mx.array] = []
        intercept_call(outer[norm], self._note)
        self.kv_bytes_per_token = self._growth()
        """Bytes of its caches per token of a row, by two lazy runs."""

    @property
    def weight_bytes(self) -> int:
        """The bytes of `kept`."""
        return sum(array.nbytes for array in self.kept)

    def _note(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """The norm behind the layer."""
        output = original(*args, **kwargs)
        self._out.append(output)
        return output

    def make_cache(self) -> Cache:
        """Empty caches of one row."""
        return full_cache(self._model)

    def _growth(self) -> int:
        sizes = []
        for tokens in _LENGTHS:
            cache = self.make_cache()
            self(mx.zeros((1, tokens), mx.uint32), mx.zeros((1, tokens, self.width)), cache)
            sizes.append(sum(part.nbytes for part in cache))
        return int(max(0, sizes[1] - sizes[0]) // (_LENGTHS[1] - _LENGTHS[0]))

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: Cache) -> tuple[mx.array, mx.array]:
        """Logits [1, tokens, vocabulary] of the tokens behind these, uint32 [1, tokens], and the hidden
        states of the head, [1, tokens, width]; `hidden` are those that these tokens were sampled from. The
        cache takes the tokens in."""
        logits = self.fill(tokens, hidden, cache)
        return logits, self._out.pop()

    def fill(self, tokens: mx.array, hidden: mx.array, cache: Cache) -> mx.array:
        """Computes tokens where nothing is to be guessed; the logits are lazy, and not wanted."""
        self._fused.given.append(hidden)
        self._out.clear()
        logits: mx.array = self._model(tokens, cache=[*cache, *self._no_state])
        return logits


def _embedding(model: nn.Module) -> tuple[str, Any]:
    """The place of a model's embedding, and the module."""
    return next(
        (name, module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _EMBEDDINGS and hasattr(module, "as_linear")
    )


def keeps_embedding(model: nn.Module, kept: Sequence[mx.array]) -> bool:
    """Whether the embedding of a model is among the arrays that a stage of it keeps."""
    held = {id(array) for array in kept}
    return all(id(leaf) in held for _, leaf in tree_flatten(_embedding(model)[1].parameters()))


def _output(model: nn.Module) -> str | None:
    """The place of a model's output head, where it has one of its own."""
    return next((name for name, _ in model.named_modules() if name.rpartition(".")[2] == "lm_head"), None)


def _at(model: nn.Module, place: str) -> Any:
    found: Any = model
    for name in filter(None, place.split(".")):
        found = found[name]
    return found


def _put(model: nn.Module, place: str, module: nn.Module) -> None:
    outer, _, name = place.rpartition(".")
    _at(model, outer)[name] = module


def no_head(model_type: str) -> ModelError:
    """The error for a folder without a head's weights."""
    return ModelError(
        f"no MTP head in this folder of {model_type}",
        reason="NO_MTP_HEAD",
        hint="mlx_lm.convert leaves it out; the model's original folder has it",
    )
