"""Wrong kernels are found when a stage is loaded, and right ones are not refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import structlog
import wrongkernels
from scriptedmodel import Scene, Step, write_scripted
from trained import write_adapter

from sealring.mesh.errors import ModelError
from sealring.node.engine import load_stage, nvidia, relaying
from sealring.node.engine.canary_calls import (
    COMPARED,
    ROUNDINGS,
    check_calls,
    largest_off,
    of_rotation,
    watched,
)
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
FOUR_BITS = {"quantization": QUANTIZED[2]}
WIDER = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
LONGEST = 512


def refused(stage: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check_calls(stage, "model", LONGEST)
    return caught.value


@pytest.mark.parametrize("quantization", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_weights_of_each_type_and_mode_are_right(
    quantization: dict[str, Any] | None, dtype: mx.Dtype, llama: dict[str, Any], model_folder: Folder
) -> None:
    config = llama | ({"quantization": quantization} if quantization else {})
    check_calls(load_stage(model_folder(config, dtype=dtype), 0, 5), "model", LONGEST)


@pytest.mark.parametrize(
    "key", ["mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "gemma3n", "mamba2", "apertus"]
)
def test_other_kinds_of_layers_are_right(
    key: str, archs: dict[str, dict[str, Any]], model_folder: Folder
) -> None:
    check_calls(load_stage(model_folder(archs[key] | {"vocab_size": 200}), 1, 3), "model", LONGEST)


@pytest.mark.parametrize("sees", [False, True])
def test_the_models_that_follow_a_script_are_right(sees: bool, tmp_path: Path) -> None:
    """Programs are tried with them by `make clients` alone."""
    write_scripted(tmp_path, [Scene("draw", "read", [Step("Here is the plan.")])], sees=sees)
    check_calls(load_stage(tmp_path, 0, 1), "model", LONGEST)


def test_a_tuned_model_is_right(llama: dict[str, Any], model_folder: Folder) -> None:
    model = model_folder(llama | FOUR_BITS)
    write_adapter(model, model)
    check_calls(load_stage(model, 0, 3), "model", LONGEST)


@pytest.mark.parametrize("quantization", [None, QUANTIZED[2], MXFP8], ids=str)
@pytest.mark.parametrize("wrong", ["one column", "a tenth", "one token", "several tokens"])
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
    owner, name = (mx, "quantized_matmul") if quantization else (mx.array, "__matmul__")
    right = getattr(owner, name)

    def product(x: mx.array, *given: Any, **named: Any) -> mx.array:
        y: mx.array = right(x, *given, **named)
        if wrong == "one column":
            return mx.concatenate([y[..., :-1], 2 * y[..., -1:]], axis=-1)
        if wrong == "a tenth":
            return y * 1.1
        return y + ((x.shape[-2] == 1) == (wrong == "one token"))

    check_calls(stage, "model", LONGEST)
    monkeypatch.setattr(owner, name, product)
    error = refused(stage)
    assert (error.reason, bool(error.hint)) == ("KERNEL_WRONG", True)
    assert error.message.startswith(f"{name} is ")
    with pytest.raises(ModelError) as caught:
        command = engine_pb2.LoadStage(path=str(folder), lo=1, hi=2, context=64, prefill_chunk=64)
        load(command, lambda event: None)
    assert caught.value.reason == "KERNEL_WRONG"


@pytest.mark.parametrize("as_gpu", [False, True])
@pytest.mark.parametrize(
    ("name", "fault", "key"),
    [
        ("gather_qmm", wrongkernels.many_pairs, "mixtral"),
        ("rope", wrongkernels.views, "llama"),
        ("quantized_matmul", wrongkernels.views, "deepseek_v3"),
        ("quantized_matmul", wrongkernels.later_rows, "deepseek_v3"),
        ("quantized_matmul", wrongkernels.later_rows, "llama"),
        ("rope", wrongkernels.one_token_of_later_rows, "llama"),
        ("quantized_matmul", wrongkernels.last_columns, "deepseek_v3"),
    ],
)
def test_the_faults_that_backends_had_are_refused_by_name(
    name: str,
    fault: Callable[[Any], Any],
    key: str,
    as_gpu: bool,
    archs: dict[str, dict[str, Any]],
    llama: dict[str, Any],
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = (archs | {"llama": llama})[key] | FOUR_BITS | (WIDER if key == "deepseek_v3" else {})
    stage = load_stage(model_folder(config), 0, 3)
    if as_gpu:
        monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    check_calls(stage, "model", LONGEST)
    owner = mx.fast if name == "rope" else mx
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    error = refused(stage)
    assert (error.reason, error.message.split()[0]) == ("KERNEL_WRONG", name)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("of", ["heads", "experts"])
@pytest.mark.parametrize("key", ["deepseek_v3", "glm5_next"])
def test_a_wrong_kernel_of_heads_and_experts_is_found(
    key: str,
    of: str,
    quantized: bool,
    archs: dict[str, dict[str, Any]],
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The two models have their classes of two libraries."""
    config = (archs | MORE)[key] | (FOUR_BITS if quantized else {})
    config |= {"text_config": config["text_config"] | WIDER} if "text_config" in config else WIDER
    stage = load_stage(model_folder(config), 0, 4)
    check_calls(stage, "model", LONGEST)
    products = {"heads": ("__matmul__", "quantized_matmul"), "experts": ("gather_mm", "gather_qmm")}
    name = products[of][quantized]
    owner: Any = mx.array if name == "__matmul__" else mx
    right = getattr(owner, name)

    def wrong(x: mx.array, weight: Any, *rest: Any, **named: Any) -> mx.array:
        stacked = of == "experts" or getattr(weight, "ndim", 0) == 3
        return right(x, weight, *rest, **named) * (1.1 if stacked else 1)  # type: ignore[no-any-return]

    monkeypatch.setattr(owner, name, wrong)
    assert refused(stage).message.startswith(f"{name} is ")


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("by", ["base", "frequencies"])
@pytest.mark.parametrize("offset", [3, mx.array([2, 5])], ids=["alike", "by row"])
def test_rotations_are_known(traditional: bool, by: str, offset: Any) -> None:
    x = mx.random.normal((2, 3, 4, 10))
    freqs = None if by == "base" else mx.array([1.0, 3.0, 7.0])
    base = 100.0 if freqs is None else None
    given: dict[str, Any] = {"traditional": traditional, "base": base, "scale": 0.5, "freqs": freqs}
    found = mx.fast.rope(x, 6, offset=offset, **given)
    assert largest_off(*of_rotation(found, x, 6, offset=offset, **given)) < 0.1
    assert largest_off(*of_rotation(found, x, 6, offset=offset + 1, **given)) > ROUNDINGS


def test_every_product_of_mlx_is_tried_or_known_to_be_in_no_stage() -> None:
    found = {name for name in dir(mx) if name.endswith(("mm", "matmul"))}
    apart = {"block_masked_mm", "segmented_mm", "qqmm", "gather_qqmm"}
    assert found - apart == {name for owner, name, _ in COMPARED if owner is mx}


@pytest.mark.parametrize("as_gpu", [False, True])
def test_layers_of_one_shape_cost_as_much_as_one_of_them(
    as_gpu: bool, llama: dict[str, Any], model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU computes few columns besides: all of a vocabulary of 128,256 took half a minute of bfloat16."""
    folder = model_folder(llama | FOUR_BITS)
    stages = [load_stage(folder, 0, layers) for layers in (2, 4)]
    columns: list[int] = []
    right = mx.quantized_matmul

    def counted(*given: Any, **named: Any) -> mx.array:
        found = right(*given, **named)
        columns.append(found.shape[-1])
        return found

    monkeypatch.setattr(mx, "quantized_matmul", counted)
    if as_gpu:
        monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    found = []
    for stage in stages:
        check_calls(stage, "model", LONGEST)
        found.append(columns.copy())
        columns.clear()
    assert found[0] == found[1]
    assert (max(found[0]) < 32) is not as_gpu


def test_what_a_model_compiles_meanwhile_stays_right() -> None:
    """A trace keeps what its products return, for as long as the model is loaded."""
    mx.enable_compile()
    weight = mx.random.normal((48, 48))
    mx.eval(weight)
    compiled = mx.compile(lambda x: mx.exp(x) @ weight)
    x = mx.random.normal((2, 48))
    with watched() as calls:
        for _ in range(2):
            assert (x @ weight).shape == compiled(x).shape
    assert len(calls) == 1
    assert mx.allclose(compiled(x), mx.exp(x) @ weight).item()


def test_what_other_threads_compute_meanwhile_is_theirs() -> None:
    with watched() as calls:
        thread = threading.Thread(target=lambda: mx.matmul(mx.ones((2, 2)), mx.ones((2, 2))))
        thread.start()
        thread.join()
        assert not calls
        a = mx.ones((2, 2))
        b = a @ a
        b += 1.0
        mx.eval(b)
    assert [largest_off(*compare()) for _, _, compare in calls.values()] == [0.0]  # type: ignore[misc]
    assert not isinstance(mx.matmul, type(lambda: None)), "it is MLX's own again"


@pytest.mark.parametrize("metal", [True, False])
def test_a_macs_gpu_logs_wrong_products_and_another_gpu_does_not_serve(
    metal: bool, llama: dict[str, Any], model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of a Mac's GPU were never compared, and a false alarm would serve nobody."""
    stage = load_stage(model_folder(llama | FOUR_BITS), 0, 2)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    right = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *given, **named: 2 * right(*given, **named))
    if not metal:
        assert refused(stage).reason == "KERNEL_WRONG"
        return
    with structlog.testing.capture_logs() as logs:
        check_calls(stage, "model", LONGEST)
    said = {(log["event"], log["function"], *log["tokens"]) for log in logs}
    assert {("products_differ", "quantized_matmul", *size) for size in ((1, 66), (1, 1), (2, 1))} == said


def test_sums_differ_by_roundings_of_their_type() -> None:
    terms, none, eps = np.array([4.0, 100.0]), np.zeros(2), mx.finfo(mx.bfloat16).eps
    assert largest_off(none + 1, none + 1, terms, 64, mx.float32) == 0
    assert largest_off(np.array([0.0, 300 * eps]), none, terms, 64, mx.bfloat16) == pytest.approx(3)
    assert largest_off(np.array([8.0 * eps, 0.0]), none, terms, 64, mx.bfloat16) == pytest.approx(2)
    assert largest_off(np.array([1.0, float("nan")]), none, terms, 64, mx.bfloat16) == float("inf")
    longer = [largest_off(none + 1e-4, none, terms, count, mx.float32) for count in (64, 4096)]
    assert longer[0] == pytest.approx(8 * longer[1], rel=1e-3)
    assert 1 / eps > 4 * ROUNDINGS


@pytest.mark.parametrize("mean", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("terms", [64, 512, 4096])
def test_sums_of_terms_of_one_sign_are_right(
    terms: int, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, and on a GPU, which rounds the result once."""
    mx.random.seed(terms)
    x, whole = ((mx.random.normal((rows, terms)) + mean).astype(mx.bfloat16) for rows in (4, 32))
    weights = mx.quantize(whole, group_size=32, bits=4)
    with watched() as calls:
        mx.quantized_matmul(x, *weights, group_size=32, bits=4)
    [(_, _, compare)] = calls.values()
    found, right, squares, count, dtype = compare()  # type: ignore[misc]
    assert largest_off(found, right, squares, count, dtype) < ROUNDINGS
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    once = np.array(mx.array(right.astype(np.float32)).astype(dtype).astype(mx.float32))
    assert largest_off(once, right, squares, count, dtype) == 0
    assert largest_off(once * 1.1, right, squares, count, dtype) > (ROUNDINGS if not mean else 0)


def test_experts_are_compared_without_copies_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x, experts = mx.random.normal((1, 4, 1, 1, 64)), mx.random.normal((8, 48, 64))
    chosen = mx.random.randint(0, 8, (1, 4, 4))
    taken: list[mx.array] = []
    take = mx.take
    with watched() as calls:
        mx.gather_mm(x, experts.swapaxes(-1, -2), rhs_indices=chosen)
    monkeypatch.setattr(mx, "take", lambda *given, **named: taken.append(take(*given, **named)) or taken[-1])
    [(_, _, compare)] = calls.values()
    assert largest_off(*compare()) < ROUNDINGS  # type: ignore[misc]
    assert {one.shape for one in taken if one.ndim == 3 and 64 in one.shape} >= {(8, 64, 16), (16, 64, 16)}


def test_products_of_heads_are_folded_around_a_fault_of_cuda(
    archs: dict[str, dict[str, Any]], model_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load_stage(model_folder(archs["deepseek_v3"] | FOUR_BITS | WIDER), 0, 3)
    wrong = wrongkernels.later_rows_of_heads(mx.quantized_matmul)
    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    assert refused(stage).message.startswith("quantized_matmul is ")
    monkeypatch.setattr(mx, "quantized_matmul", nvidia.folded(wrong))
    check_calls(stage, "model", LONGEST)


def test_a_product_of_one_tokens_numbers_alone_is_compared() -> None:
    weights = mx.quantize(mx.random.normal((48, 64)), group_size=32, bits=4)
    with watched() as calls:
        mx.quantized_matmul(mx.random.normal((64,)), *weights, group_size=32, bits=4)
    [(_, _, compare)] = calls.values()
    assert largest_off(*compare()) < ROUNDINGS  # type: ignore[misc]
