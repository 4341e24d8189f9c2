"""Damaged weights are found when a stage is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine import canary, load_stage
from sealring.node.engine.canary import check_weights

Folder = Callable[..., Path]
FOUR_BITS = {"quantization": {"group_size": 32, "bits": 4}}


def refused(stage: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        check_weights(stage, "model")
    return caught.value


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
    quantization = FOUR_BITS if where == "scales" else {}
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
    check_weights(load_stage(folder, 0, 3), "model")
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
                check_weights(load_stage(folder, 0, 2), "model")
                continue
            rows += 1
        return rows

    assert found() == 8
    whole = sum(array.size for array in load_stage(folder, 0, 2).kept)
    monkeypatch.setattr(canary, "_MOST", (whole // 4, whole // 4))
    assert 1 <= found() <= 4
