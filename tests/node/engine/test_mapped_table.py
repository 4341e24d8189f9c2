"""Qwen4's table of n-grams is read from the files by rows, and no stage holds it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from released import Tensors, experts_apart, write
from small_models import write_model

from sealring.mesh.errors import ModelError
from sealring.node.engine import load_lazily, load_stage, needed
from sealring.node.engine.check import check
from sealring.node.engine.mapped_table import MappedTable, tables_of
from sealring.node.engine.profile import profile
from sealring.node.engine.staging import random_model

DATA = Path(__file__).parents[2] / "data"
CONFIG: dict[str, Any] = json.loads((DATA / "archs-more.json").read_bytes())["qwen4_exp"]
QUANTIZATIONS = {
    "float32": None,
    "4 bits": {"group_size": 32, "bits": 4},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
WIDE = CONFIG | {"text_config": CONFIG["text_config"] | {"ple_embed_dim": 128}}
"""With rows that a group of 32 divides."""


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_rows_of_the_files_are_those_of_a_table_in_memory(tmp_path: Path, name: str) -> None:
    config = WIDE | ({"quantization": QUANTIZATIONS[name]} if QUANTIZATIONS[name] else {})
    folder = write_model(tmp_path / "model", config)
    model, read = load_lazily(folder)
    (table,) = tables_of(model.layers)
    in_memory = random_model(read, seed=3).layers[0].ple.ple_embedding.ngram_embedding
    indices = mx.array([[0, 3, 3, 77], [201, 14, 15, 202]])
    assert mx.array_equal(table(indices), in_memory(indices))
    tokens = mx.array([[5, 9, 5, 9, 11, 2, 7]], mx.uint32)
    assert mx.array_equal(model(tokens, cache=model.make_cache()), model(tokens, cache=model.make_cache()))
    with pytest.raises(IndexError):
        table(mx.array([100_000]))


def test_a_stage_holds_nothing_of_it_and_a_plan_counts_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", CONFIG)
    (table,) = tables_of(load_lazily(folder)[0].layers)
    size = sum(end - first for _, first, end in table.ranges)
    whole = sum(array.nbytes for array in mx.load(str(folder / "model.safetensors")).values())  # type: ignore[union-attr]
    measured = profile(folder)
    held = sum(measured["layer_bytes"]) + measured["embed_bytes"] + measured["head_bytes"]
    assert size > 0
    assert held == whole - size
    assert load_stage(folder, 0, 2).weight_bytes + load_stage(folder, 2, 6).weight_bytes == held
    (resident,) = measured["residents"]
    assert (resident["layers"], resident["bytes"]) == (1, 0)
    assert "on disk" in resident["does"]


def test_only_the_head_fetches_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", CONFIG)
    (table,) = tables_of(load_lazily(folder)[0].layers)
    for lo, hi in ((0, 2), (2, 6)):
        ranges = needed(folder, lo, hi)
        inside = [any(a <= first and end <= b for _, a, b in ranges) for _, first, end in table.ranges]
        assert all(inside) if lo == 0 else not any(inside)


def test_a_configuration_names_no_file_to_read(tmp_path: Path) -> None:
    text = CONFIG["text_config"] | {"ple_storage": {"manifest": str(tmp_path / "elsewhere.json")}}
    folder = write_model(tmp_path / "model", CONFIG | {"text_config": text})
    (table,) = tables_of(load_lazily(folder)[0].layers)
    assert isinstance(table, MappedTable)


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
NAMES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.int64: "I64", mx.int32: "I32", mx.uint32: "U32"}


def as_published(scale: mx.array) -> Tensors:
    """The tensors of a folder whose table is in fp8, by one scale. So are experts of bfloat16, by a scale for
    each block; a CPU computes with experts of float32 only."""
    made = {
        name: array.astype(scale.dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in tree_flatten(random_model(CONFIG, seed=3).parameters())
    }
    found: Tensors = {}
    for name, array in experts_apart(made, "switch_mlp", "experts").items():
        name = name.replace("language_model.model.", "model.language_model.").replace(".shards.", ".shard_")
        eights = ("F8_E4M3", mx.to_fp8(array.astype(mx.float32))) if array.ndim == 2 else None
        table, _, _ = name.partition("shard_")
        if eights and table != name:
            found |= {name: eights, f"{table}weight_scale": (NAMES[scale.dtype], scale)}
        elif eights and ".mlp.experts." in name and scale.dtype == mx.bfloat16:
            found |= {name: eights, f"{name}_scale_inv": ("BF16", mx.full((1, 1), 0.5, mx.bfloat16))}
        else:
            found[name.removeprefix("language_model.")] = (NAMES[array.dtype], array)
    return found


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
def test_a_table_of_8_bit_floats_is_read_by_rows(tmp_path: Path, dtype: mx.Dtype) -> None:
    """As mlx-vlm's own conversion makes it."""
    tensors = as_published(mx.array([0.3], dtype))
    folder = write(tmp_path / "model", CONFIG | {"quantization_config": BLOCKS}, tensors)
    model, _ = load_lazily(folder)
    (table,) = tables_of(model.layers)
    convert = importlib.import_module("mlx_vlm.models.qwen4_exp.fp8").convert_qwen4_exp_fp8_weights
    of_table = {name: array for name, (_, array) in tensors.items() if ".ngram_embedding." in name}
    made = convert(of_table)
    shards = [made[name] for name in sorted(made)]
    rows = mx.array([[0, 3, 3, 77], [101, 14, 15, 102]])
    assert mx.array_equal(table(rows), mx.concatenate(shards)[rows])
    assert sum(end - first for _, first, end in table.ranges) == sum(
        each.nbytes for each in of_table.values()
    )
    assert dtype == mx.bfloat16 or check(folder, stages=3).right
    assert profile(folder)["residents"][0]["bytes"] == 0


@pytest.mark.parametrize("scale", [mx.full((2,), 0.3), None])
def test_a_table_of_8_bit_floats_without_its_scale_is_refused(tmp_path: Path, scale: mx.array | None) -> None:
    tensors = as_published(mx.array([0.3]))
    name = next(name for name in tensors if name.endswith("embedding.weight_scale"))
    del tensors[name]
    if scale is not None:
        tensors[name] = ("F32", scale)
    folder = write(tmp_path / "model", CONFIG | {"quantization_config": BLOCKS}, tensors)
    with pytest.raises(ModelError) as caught:
        load_lazily(folder)
    assert caught.value.reason == "MODEL_FORMAT_UNSUPPORTED"
