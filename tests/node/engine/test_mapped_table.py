"""Qwen4's table of n-grams is read from the files by rows, and no stage holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from small_models import write_model

from sealring.node.engine import load_lazily, load_stage, needed
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
