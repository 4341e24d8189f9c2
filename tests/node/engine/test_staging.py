from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine import caches
from sealring.node.engine.staging import (
    Stage,
    TensorSpec,
    random_model,
    random_stage,
)
from sealring.node.engine.staging.anatomy import dissect


def greedy(stages: list[Stage], tokens: mx.array, cache: list[Any]) -> mx.array:
    state = [tokens]
    for stage, own in zip(stages, cache, strict=True):
        state = stage(state, own)
        for array, spec in zip(state, stage.spec.hands_on, strict=True):
            assert array.shape == (*tokens.shape, *spec.tail)
            assert str(array.dtype) == f"mlx.core.{spec.dtype}"
    return state[0]


def test_specs_of_a_chain(llama: dict[str, Any]) -> None:
    head, middle, tail = (random_stage(llama, lo, hi, seed=0) for lo, hi in ((0, 2), (2, 3), (3, 5)))
    hidden = (TensorSpec("hidden", "float32", (32,)),)
    assert head.spec.receives == (TensorSpec("tokens", "uint32", ()),)
    assert head.spec.hands_on == middle.spec.receives == middle.spec.hands_on == tail.spec.receives == hidden
    assert tail.spec.hands_on == (TensorSpec("logits", "float32", (100,)),)
    assert (head.spec.is_head, head.spec.is_tail, tail.spec.is_tail) == (True, False, True)
    assert (tail.spec.model_type, tail.spec.layers, tail.spec.lo, tail.spec.hi) == ("llama", 5, 3, 5)


def test_a_stage_keeps_only_its_parameters(llama: dict[str, Any]) -> None:
    whole = sum(array.nbytes for _, array in tree_flatten(random_model(llama, seed=0).parameters()))
    embedding, norm = 4 * 100 * 32, 4 * 32
    layer = (whole - embedding - norm) // 5
    sizes = [random_stage(llama, lo, hi, seed=0).weight_bytes for lo, hi in ((0, 2), (2, 3), (3, 5), (0, 5))]
    assert sizes == [2 * layer + embedding, layer, 2 * layer + embedding + norm, whole]


def test_absent_parameters_have_no_storage_and_poison_results(llama: dict[str, Any]) -> None:
    stage = random_stage(llama, 1, 2, seed=0)
    mx.synchronize()
    before = mx.get_active_memory()
    absent = stage.model.model.embed_tokens.weight
    mx.eval(absent)
    assert mx.get_active_memory() - before < 1024
    assert math.isnan(absent[0, 0].item())


@pytest.mark.parametrize("lo", [0, 3])
def test_same_parameters_whatever_the_split(llama: dict[str, Any], lo: int) -> None:
    whole = random_model(llama, seed=7)
    stage = random_stage(llama, lo, lo + 1, seed=7)
    own, reference = (
        dict(tree_flatten(model.model.layers[lo].parameters())) for model in (stage.model, whole)
    )
    assert own.keys() == reference.keys()
    assert all(mx.array_equal(own[name], reference[name]).item() for name in own)
    other = dict(tree_flatten(random_model(llama, seed=8).model.layers[lo].parameters()))
    assert not mx.array_equal(own["mlp.up_proj.weight"], other["mlp.up_proj.weight"]).item()


@pytest.mark.parametrize(("lo", "hi"), [(0, 0), (3, 2), (-1, 2), (0, 6), (5, 6)])
def test_impossible_ranges(llama: dict[str, Any], lo: int, hi: int) -> None:
    with pytest.raises(InvalidInput):
        random_stage(llama, lo, hi, seed=0)


def test_refusals(llama: dict[str, Any], archs: dict[str, dict[str, Any]]) -> None:
    cases = [
        (archs["iquestloopcoder"], "ARCHITECTURE_NOT_STAGEABLE"),
        (llama | {"model_type": "no_such_model"}, "MODEL_TYPE_UNKNOWN"),
        (llama | {"model_type": "cache"}, "MODEL_TYPE_UNKNOWN"),
        (llama | {"model_type": "../../evil"}, "BAD_MODEL_CONFIG"),
        (llama | {"model_type": 3}, "BAD_MODEL_CONFIG"),
        (llama | {"model_file": "model.py"}, "MODEL_NEEDS_REMOTE_CODE"),
        (llama | {"hidden_size": "many"}, "BAD_MODEL_CONFIG"),
        ({"model_type": "llama"}, "BAD_MODEL_CONFIG"),
        ({}, "BAD_MODEL_CONFIG"),
    ]
    for config, reason in cases:
        with pytest.raises(ModelError) as caught:
            random_stage(config, 0, 1, seed=0)
        assert caught.value.reason == reason
        assert caught.value.hint


def test_batched_cache_operations(llama: dict[str, Any]) -> None:
    stage = random_stage(llama, 2, 4, seed=0)
    state = mx.random.normal((1, 6, 32), key=mx.random.key(1))
    rows = []
    for length in (6, 2, 4):
        cache = stage.make_cache()
        stage([state[:, :length]], cache)
        rows.append(cache)
    one = caches.extract(caches.merge(rows[:1]), 0)
    assert len(one) == 2
    batch = caches.recompose(caches.merge(rows[:2]), [0, 1], rows[2:])
    batch = caches.recompose(batch, [2, 0], [])
    assert [int(offset) for offset in batch[0].offset] == [4, 6]
    (out,) = stage([mx.zeros((2, 1, 32))], batch)
    assert out.shape == (2, 1, 32)
    assert caches.recompose(batch, [], []) == []
    assert caches.merge([]) == []


def test_chunks_of_other_lengths_than_are_computed(llama: dict[str, Any]) -> None:
    def run(computed_as: Callable[[int], int]) -> tuple[list[mx.array], list[int]]:
        stages, outputs, begins = [random_stage(llama, lo, hi, seed=0) for lo, hi in ((0, 1), (1, 5))], [], 0
        single, seen = [stage.make_cache() for stage in stages], []
        for stage in stages:
            stage.computed_as = lambda tokens: seen.append(computed_as(tokens)) or seen[-1]
        for length in (3, 8, 5, 1):
            arrays = [mx.arange(begins, begins + length, dtype=mx.uint32)[None]]
            for stage, cache in zip(stages, single, strict=True):
                arrays = stage(arrays, cache)
            outputs, begins = [*outputs, *arrays], begins + length
        assert [part.offset for cache in single for part in cache] == [begins] * 5
        return outputs, seen

    plain, padded = run(lambda tokens: tokens), run(lambda tokens: -(-tokens // 8) * 8)
    assert padded[1] == [8] * 8
    assert [each.shape for each in padded[0]] == [each.shape for each in plain[0]]
    assert all(map(mx.allclose, plain[0], padded[0]))


def test_rows_of_a_model_that_does_not_batch(llama: dict[str, Any]) -> None:
    stages = [random_stage(llama, lo, hi, seed=0) for lo, hi in ((0, 1), (1, 5))]
    for stage in stages:
        stage.batches = False
    single = [[stage.make_cache() for stage in stages] for _ in range(3)]
    for length, cache in zip((3, 12, 5), single, strict=True):
        greedy(stages, mx.arange(length, dtype=mx.uint32)[None], cache)
    lane = [caches.merge([cache[stage] for cache in single]) for stage in range(2)]
    assert all(isinstance(own, caches.RowByRow) for own in lane)
    kept = [caches.extract(own, 1) for own in lane]
    lane = [caches.recompose(own, [0, 2], [other]) for own, other in zip(lane, kept, strict=True)]
    logits = greedy(stages, mx.zeros((3, 1), mx.uint32), lane)
    assert logits.shape == (3, 1, 100)


def test_a_stage_without_counting_caches_counts_by_a_shadow(archs: dict[str, dict[str, Any]]) -> None:
    """jamba: a mamba layer alone; the model makes its masks from an attention layer's cache."""
    stage = random_stage(archs["jamba"], 2, 3, seed=0)
    cache = stage.make_cache()
    mx.eval(stage([mx.zeros((1, 4, 128))], cache))
    assert cache[-1].offset == 4
    lane = caches.merge([cache])
    mx.eval(stage([mx.zeros((1, 1, 128))], lane))
    assert [int(offset) for offset in lane[-1].offset] == [5]


def test_shared_keys_and_values_cross_the_boundary(archs: dict[str, dict[str, Any]]) -> None:
    spec = random_stage(archs["gemma4_text"], 0, 7, seed=0).spec
    assert [tensor.name for tensor in spec.hands_on] == [
        "hidden",
        "keys_4",
        "values_4",
        "keys_5",
        "values_5",
        "per_layer",
    ]
    assert spec.hands_on[-1].tail == (3, 32)


@pytest.mark.parametrize("layers", [None, "layers", [1], {}])
def test_what_has_no_list_of_layers_cannot_be_staged(layers: Any) -> None:
    with pytest.raises(ModelError) as caught:
        dissect(SimpleNamespace(layers=layers), "odd")  # type: ignore[arg-type]
    assert caught.value.reason == "ARCHITECTURE_NOT_STAGEABLE"
