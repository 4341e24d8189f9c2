"""Architectures whose stages are not a plain chain of layers with one kind of cache; and, as a sweep, all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine.check import check
from sealring.node.engine.folder import load
from sealring.node.engine.profile import profile
from sealring.node.engine.staging import build_skeleton, random_stage
from sealring.node.engine.staging.adapters import BATCHING, adapter_for
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.caches import OneRow
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
    "deepseek_v41": "ARCHITECTURE_NOT_STAGEABLE",
    "kimi_k3": "ARCHITECTURE_NOT_STAGEABLE",
    "iquestloopcoder": "ARCHITECTURE_NOT_STAGEABLE",
    "nanbeige:loops": "ARCHITECTURE_NOT_STAGEABLE",
    "olmo": "MODEL_NEEDS_PACKAGE",
    "olmo:tied": "MODEL_NEEDS_PACKAGE",
}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("key", CACHES_DIFFER)
def test_masks_hold_where_the_cache_that_they_are_made_from_is_elsewhere(key: str, stages: int) -> None:
    assert check(MORE[key], stages=stages, rows=3).right


@pytest.mark.parametrize("key", [key for key in MORE if key not in CACHES_DIFFER and key not in CRASHES])
@pytest.mark.sweep
def test_every_one_of_these_is_right_or_refused(key: str) -> None:
    if key in REFUSED:
        with pytest.raises(ModelError) as caught:
            check(MORE[key], stages=3, rows=3, seed=2)
        assert caught.value.reason == REFUSED[key]
        return
    assert check(MORE[key], stages=3, rows=3, seed=2).right


@pytest.mark.sweep
def test_nothing_is_called_batching_that_no_configuration_here_has() -> None:
    shown = set()
    for key in ALL.keys() - REFUSED.keys() - CRASHES:
        module = type(build_skeleton(ALL[key]).layers[0]).__module__
        shown.add(module.rpartition(".")[2].replace("-", "_"))
    assert shown >= BATCHING


def test_rows_of_an_architecture_that_nobody_has_checked_run_in_turn(
    llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert adapter_for("mlx_lm.models.llama").batches
    assert not adapter_for("mlx_lm.models.unheard_of").batches
    assert not isinstance(random_stage(llama, 0, 2, seed=0).make_cache(), OneRow)
    monkeypatch.setattr("sealring.node.engine.staging.adapters.BATCHING", frozenset())
    assert isinstance(random_stage(llama, 0, 2, seed=0).make_cache(), OneRow)


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


def test_an_architecture_that_does_not_split_says_why() -> None:
    with pytest.raises(ModelError) as caught:
        check(MORE["deepseek_v41"])
    assert caught.value.reason == "ARCHITECTURE_NOT_STAGEABLE"
    assert "hands more than one array to the next" in caught.value.message
