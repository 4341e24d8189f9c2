from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sealring.node.engine.profile import digest, max_context, profile
from sealring.node.engine.weights import load_stage

Folder = Callable[..., Path]


def test_sizes_are_those_of_loaded_stages(llama: dict[str, Any], model_folder: Folder) -> None:
    for tied in (True, False):
        folder = model_folder(llama | {"tie_word_embeddings": tied}, name=f"tied_{tied}", dtype=mx.bfloat16)
        found = profile(folder)
        assert found["tied"] is tied
        head, middle, tail = (load_stage(folder, lo, hi).weight_bytes for lo, hi in ((0, 2), (2, 3), (3, 5)))
        layers = found["layer_bytes"]
        assert head == sum(layers[:2]) + found["embed_bytes"]
        assert middle == layers[2]
        assert tail == sum(layers[3:]) + found["head_bytes"] + (found["embed_bytes"] if tied else 0)


def test_fields(llama: dict[str, Any], model_folder: Folder) -> None:
    found = profile(model_folder(llama, dtype=mx.bfloat16))
    assert found | {"layer_bytes": [], "embed_bytes": 0, "head_bytes": 0, "digest": ""} == {
        "model_type": "llama",
        "layers": 5,
        "hidden_size": 32,
        "vocab_size": 100,
        "dtype": "bfloat16",
        "layer_bytes": [],
        "embed_bytes": 0,
        "head_bytes": 0,
        "tied": True,
        "kv_bytes_per_token": [2 * 2 * 8 * 2] * 5,
        "kv_max_tokens": [None] * 5,
        "state_bytes": [0] * 5,
        "quantized": [],
        "not_quantizable": "the KV cache of llama cannot be quantized: its keys or values are 8 wide, "
        "which no 32 divides",
        "trimmable": True,
        "mtp_bytes": 0,
        "mtp_kv_bytes_per_token": 0,
        "vision_bytes": 0,
        "vision_working_bytes": 0,
        "image_tokens": 0,
        "image_layers": 0,
        "not_seeing": "",
        "max_context": 512,
        "eos_token_ids": [2],
        "handoff_bytes_per_token": 64,
        "digest": "",
        "parameters": 100 * 32 + 5 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32,
        "precision": "bfloat16",
    }


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [
        ({"group_size": 32, "bits": 4}, "int4"),
        ({"group_size": 32, "bits": 8}, "int8"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mxfp4"),
    ],
)
def test_a_quantized_model_has_the_parameters_that_it_had_before(
    llama: dict[str, Any], model_folder: Folder, quantization: dict[str, Any], precision: str
) -> None:
    before = profile(model_folder(llama, dtype=mx.bfloat16))
    after = profile(model_folder(llama | {"quantization": quantization}, name="packed", dtype=mx.bfloat16))
    assert (after["parameters"], after["precision"]) == (before["parameters"], precision)


def test_every_rank_reports_the_parameters_of_the_whole_model(
    llama: dict[str, Any], model_folder: Folder
) -> None:
    folder = model_folder(llama, dtype=mx.bfloat16)
    assert profile(folder, 2)["parameters"] == profile(folder)["parameters"]


def test_quantized_caches_have_the_bytes_that_they_take(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama | {"head_dim": 64}, dtype=mx.bfloat16)
    found = profile(folder)
    assert found["not_quantizable"] == ""
    heads, scale = 2 * 2, 2 * 2  # keys and values of two heads; a scale and a bias per 64 values
    assert found["quantized"] == [
        {"bits": bits, "kv_bytes_per_token": [heads * (64 * bits // 8 + scale)] * 5} for bits in (8, 4)
    ]
    cache = load_stage(folder, 0, 5, kv_bits=4).make_cache()
    plain = load_stage(folder, 0, 5).make_cache()
    for caches, expected in ((cache, found["quantized"][1]), (plain, found)):
        for one, per_token in zip(caches, expected["kv_bytes_per_token"], strict=True):
            one.update_and_fetch(*[mx.zeros((1, 2, 300, 64), mx.bfloat16)] * 2)
            assert one.nbytes == 512 * per_token


def test_nothing_is_materialised(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama | {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 2000})
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    profile(folder)
    assert mx.get_peak_memory() - before < 64 * 1024


def test_windows_states_and_shared_caches(archs: dict[str, dict[str, Any]], model_folder: Folder) -> None:
    sliding = profile(model_folder(archs["llama:sliding"], name="sliding"))
    assert sliding["kv_max_tokens"] == [None, 8, 8, 8, None, 8, 8, 8]
    assert set(sliding["kv_bytes_per_token"]) == {2 * 4 * 32 * 4}

    jamba = profile(model_folder(archs["jamba"], name="jamba"))
    assert [size > 0 for size in jamba["state_bytes"]] == [True, False] * 4
    assert [size > 0 for size in jamba["kv_bytes_per_token"]] == [False, True] * 4

    shared = profile(model_folder(archs["gemma4_text"], name="shared"))
    assert [size > 0 for size in shared["kv_bytes_per_token"]] == [True] * 6 + [False] * 4
    assert shared["tied"] is False
    assert shared["handoff_bytes_per_token"] > 128 * 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_ctx": 1024}, 1024),
        ({"max_position_embeddings": None, "model_max_length": 7}, 7),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 0, "block_size": 1}, 1),
        ({}, None),
    ],
)
def test_max_context(config: dict[str, Any], expected: int | None) -> None:
    assert max_context(config) == expected


@pytest.mark.parametrize(
    ("config", "stops"), [({"eos_token_id": [True, 5, "6", 0]}, [5, 0]), ({"eos_token_id": None}, [])]
)
def test_only_numbers_end_answers(
    llama: dict[str, Any], model_folder: Folder, config: dict[str, Any], stops: list[int]
) -> None:
    assert profile(model_folder(llama | config))["eos_token_ids"] == stops


def test_digest(llama: dict[str, Any], model_folder: Folder) -> None:
    one, same, other = (
        model_folder(llama, name="one"),
        model_folder(llama, name="same"),
        model_folder(llama, name="x"),
    )
    assert digest(one) == digest(same)
    (other / "tokenizer.json").write_text("{}")
    assert digest(other) != digest(one)
    (same / "config.json").write_text(json.dumps(llama | {"rope_theta": 5.0}))
    assert digest(same) != digest(one)


def test_command(llama: dict[str, Any], model_folder: Folder, tmp_path: Path) -> None:
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sealring.node.engine.profile", str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    folder = model_folder(llama)
    good = run(folder)
    assert json.loads(good.stdout) == {"result": profile(folder)}
    bad = run(tmp_path / "nowhere")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["problem"]["reason"] == "MODEL_NOT_FOUND"
