"""Architectures whose stages are not a plain chain of layers with one kind of cache; and, as a sweep, all."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from small_models import tiny
from stagering import combinations

from sealring.mesh.errors import ModelError
from sealring.node.engine.caches import OneRow
from sealring.node.engine.check import check
from sealring.node.engine.folder import load
from sealring.node.engine.profile import profile
from sealring.node.engine.staging import build_skeleton, random_stage
from sealring.node.engine.staging.adapters import ADAPTERS, adapter_for, name_of
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.interception import intercept_call
from sealring.v1 import engine_pb2 as engine

DATA = Path(__file__).parents[2] / "data"
MORE: dict[str, dict[str, Any]] = json.loads((DATA / "archs-more.json").read_bytes())
ALL: dict[str, dict[str, Any]] = json.loads((DATA / "archs.json").read_bytes()) | MORE

CACHES_DIFFER = ["minimax_m3_vl", "minimax_m3_vl:dense-first", "nemotron-nas", "nemotron-nas:first-noop"]
"""Some stages have no layer with the cache from which the model makes its mask."""

CRASHES = {"phi3small", "phi3small:dense"}
"""mlx itself dies of them on a CPU."""

REFUSED = {
    "bitnet": "MODEL_NOT_RUNNABLE",  # a kernel for Metal
    "muse_spark": "MODEL_NOT_RUNNABLE",
    "iquestloopcoder": "ARCHITECTURE_NOT_STAGEABLE",
    "nanbeige:loops": "ARCHITECTURE_NOT_STAGEABLE",
    "olmo": "MODEL_NEEDS_PACKAGE",
    "olmo:tied": "MODEL_NEEDS_PACKAGE",
}


LACKS = (
    "only supports float32",
    "FusedLinear.to_quantized()",
    "Last dimension of first input with shape (1,2,128)",
    "Hadamard packs require 2-bit",
)
"""Types and packs that MLX or mlx-lm lacks.

MLX on a CPU has no mixtures of experts of another type. The library itself has no AFM 7 in few bits, no tied
head of Seed-OSS in few bits (it multiplies by the packed words), and no Hadamard packs in other bits than 2.
"""

_REFUSED = ("MODEL_NOT_RUNNABLE", "BAD_MODEL_CONFIG")

SPLIT = sorted(ALL.keys() - REFUSED.keys() - CRASHES - {"iquestloopcoder"})


@pytest.mark.parametrize(
    ("key", "stages"),
    combinations(CACHES_DIFFER, [2, 3], always=[("minimax_m3_vl:dense-first", 3), ("nemotron-nas", 3)]),
)
def test_masks_hold_where_the_cache_that_they_are_made_from_is_elsewhere(key: str, stages: int) -> None:
    assert check(tiny(MORE[key], key), stages=stages, rows=3).right


@pytest.mark.parametrize("key", [key for key in MORE if key not in CACHES_DIFFER and key not in CRASHES])
@pytest.mark.sweep
def test_every_one_of_these_is_right_or_refused(key: str) -> None:
    if key in REFUSED:
        with pytest.raises(ModelError) as caught:
            check(MORE[key], stages=3, rows=3, seed=2)
        assert caught.value.reason == REFUSED[key]
        return
    assert check(MORE[key], stages=3, rows=3, seed=2).right


FOUR_BITS = {"group_size": 32, "bits": 4}
FIRST_LAYER_FINER = {
    f"model.layers.0.self_attn.{name}_proj": {"bits": 8, "group_size": 32} for name in "qkvo"
}
QUANTIZED = {
    "4 bits": FOUR_BITS,
    "8 bits": FOUR_BITS | {"bits": 8},
    "mixed bits": FOUR_BITS | FIRST_LAYER_FINER,
    "mxfp4": FOUR_BITS | {"mode": "mxfp4"},
}


@pytest.mark.parametrize("key", SPLIT)
@pytest.mark.sweep
def test_other_stages_and_weights_are_as_right(key: str) -> None:
    """Uneven stages, one layer to a stage, quantized weights, bfloat16 where MLX has it on a CPU."""
    config = tiny(ALL[key], key)
    layers = len(build_skeleton(config).layers)
    most = max(1, layers - 2)
    variations: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "uneven": (config, {"splits": [1, most, layers - 1 - most] if layers > 2 else [1] * layers}),
        "one layer each": (config, {"splits": [1] * layers}),
        "bfloat16": (config, {"stages": 2, "dtype": mx.bfloat16}),
    }
    for name, how in QUANTIZED.items():
        variations[name] = (config | {"quantization": how}, {"stages": 2})
    wrong = []
    for name, (varied, options) in variations.items():
        try:
            right = check(varied, rows=3, seed=4, **options).right
        except ModelError as error:
            right = error.reason in _REFUSED and any(why in error.message for why in LACKS)
        if not right:
            wrong.append(name)
    assert wrong == []


@pytest.mark.sweep
def test_nothing_is_called_batching_that_no_configuration_here_has() -> None:
    shown = set()
    for key in ALL.keys() - REFUSED.keys() - CRASHES:
        shown.add(name_of(type(build_skeleton(ALL[key]).layers[0]).__module__))
    assert shown >= {name for name, adapter in ADAPTERS.items() if adapter.batches}


def test_rows_of_an_architecture_that_nobody_has_checked_run_in_turn(llama: dict[str, Any]) -> None:
    assert not adapter_for("mlx_lm.models.unheard_of").batches
    unchecked = tiny(ALL["iquestloopcoder"], "iquestloopcoder")
    assert isinstance(random_stage(unchecked, 0, 3, seed=0).make_cache(), OneRow)
    assert not isinstance(random_stage(llama, 0, 2, seed=0).make_cache(), OneRow)


WRITTEN_FOR_ONE = ["llama4", "longcat_flash_ngram", "minimax_m3_vl:all-sparse"]


@pytest.mark.parametrize("key", WRITTEN_FOR_ONE)
def test_rows_are_together_where_mlx_lm_is_written_for_one(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sealring.node.engine.caches.chunked._SPARE", 2)
    config = tiny(ALL[key], key)
    if key == "llama4":  # it scales queries anew after some tokens
        config["text_config"] |= {"floor_scale": 3, "attention_chunk_size": 5}
    assert not isinstance(random_stage(config, 0, 2, seed=0).make_cache(), OneRow)
    # one layer each, and a stage of Llama 4 has the chunks of others only to count by
    splits = [1] * len(build_skeleton(config).layers) if key == "llama4" else None
    report = check(config, splits=splits, rows=4)
    assert report.right
    assert report.tokens_compared >= 30


def test_a_batch_that_changes_an_answer_is_not_called_right(
    llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sealring.node.engine.staging.anatomy.adapter_for",
        lambda module: type(adapter_for(module))(batches=True),
    )
    for config, right in ((llama, True), (MORE["minimax_m3_vl:all-sparse"], False)):
        report = check(config, stages=2, rows=3)
        assert report.exact
        assert report.tokens_equal
        assert report.right == report.alone_equal == right


def test_caches_that_no_layer_fills_are_known_and_cost_nothing(
    model_folder: Callable[..., Path],
) -> None:
    config = MORE["nemotron-nas"]
    linear = [block["attention"].get("replace_with_linear", False) for block in config["block_configs"]]
    anatomy = dissect(build_skeleton(config), "nemotron-nas")
    assert [anatomy.owners[index] for index in anatomy.idle] == [(linear.index(True),)]
    measured = profile(model_folder(config, dtype=mx.float16))
    used = [not block["attention"].get("no_op", False) for block in config["block_configs"]]
    wanted = [here and not idle for here, idle in zip(used, linear, strict=True)]
    assert [size > 0 for size in measured["kv_bytes_per_token"]] == wanted


def test_what_mlx_cannot_compute_here_is_no_fault_of_ours(
    archs: dict[str, dict[str, Any]], model_folder: Callable[..., Path]
) -> None:
    """On a CPU, mixtures of experts are for float32 only."""
    path = model_folder(archs["mixtral"], dtype=mx.bfloat16)
    with pytest.raises(ModelError) as caught:
        check(path)
    assert caught.value.reason == "MODEL_NOT_RUNNABLE"
    assert "float32" in caught.value.message
    with pytest.raises(ModelError) as caught:
        load(engine.LoadStage(path=str(path), lo=1, hi=2, context=64), lambda event: None)
    assert caught.value.reason == "MODEL_NOT_RUNNABLE"


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ModelError) as caught:
        build_skeleton(MORE["olmo"])
    assert caught.value.reason == "MODEL_NEEDS_PACKAGE"
    assert "ai2-olmo" in caught.value.hint


HOOKED = ["deepseek_v41", "deepseek_v41:candidates", "kimi_k3"]
"""Their layers share more than a state, some of it in an object that they change."""

CANDIDATES = tiny(MORE["deepseek_v41"], "deepseek_v41") | {
    "num_hidden_layers": 6,
    "compress_ratios": [1, 2, 2, 2, 2, 0],
    "kv_source_layer_ids": [0, 1, 3],
    "index_source_layer_ids": [0, 1, 2, 3, 5],
    "candidate_source_layer_id": 1,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "index_topk": 3,
}


@pytest.mark.parametrize("key", [pytest.param(HOOKED[0], marks=pytest.mark.sweep), *HOOKED[1:]])
def test_one_layer_to_a_stage_gets_all_that_it_reads(key: str) -> None:
    config = CANDIDATES if key.endswith("candidates") else tiny(MORE[key], key)
    report = check(config, splits=[1] * len(build_skeleton(config).layers), rows=2, seed=3)
    assert report.right
    assert report.alone_tokens_equal


@pytest.mark.sweep
@pytest.mark.parametrize("config", [MORE["deepseek_v41"], CANDIDATES], ids=["plain", "candidates"])
@pytest.mark.parametrize("stages", [2, 3])
def test_rows_of_deepseek_v41_share_steps_and_get_what_they_get_alone(
    config: dict[str, Any], stages: int
) -> None:
    """Groups of tokens end at different steps, windows are full or not, one row has a prompt of one token."""
    report = check(config, stages=stages, rows=5)
    assert report.right
    assert report.alone_tokens_equal


def test_a_model_that_rounds_to_four_bits_may_round_a_last_digit_up() -> None:
    """With this seed a row in a batch is a step of FP4 away from the row alone, on the CPU of a test."""
    assert not isinstance(random_stage(CANDIDATES, 0, 2, seed=0).make_cache(), OneRow)
    report = check(CANDIDATES, stages=2, rows=5, seed=9)
    assert report.right
    assert report.alone_tokens_equal


def test_without_the_names_by_which_it_splits_it_is_served_whole_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(importlib.import_module("mlx_lm.models.deepseek_v41"), "_index_keys")
    config = MORE["deepseek_v41"]
    assert len(dissect(build_skeleton(config), "deepseek_v41").layers) == 6
    with pytest.raises(ModelError, match="no _index_keys in mlx_lm") as caught:
        random_stage(config, 0, 3, seed=0)
    assert caught.value.reason == "ARCHITECTURE_NOT_STAGEABLE"


def test_a_model_that_answers_with_tokens_it_has_no_embeddings_of_is_refused() -> None:
    """MLX looks them up behind the end of the array, in whatever memory that is."""
    config = MORE["molmo"]
    text = config["text_config"]
    assert dissect(build_skeleton(config), "molmo").logits.tail == (120,)
    config = config | {"text_config": text | {"vocab_size": 121}}
    with pytest.raises(ModelError, match="answers with 121 tokens and has embeddings of 120") as caught:
        dissect(build_skeleton(config), "molmo")
    assert caught.value.reason == "BAD_MODEL_CONFIG"


def test_other_tables_of_a_model_are_not_taken_for_its_embeddings() -> None:
    """Z1T has an array of 256 positions beside them."""
    z1t = dissect(build_skeleton(MORE["z1t"] | {"vocab_size": 300}), "z1t")
    assert z1t.logits.tail == (300,)


def test_a_stage_norms_what_the_layer_before_it_would_have_normed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muse Spark has kernels for Metal only; here they are what they fuse, as far as the check can tell."""
    module = importlib.import_module("mlx_lm.models.muse_spark")

    def heads(qkvg: mx.array, n_heads: int, n_kv_heads: int, head_dim: int, **_: Any) -> list[mx.array]:
        wide = n_heads * head_dim
        parts = qkvg[..., :wide], qkvg[..., wide : wide + n_kv_heads * head_dim]
        return [part.reshape(*part.shape[:2], -1, head_dim) for part in parts]

    def pre_norm(stream: mx.array, norm: nn.RMSNorm, *, dtype: mx.Dtype) -> mx.array:
        return mx.fast.rms_norm(stream, norm.weight, norm.eps).astype(dtype)

    def norm_add_norm(
        x: mx.array, stream: mx.array, *, next_norm: Any, **_: Any
    ) -> tuple[mx.array, mx.array | None]:
        stream = stream + x.astype(stream.dtype)
        return stream, None if next_norm is None else pre_norm(
            stream, next_norm, dtype=next_norm.weight.dtype
        )

    def expert_routing(logits: mx.array, _: mx.array, *, top_k: int, **__: Any) -> tuple[mx.array, mx.array]:
        chosen = mx.argsort(-logits, axis=-1)[..., :top_k]
        return chosen, mx.take_along_axis(logits, chosen, axis=-1)

    fused = {
        "qk_norm": heads,
        "qk_norm_rope": heads,
        "rms_norm_sigmoid_gate": lambda out, gate, **_: out.transpose(0, 2, 1, 3).reshape(gate.shape) * gate,
        "pre_norm": pre_norm,
        "norm_add_norm": norm_add_norm,
        "expert_routing": expert_routing,
        "post_expert_norm_combine": lambda h, weights, **_: (h * weights[..., None]).sum(axis=-2),
    }
    for name, function in fused.items():
        monkeypatch.setattr(module, name, function)
    assert check(MORE["muse_spark"], splits=[1, 1, 1, 1], rows=2).right


class Pair(nn.Module):  # type: ignore[misc]
    """A layer that does more than return its state."""

    def __init__(self, layer: nn.Module, does: str) -> None:
        super().__init__()
        self._layer, self._does, self.use_sliding = [layer], does, False

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, noted: Any = None) -> Any:
        state = self._layer[0](x, mask, cache=cache)
        if self._does == "changes":
            noted["last"] = state
        return (state, x) if self._does == "returns" else state


@pytest.mark.parametrize(
    ("does", "said"),
    [("returns", "layer 1 returns 2 values"), ("changes", "layer 1 changes its argument noted")],
)
def test_a_layer_that_does_more_than_return_its_state_is_named(
    llama: dict[str, Any], does: str, said: str
) -> None:
    model = build_skeleton(llama)
    inner, noted = model.model, {}

    def call(_: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> Any:
        state = inner.embed_tokens(inputs)
        for layer, own in zip(inner.layers, cache, strict=True):
            result = (
                layer(state, cache=own, noted=noted) if isinstance(layer, Pair) else layer(state, cache=own)
            )
            state = result[0] if isinstance(result, tuple) else result
        return inner.norm(state)

    intercept_call(inner, call)
    inner.layers[1] = Pair(inner.layers[1], does)
    anatomy = dissect(model, "llama")
    assert said in anatomy.indivisible


def test_code_that_only_a_gpu_runs_is_tried_on_one() -> None:
    """In this release of mlx-lm: modules with kernels of their own, and those that use these."""
    sources = {path.stem.replace("-", "_"): path.read_text() for path in _models().glob("*.py")}
    kernels = {name for name, text in sources.items() if "metal_kernel(" in text}
    using = {
        name
        for name, text in sources.items()
        if re.search(rf"^from (?:\.|mlx_lm\.models\.)(?:{'|'.join(kernels)}) import", text, re.MULTILINE)
    }
    batching = {name for name in kernels | using if adapter_for(name).batches and name in sources}
    layered = {name for name in batching if "class Model(" in sources[name]}
    assert {name for name in layered if not adapter_for(name).gpu_code} == set()


def _models() -> Path:
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin
    return Path(spec.origin).parent / "models"
