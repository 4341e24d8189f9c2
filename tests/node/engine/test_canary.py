"""Damaged weights and wrong kernels are found when a stage is loaded, and right ones are not refused."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import structlog
from scriptedmodel import Scene, Step, write_scripted
from trained import write_adapter

from sealring.mesh.errors import ModelError
from sealring.node.engine import canary, load_stage, relaying
from sealring.node.engine.canary import ROUNDINGS, check_stage, differs
from sealring.node.engine.folder import load
from sealring.v1 import engine_pb2

Folder = Callable[..., Path]
MORE = json.loads((Path(__file__).parents[2] / "data/archs-more.json").read_bytes())
NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
MXFP4, MXFP8 = ({"group_size": 32, "bits": bits, "mode": f"mxfp{bits}"} for bits in (4, 8))
QUANTIZED = [
    *({"group_size": 32, "bits": bits} for bits in (2, 3, 4, 5, 6, 8)),
    *(NVFP4, MXFP4, MXFP8),
]


def refused(stage: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check_stage(stage, "model")
    return caught.value


@pytest.mark.parametrize("quantization", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_weights_of_each_type_and_mode_are_right(
    quantization: dict[str, Any] | None, dtype: mx.Dtype, llama: dict[str, Any], model_folder: Folder
) -> None:
    config = llama | ({"quantization": quantization} if quantization else {})
    check_stage(load_stage(model_folder(config, dtype=dtype), 0, 2), "model")


@pytest.mark.parametrize(
    "key", ["mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "gemma3n", "mamba2", "apertus"]
)
def test_other_kinds_of_layers_are_right(
    key: str, archs: dict[str, dict[str, Any]], model_folder: Folder
) -> None:
    check_stage(load_stage(model_folder(archs[key] | {"vocab_size": 200}), 1, 3), "model")


@pytest.mark.parametrize("sees", [False, True])
def test_the_models_that_follow_a_script_are_right(sees: bool, tmp_path: Path) -> None:
    """Programs are tried with them by `make clients` alone."""
    write_scripted(tmp_path, [Scene("draw", "read", [Step("Here is the plan.")])], sees=sees)
    check_stage(load_stage(tmp_path, 0, 1), "model")


def test_a_tuned_model_is_right(llama: dict[str, Any], model_folder: Folder) -> None:
    model = model_folder(llama | {"quantization": QUANTIZED[2]})
    write_adapter(model, model)
    check_stage(load_stage(model, 0, 3), "model")


def flipped(array: mx.array, at: int, bit: int) -> mx.array:
    """An array with one bit of a number changed."""
    whole = {2: np.uint16, 4: np.uint32}[array.dtype.size]
    numbers = np.array(mx.contiguous(array).view(mx.uint16 if array.dtype.size == 2 else mx.uint32)).reshape(
        -1
    )
    numbers = numbers.astype(whole).copy()
    numbers[at] ^= whole(1 << bit)
    return mx.array(numbers).view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(mx.float32, (27, 30)), (mx.bfloat16, (11, 14)), (mx.float16, (14, 14))]
)
@pytest.mark.parametrize("where", ["weight", "scales", "norm"])
def test_a_flipped_bit_of_an_exponent_is_found(
    where: str, dtype: mx.Dtype, bits: tuple[int, int], llama: dict[str, Any], model_folder: Folder
) -> None:
    quantization = {"quantization": QUANTIZED[2]} if where == "scales" else {}
    folder = model_folder(llama | {"hidden_size": 64} | quantization, dtype=dtype)
    for bit in range(bits[0], bits[1] + 1):
        weights = mx.load(str(folder / "model.safetensors"))
        mx.eval(weights)
        norm = where == "norm"
        name = f"model.layers.1.{'input_layernorm.weight' if norm else f'mlp.up_proj.{where}'}"
        numbers = np.abs(np.array(weights[name].astype(mx.float32))).reshape(-1)
        at = int(np.argsort(numbers)[len(numbers) // 2])
        damaged = flipped(weights[name], at, bit)
        if float(mx.abs(damaged.astype(mx.float32)).max()) < 60_000 * float(numbers[at]):
            continue  # the bit was set, and the weight is next to nothing now
        mx.save_safetensors(str(folder / "model.safetensors"), weights | {name: damaged})
        error = refused(load_stage(folder, 0, 2))
        assert error.reason == "WEIGHTS_DAMAGED"
        assert name in error.message
        mx.save_safetensors(str(folder / "model.safetensors"), weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_found_and_only_where_it_is_loaded(
    value: float, llama: dict[str, Any], model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(llama)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights["model.layers.3.mlp.down_proj.weight"][31, 63] = value
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    check_stage(load_stage(folder, 0, 3), "model")
    assert "no number" in refused(load_stage(folder, 3, 5)).message
    monkeypatch.setattr(canary, "_BLOCK", 100)
    assert "no number" in refused(load_stage(folder, 3, 5)).message


def test_all_of_a_small_stage_is_looked_at_and_blocks_of_a_large_one(
    llama: dict[str, Any], model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged weight is found in each block that is looked at."""
    folder = model_folder(llama)
    monkeypatch.setattr(canary, "_BLOCK", 256)
    file = str(folder / "model.safetensors")
    weights, name = mx.load(file), "model.layers.1.mlp.up_proj.weight"
    mx.eval(weights)

    def found() -> int:
        rows = 0
        for row in range(0, 64, 8):
            damaged = mx.array(weights[name])
            damaged[row + 1, 3] = float("nan")
            mx.save_safetensors(file, weights | {name: damaged})
            with contextlib.suppress(ModelError):
                check_stage(load_stage(folder, 0, 2), "model")
                continue
            rows += 1
        return rows

    assert found() == 8
    whole = sum(array.size for array in load_stage(folder, 0, 2).kept)
    monkeypatch.setattr(canary, "_MOST", (whole // 4, whole // 4))
    assert 1 <= found() <= 4  # rows that are multiplied by are looked at, too


@pytest.mark.parametrize("quantization", [None, QUANTIZED[2], MXFP8], ids=str)
@pytest.mark.parametrize("wrong", ["one row", "a tenth", "few tokens", "many tokens"])
def test_a_wrong_kernel_is_found(
    wrong: str,
    quantization: dict[str, Any] | None,
    llama: dict[str, Any],
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = llama | ({"quantization": quantization} if quantization else {})
    folder = model_folder(config)
    monkeypatch.setattr(relaying, "pays", lambda: False)  # which is asked of the wrong kernel, too
    stage = load_stage(folder, 0, 2)
    kind: Any = nn.QuantizedLinear if quantization else nn.Linear
    right = kind.__call__

    def product(self: Any, x: mx.array) -> mx.array:
        y = right(self, x)
        if wrong == "one row":
            return mx.concatenate([y[..., :-1], 2 * y[..., -1:]], axis=-1)
        if wrong == "a tenth":
            return y * 1.1
        return y + (x.shape[0] == 1) if wrong == "few tokens" else y + (x.shape[0] > 1)

    check_stage(stage, "model")
    monkeypatch.setattr(kind, "__call__", product)
    error = refused(stage)
    assert (error.reason, bool(error.hint)) == ("KERNEL_WRONG", True)
    with pytest.raises(ModelError) as caught:
        load(engine_pb2.LoadStage(path=str(folder), lo=1, hi=2, context=64), lambda event: None)
    assert caught.value.reason == "KERNEL_WRONG"


@pytest.mark.parametrize("quantization", [None, QUANTIZED[2]], ids=str)
@pytest.mark.parametrize("transpose", [True, False, None])
@pytest.mark.parametrize("key", ["deepseek_v3", "glm5_next"])
def test_a_wrong_kernel_of_heads_and_experts_is_found(
    key: str,
    transpose: bool | None,
    quantization: dict[str, Any] | None,
    archs: dict[str, dict[str, Any]],
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads multiply both ways, experts (None) in one; the two models have their classes of two libraries."""
    wider = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
    config = (archs | MORE)[key] | ({"quantization": quantization} if quantization else {})
    config |= {"text_config": config["text_config"] | wider} if "text_config" in config else wider
    stage = load_stage(model_folder(config), 0, 4)
    check_stage(stage, "model")
    name = ("Quantized" if quantization else "") + ("SwitchLinear" if transpose is None else "MultiLinear")
    kinds = {type(module) for _, module in stage.model.named_modules() if type(module).__name__ == name}
    assert len(kinds) == 1
    kind: Any = kinds.pop()
    right = kind.__call__

    def of_heads(self: Any, x: mx.array, transpose: bool = True) -> Any:
        return right(self, x, transpose) * (1.1 if transpose == wrong_way else 1)

    def of_experts(self: Any, *given: Any, **named: Any) -> Any:
        return 1.1 * right(self, *given, **named)

    wrong_way = transpose
    monkeypatch.setattr(kind, "__call__", of_experts if transpose is None else of_heads)
    assert refused(stage).reason == "KERNEL_WRONG"


def test_every_layer_of_the_libraries_that_can_be_quantized_is_tried() -> None:
    """By their classes' names. Embeddings are no products; `FusedLinear` cuts a linear layer's in pieces."""
    known = {"Linear", "MultiLinear", "SwitchLinear"}
    apart = {"Embedding", "FusedLinear", "QuantizedEngramEmbedding", "OffloadedEngramEmbedding"}
    found = set()
    for library in ("mlx", "mlx_lm", "mlx_vlm"):
        spec = importlib.util.find_spec(library)
        assert spec is not None
        for file in Path(next(iter(spec.submodule_search_locations or []))).rglob("*.py"):
            text = file.read_text(errors="replace")
            classes = ast.walk(ast.parse(text)) if "def to_quantized" in text else ()
            found |= {
                one.name
                for one in classes
                if isinstance(one, ast.ClassDef)
                and any(
                    isinstance(part, ast.FunctionDef) and part.name == "to_quantized" for part in one.body
                )
            }
    assert {name for name in found if not name.endswith("Cache")} == known | apart


@pytest.mark.parametrize("metal", [True, False])
def test_a_macs_gpu_logs_wrong_products_and_another_gpu_does_not_serve(
    metal: bool, llama: dict[str, Any], model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of a Mac's GPU were never compared, and a false alarm would serve nobody."""
    monkeypatch.setattr(relaying, "pays", lambda: False)
    stage = load_stage(model_folder(llama), 0, 2)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    right = nn.Linear.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: 2 * right(self, x))
    if not metal:
        assert refused(stage).reason == "KERNEL_WRONG"
        return
    with structlog.testing.capture_logs() as logs:
        check_stage(stage, "model")
    assert {(log["event"], log["tokens"]) for log in logs} == {
        ("products_differ", 1),
        ("products_differ", 48),
    }


def test_sums_differ_by_roundings_of_their_type() -> None:
    terms, one, eps = np.array([4.0, 100.0]), np.array([1.0, 1.0]), mx.finfo(mx.bfloat16).eps
    assert differs(one, one, terms, 64, mx.float32) == 0
    assert differs(one, one + np.array([0.0, 300 * eps]), terms, 64, mx.bfloat16) == pytest.approx(3)
    assert differs(one, one + np.array([8.0 * eps, 0.0]), terms, 64, mx.bfloat16) == pytest.approx(2)
    assert differs(one, np.array([1.0, float("nan")]), terms, 64, mx.bfloat16) == float("inf")
    longer = [differs(one, one + 1e-4, terms, count, mx.float32) for count in (64, 4096)]
    assert longer[0] == pytest.approx(8 * longer[1], rel=1e-3)
    assert 1 / eps > 4 * ROUNDINGS
