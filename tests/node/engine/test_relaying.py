from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from sealring.node.engine import load_stage
from sealring.node.engine.relaying import RelaidLinear, pays, relay
from sealring.node.engine.staging import Stage, random_stage

Archs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def small(archs: Archs) -> Archs:
    """With sums still as long as those of one configuration that serves."""
    narrow = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 384}
    kinds = {kind: archs[kind] | narrow for kind in ("qwen2", "phi3", "mixtral")}
    return kinds


def linears(stage: Stage) -> list[nn.Linear]:
    return [module for module in stage.model.modules() if isinstance(module, nn.Linear)]


def relaid(stage: Stage) -> int:
    return sum(isinstance(module, RelaidLinear) for module in linears(stage))


@pytest.mark.parametrize("kind", ["qwen2", "phi3", "mixtral"])
def test_not_a_bit_differs(small: Archs, kind: str) -> None:
    plain, other = (random_stage(small[kind], 0, 2, seed=3) for _ in range(2))
    relay(other)
    assert relaid(other)
    for rows, tokens in [(1, 1), (1, 7), (3, 1), (5, 2)]:
        inputs = mx.random.randint(0, 50, (rows, tokens), key=mx.random.key(rows))
        expected, found = (stage([inputs], stage.make_cache())[0] for stage in (plain, other))
        assert mx.array_equal(expected, found).item()


def test_the_bias_is_added_to_whole_sums() -> None:
    """Begun with the bias, a sum would come out otherwise in its last bits."""
    plain = nn.Linear(64, 48)
    other = RelaidLinear(64, 48)
    other.weight, other.bias = mx.contiguous(plain.weight.T).T, plain.bias
    x = mx.random.normal((6, 1, 64))
    assert mx.array_equal(plain(x), other(x)).item()
    assert not mx.array_equal(mx.addmm(plain.bias, x, other.weight.T), plain(x)).item()


def test_weights_are_what_they_were_and_no_more(small: Archs) -> None:
    plain, other = (random_stage(small["qwen2"], 1, 3, seed=1) for _ in range(2))
    relay(other)
    assert other.weight_bytes == plain.weight_bytes
    own = {id(array) for _, array in tree_flatten(other.model.parameters())}
    assert all(id(array) in own for array in other.kept)
    for (name, left), (same, right) in zip(
        tree_flatten(plain.model.parameters()), tree_flatten(other.model.parameters()), strict=True
    ):
        assert (name, left.shape, left.dtype) == (same, right.shape, right.dtype)
        assert mx.array_equal(left, right, equal_nan=True).item()


def test_what_a_stage_lacks_stays_without_memory(small: Archs) -> None:
    stage = random_stage(small["qwen2"], 0, 1, seed=1)
    relay(stage)
    held = sum(isinstance(module, RelaidLinear) for module in stage.model.layers[0].modules())
    assert held == relaid(stage) == 7


def test_only_float32_and_only_plain_linear_layers(small: Archs) -> None:
    half = random_stage(small["qwen2"], 0, 2, seed=1, dtype=mx.float16)
    relay(half)
    quantized = random_stage(small["qwen2"] | {"quantization": {"group_size": 32, "bits": 4}}, 0, 2, seed=1)
    relay(quantized)
    assert not relaid(half)
    assert not relaid(quantized)


def test_a_folder_is_loaded_as_the_trial_tells(small: Archs, model_folder: Callable[..., Path]) -> None:
    folder = model_folder(small["qwen2"], seed=2)
    stage = load_stage(folder, 0, 2)
    assert bool(relaid(stage)) is pays()
    expected = random_stage(small["qwen2"], 0, 2, seed=2)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(*(each([tokens], each.make_cache())[0] for each in (stage, expected))).item()


@pytest.mark.skipif(sys.platform != "linux", reason="other builds have other libraries")
def test_the_trial_looks_at_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RelaidLinear, "__call__", lambda self, x: nn.Linear.__call__(self, x) * (1 + 1e-6))
    assert not pays()


@pytest.mark.skipif(sys.platform != "linux", reason="other builds have other libraries")
def test_it_pays_with_the_library_of_linux_builds() -> None:
    assert pays()


def test_it_does_not_pay_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not pays()
