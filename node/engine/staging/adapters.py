"""Small named adapters for architectures that the generic way of `anatomy` cannot split by itself.

An adapter is found by the name of the mlx-lm module that defines the model's layers, so a wrapper (a vision
model around a text model, say) uses that of its text model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import sparse_index, splicing, together
from .layout import Arguments, Place, get_argument, set_argument


@dataclass(frozen=True)
class Followed:
    """A skipped layer's cache after the keys and values that arrived for it were added."""

    fetched: tuple[Any, Any]
    """All keys and values so far, as the cache's `update_and_fetch` returns them."""
    offset: Any
    """The cache's offset before."""


@dataclass(frozen=True)
class Adapter:
    """How a model differs from a chain of layers `state = layer(state, mask, cache)`."""

    state: tuple[Place, ...] = ((0,),)
    """The layer arguments that are handed from stage to stage, except where one is None at a layer."""

    every_layer: tuple[Place, ...] = ()
    """Places of `state` whose values the head makes once for all layers."""

    per_layer: Place | None = None
    """A layer argument that the head makes from the tokens for each layer, handed on for all later layers."""

    mask: Place | None = None
    """The layer argument that is the mask, in models where images may be attended to in both directions."""

    batches: bool = True
    """Whether `check` has shown that a row has the same results in a batch as alone."""

    gpu_code: bool = False
    """Whether mlx-lm has code for it that only a GPU runs. No CPU has shown that this batches, so a stage is
    tried when it is loaded on a GPU (`node/engine/warm_up.py`)."""

    steps_alike: bool = True
    """Whether a pass of several tokens behind a full window computes what as many single steps do. Otherwise
    tokens would change with drafts."""

    masks_states: bool = False
    """Whether recurrent states and convolutions heed `lengths`: the first tokens of each row that count."""

    together: Callable[[nn.Module], None] | None = None
    """A change of the model that makes it batch; None if mlx-lm's code does."""

    splices: Callable[[nn.Module, splicing.Splice], None] = splicing.behind_embedding
    """A change of the model at a head that takes images."""

    needs: tuple[str, ...] = ()
    """Names in the model's module from which stages learn the state that crosses. Some are private, so
    another release of mlx-lm may lack them."""

    rounds: tuple[str, ...] = ()
    """Functions of that module that round an array to a few bits. Two runs that differ in the last digit may
    come out a step apart there, which a check would take for wrong."""

    @contextlib.contextmanager
    def unrounded(self, model: nn.Module) -> Iterator[None]:
        """Replaces the functions of `rounds` by functions that return their array."""
        module, own = _module_of(model), {name: getattr(_module_of(model), name) for name in self.rounds}
        try:
            for name in own:
                setattr(module, name, lambda array, *_, **__: array)
            yield
        finally:
            for name, function in own.items():
                setattr(module, name, function)

    def lacking(self, model: nn.Module) -> list[str]:
        """The names of `needs` that this mlx-lm lacks."""
        return [name for name in self.needs if not hasattr(_module_of(model), name)]

    def reads_tokens(self, layer: nn.Module) -> bool:
        """Whether a layer makes something of the tokens, which only the head has."""
        return False

    def donors(self, model: nn.Module) -> dict[int, int]:
        """The donor of each layer that reads keys and values from another layer's cache."""
        return {}

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        """The result of a skipped layer for these arguments."""
        return get_argument(arguments, self.state[0])

    def handed_on(self, model: nn.Module, layer: int, arguments: Arguments) -> list[Any]:
        """The state that crosses in front of a layer, from the layer's arguments: an array or None for each
        place of `state`."""
        return [get_argument(arguments, place) for place in self.state]

    def resume(
        self, model: nn.Module, layer: int, arguments: Arguments, arrived: dict[Place, mx.array]
    ) -> None:
        """Gives what arrived to the layer that a stage starts with, in the place of its own arguments."""
        for place, array in arrived.items():
            set_argument(arguments, place, array)


class _Afm7(Adapter):
    """The layers at the end read the cache of the last layer that has one."""

    def donors(self, model: nn.Module) -> dict[int, int]:
        own = len(model.model.layers)
        return dict.fromkeys(range(own, len(model.layers)), own - 1)


class _Gemma3n(Adapter):
    """An input per layer made from the tokens; the last layers read two earlier layers' caches."""

    def donors(self, model: nn.Module) -> dict[int, int]:
        caches = model.model.language_model.layer_idx_to_cache_idx
        return {layer: cache for layer, cache in enumerate(caches) if layer != cache}


class _Gemma4(Adapter):
    """An input per layer made from the tokens; the last layers get earlier ones' keys and values."""

    def donors(self, model: nn.Module) -> dict[int, int]:
        text = getattr(model, "language_model", model).model
        return {layer: donor for layer, donor in enumerate(text.previous_kvs) if layer != donor}

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        hidden = arguments[0][0]
        return (hidden, followed.fetched, followed.offset) if followed else (hidden, None, None)


class _Hunyuan(Adapter):
    """A layer hands the step's keys and values to the layers that have no projections of their own."""

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return arguments[0][0], arguments[0][3]


class _DeepseekV41(Adapter):
    """Streams with the weights that mix them, and a dict that some layers write and later ones read.

    The parts of the dict that cross are found by a function of mlx-lm's own pipeline. Its arrays grow with
    the row, so `sparse_index` makes them of as many numbers per token as there may be.
    """

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return tuple(arguments[0])

    def handed_on(self, model: nn.Module, layer: int, arguments: Arguments) -> list[Any]:
        streams, pre_mix = arguments[0]
        step = _index_step(model, layer, arguments)
        return [streams, pre_mix, *(step.to_wire(name) for name in sparse_index.SHARED)]

    def resume(
        self, model: nn.Module, layer: int, arguments: Arguments, arrived: dict[Place, mx.array]
    ) -> None:
        arguments[0][:] = [arrived.pop(place) for place in self.state[:2]]
        step = _index_step(model, layer, arguments)
        for (_, name), array in arrived.items():
            step.from_wire(str(name), array, arguments[1]["cache"])


def _index_step(model: nn.Module, layer: int, arguments: Arguments) -> sparse_index.Step:
    module, args = _module_of(model), model.args
    shape, shared = arguments[0][0].shape[:2], arguments[1]["shared"]
    one = isinstance(arguments[1]["start_pos"], int)
    starts = (arguments[1]["start_pos"],) * shape[0] if one else shared.starts
    crossing = module._crossing(args, layer)
    keys = {
        name: module._index_keys(args, crossing[name], max(starts) + shape[1])
        for name in crossing.keys() & {"topk_idx", "candidates"}
    }
    return sparse_index.Step(args, crossing, keys, starts, shared, shape)


def _module_of(model: nn.Module) -> ModuleType:
    """The module that defines the model."""
    return sys.modules[type(model).__module__]


class _KimiK3(Adapter):
    """Every few layers the state becomes a block, and every layer attends to all blocks so far."""

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return arguments[0][0], arguments[1]["blocks"]

    def resume(
        self, model: nn.Module, layer: int, arguments: Arguments, arrived: dict[Place, mx.array]
    ) -> None:
        arguments[0][0] = arrived[self.state[0]]
        for block in arrived.get(self.state[1], ()):
            arguments[1]["blocks"].append(block)  # which computes the block's norm as it did before


class _MuseSpark(Adapter):
    """A layer norms the next one's input: a stage norms its first layer's itself, as in mlx-lm's pipeline."""

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return arguments[0][0], None

    def resume(
        self, model: nn.Module, layer: int, arguments: Arguments, arrived: dict[Place, mx.array]
    ) -> None:
        super().resume(model, layer, arguments, arrived)
        norm = model.layers[layer].input_layernorm
        normed = _module_of(model).pre_norm(arguments[0][0], norm, dtype=norm.weight.dtype)
        arguments[1]["attn_input"] = normed


def _shares(model: nn.Module, layer: int) -> bool:
    """Whether the first layer from here on that chooses keys takes an earlier layer's choice."""
    found = (getattr(getattr(one, "self_attn", None), "skip_topk", None) for one in model.layers[layer:])
    return next((skips for skips in found if skips is not None), False)


class _Glm5Next(Adapter):
    """A layer returns the keys that an indexer chose too, and later layers attend to the same. In a batch
    these are slots, alike in all stages as long as no row takes the place of another (`Several.holds`)."""

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return get_argument(arguments, self.state[0]), get_argument(arguments, self.state[1])

    def handed_on(self, model: nn.Module, layer: int, arguments: Arguments) -> list[Any]:
        chosen = get_argument(arguments, self.state[1]) if _shares(model, layer) else None
        return [get_argument(arguments, self.state[0]), chosen]


class _SharedIndexer(_Glm5Next):
    """As above. There is no choice as long as there are no more keys than are chosen, so what crosses is as
    wide as a choice and of no meaning then."""

    def handed_on(self, model: nn.Module, layer: int, arguments: Arguments) -> list[Any]:
        hidden, chosen = super().handed_on(model, layer, arguments)
        if not _shares(model, layer):
            return [hidden, None]
        if chosen is None:
            chosen = mx.zeros((hidden.shape[0], 1, hidden.shape[1], model.args.whole.index_topk), mx.uint32)
        return [hidden, chosen.squeeze(1)]

    def resume(
        self, model: nn.Module, layer: int, arguments: Arguments, arrived: dict[Place, mx.array]
    ) -> None:
        hidden = arguments[0][0] = arrived[self.state[0]]
        if self.state[1] in arrived:
            cache = arguments[0][2][0]
            keys = getattr(cache, "_idx", cache.offset) + hidden.shape[1]
            chosen = arrived[self.state[1]][:, None]
            arguments[0][3] = chosen if keys > model.args.whole.index_topk else None


class _DeepseekV4(Adapter):
    """The first layers choose experts by a hash of the token."""

    def reads_tokens(self, layer: nn.Module) -> bool:
        return "tid2eid" in layer.ffn.gate


class _OwnPositions(Adapter):
    """Layers are given positions, which each stage makes itself by the tokens in its caches."""


class _Qwen4Exp(_OwnPositions):
    """A layer adds rows of a table of n-grams."""

    def reads_tokens(self, layer: nn.Module) -> bool:
        return "ple" in layer


class _Rwkv7(Adapter):
    """Every layer mixes in the first layer's values, which travel with the state."""

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        return arguments[0][0], arguments[0][1]


_PLAIN = """
    afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear cohere cohere2 dbrx
    deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4
    exaone_moe gear gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_neox gpt_oss
    gptj granite granitemoe helium hunyuan_v1_dense internlm2 internlm3 jamba Klear laguna lfm2
    lfm2_moe lille_130m llama llama4_text mamba mellum mimo mimo_v2_flash minicpm minicpm3 minimax
    ministral3 mistral4 mixtral nanbeige nanochat nemotron nemotron_nas olmo2 olmo3 olmoe openelm
    phi phi3 phimoe phixtral plamo qwen qwen2 qwen2_moe qwen3 qwen3_moe recurrent_gemma seed_oss
    spark2_5 stablelm starcoder2 step3p5 telechat3 youtu_llm
"""
_GPU_CODE = """
    bailing_moe_v3 falcon_h1 granitemoehybrid kimi_linear mamba2 nemotron_h olmo_hybrid plamo2
    qwen3_5 qwen3_next
"""
_MLX_VLM = "cohere2_moe flint k2_horizon kolibri1 molmo molmo2 moondream2 moondream3 xing4_0 youtu_vl"
ADAPTERS = {
    **{name: Adapter() for name in _PLAIN.split()},
    **{f"mlx_vlm.{name}": Adapter(gpu_code=True) for name in _MLX_VLM.split()},
    **{name: Adapter(gpu_code=True) for name in _GPU_CODE.split()},
    "afm7": _Afm7(batches=False),
    "deepseek_v41": _DeepseekV41(
        state=((0,), (1,), *(("shared", name) for name in sparse_index.SHARED)),
        together=together.deepseek_v41,
        needs=("_crossing", "_index_keys", "_collapse", "_apply_rope", "_fake_quant_fp4", "_fake_quant_fp8"),
        rounds=("_fake_quant_fp4", "_fake_quant_fp8"),
        gpu_code=True,
    ),
    "gemma3n": _Gemma3n(per_layer=(3,), splices=splicing.gemma3n),
    "gemma4_text": _Gemma4(per_layer=("per_layer_input",), mask=(1,), splices=splicing.gemma4),
    "hunyuan": _Hunyuan(state=((0,), (3, 0), (3, 1))),
    "kimi_k3": _KimiK3(state=((0,), ("blocks", "raw")), gpu_code=True),
    "llama4": Adapter(together=together.llama4),
    "longcat_flash": Adapter(together=together.longcat_flash),
    "minimax_m3_vl": Adapter(together=together.minimax_m3),
    "mlx_vlm.deepseek_v4": _DeepseekV4(together=together.deepseek_v4, gpu_code=True),
    "mlx_vlm.ernie4_5_moe_vl": _OwnPositions(gpu_code=True),
    "mlx_vlm.glm5_next": _Glm5Next(state=((0,), (3,)), gpu_code=True),
    "mlx_vlm.glm_moe_dsa": _SharedIndexer(state=((0,), (3,)), gpu_code=True),
    "mlx_vlm.hunyuan_vl": _OwnPositions(batches=False, gpu_code=True),
    "mlx_vlm.hy_v4": _SharedIndexer(state=((0,), (3,)), gpu_code=True),
    "mlx_vlm.qwen4_exp": _Qwen4Exp(together=together.qwen4_exp, gpu_code=True),
    "muse_glimmer": Adapter(splices=splicing.before_layers),
    "muse_spark": _MuseSpark(batches=False, needs=("pre_norm",)),
    "plamo3": Adapter(steps_alike=False),  # its mask shows a token more than its window holds in single steps
    "rwkv7": _Rwkv7(state=((0,), (1,)), gpu_code=True),
    "talkie": Adapter(state=((1,), (0,)), every_layer=((0,),)),  # every layer adds the embeddings, its first
}
_MASKS_STATES = "bailing_hybrid qwen3_5 qwen3_next"
ADAPTERS |= {name: replace(ADAPTERS[name], masks_states=True) for name in _MASKS_STATES.split()}
"""By the module that defines the layers, by `name_of`. `make sweep` has shown of each whether
rows are computed in a batch as they are alone."""

_UNCHECKED = Adapter(batches=False)
"""Its rows are computed one after the other, slower and right."""


def adapter_for(module: str) -> Adapter:
    """The adapter of the module that defines the layers."""
    return ADAPTERS.get(name_of(module), _UNCHECKED)


def name_of(module: str) -> str:
    """The name of a module that defines layers: `gemma3n` for `mlx_lm.models.gemma3n`, and `mlx_vlm.flint`
    for `mlx_vlm.models.flint.language`."""
    parts = module.replace("-", "_").split(".")
    return f"mlx_vlm.{parts[2]}" if parts[0] == "mlx_vlm" else parts[-1]
