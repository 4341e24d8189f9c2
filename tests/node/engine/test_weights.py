from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from sealring.mesh.errors import ModelError
from sealring.node.engine import load_stage
from sealring.node.engine.check import check
from sealring.node.engine.staging import random_model

Folder = Callable[..., Path]


def test_stages_of_a_folder(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama, seed=4)
    whole = dict(tree_flatten(random_model(llama, seed=4).parameters()))
    stage = load_stage(folder, 2, 4)
    own = dict(tree_flatten(stage.model.model.layers[3].parameters()))
    assert all(mx.array_equal(array, whole[f"model.layers.3.{name}"]).item() for name, array in own.items())


def test_absent_layers_are_never_in_memory(llama: dict[str, Any], model_folder: Folder) -> None:
    config = llama | {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "vocab_size": 2000,
    }
    folder = model_folder(config)
    size = (folder / "model.safetensors").stat().st_size
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    stage = load_stage(folder, 5, 7)
    assert stage.weight_bytes < size / 5
    assert mx.get_active_memory() - before < stage.weight_bytes + 64 * 1024
    largest = max(array.nbytes for array in stage.kept)  # which may be there twice for a moment
    assert mx.get_peak_memory() - before < stage.weight_bytes + largest + 256 * 1024
    mx.eval(stage([mx.zeros((1, 3, 128))], stage.make_cache()))
    assert mx.get_peak_memory() - before < stage.weight_bytes + 512 * 1024


def test_sharded_and_quantized(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama | {"quantization": {"group_size": 32, "bits": 4}})
    weights = mx.load(str(folder / "model.safetensors"))
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for shard, own in shards.items():
        mx.save_safetensors(str(folder / shard), {name: weights[name] for name in own})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    report = check(folder, stages=3)
    assert report.exact
    assert report.weights == "real"
    (folder / "model-2.safetensors").unlink()
    assert _reason(folder) == "WEIGHTS_MISSING"


def _reason(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_stage(folder, 0, 1)
    assert caught.value.hint
    assert str(folder.parent) not in caught.value.message
    return caught.value.reason


def test_missing_and_corrupt_folders(llama: dict[str, Any], model_folder: Folder, tmp_path: Path) -> None:
    assert _reason(tmp_path / "nowhere") == "MODEL_NOT_FOUND"
    folder = model_folder(llama)
    file, config = folder / "model.safetensors", folder / "config.json"
    whole, text = file.read_bytes(), config.read_text()

    for content, reason in (
        (whole[:-10], "WEIGHTS_CORRUPT"),
        (whole[:100], "WEIGHTS_CORRUPT"),
        (whole + b"x", "WEIGHTS_CORRUPT"),
        (b"", "WEIGHTS_CORRUPT"),
        (b"\xff" * 64, "WEIGHTS_CORRUPT"),
        ((64).to_bytes(8, "little") + b"[" * 64, "WEIGHTS_CORRUPT"),
    ):
        file.write_bytes(content)
        assert _reason(folder) == reason
    file.unlink()
    assert _reason(folder) == "WEIGHTS_MISSING"
    file.write_bytes(whole)

    for content, reason in (
        ("{", "BAD_MODEL_CONFIG"),
        ("[]", "BAD_MODEL_CONFIG"),
        ("\ud800", "BAD_MODEL_CONFIG"),
        ("{}", "BAD_MODEL_CONFIG"),
        (json.dumps(llama | {"model_type": "no_such_model"}), "MODEL_TYPE_UNKNOWN"),
        (json.dumps(llama | {"num_hidden_layers": 6}), "WEIGHTS_MISMATCH"),
        (json.dumps(llama | {"num_hidden_layers": 4}), "WEIGHTS_MISMATCH"),
        (json.dumps(llama | {"hidden_size": 64}), "WEIGHTS_MISMATCH"),
        (json.dumps(llama | {"num_hidden_layers": "5"}), "BAD_MODEL_CONFIG"),
    ):
        config.write_bytes(content.encode("utf-8", "surrogatepass"))
        assert _reason(folder) == reason
    config.unlink()
    assert _reason(folder) == "CONFIG_MISSING"
    config.write_text(text)

    (folder / "model.safetensors.index.json").write_text("{}")
    assert _reason(folder) == "WEIGHTS_CORRUPT"


FOUR_BITS = {"group_size": 32, "bits": 4}
NO_OBJECT: tuple[Any, ...] = ([], "x", -1, 1.5, True)
MALFORMED: list[tuple[str, Any]] = [
    *(("quantization", one) for one in NO_OBJECT),
    *(("text_config", one) for one in (None, *NO_OBJECT)),
    *(("architectures", one) for one in ({}, -1, 1.5, True)),
    *(("quantization.group_size", FOUR_BITS | {"group_size": one}) for one in ("32", [], {}, 0.5)),
    *(("quantization.bits", FOUR_BITS | {"bits": one}) for one in ("4", [], {}, 0.5)),
    *(("quantization.group_size", one) for one in ({}, {"bits": 4})),
    ("quantization.bits", {"group_size": 32}),
]


@pytest.mark.parametrize(("field", "value"), MALFORMED)
def test_a_malformed_field_is_refused_by_its_own_name(
    field: str, value: Any, llama: dict[str, Any], model_folder: Folder
) -> None:
    folder = model_folder(llama | {"quantization": FOUR_BITS})
    config = llama | {"quantization": FOUR_BITS, field.partition(".")[0]: value}
    (folder / "config.json").write_text(json.dumps(config))
    for read in (lambda: load_stage(folder, 0, 1), lambda: check(folder / "config.json")):
        with pytest.raises(ModelError) as caught:
            read()
        assert caught.value.reason == "BAD_MODEL_CONFIG"
        assert f"{field} is " in caught.value.message
        assert field in caught.value.hint


@pytest.mark.parametrize("content", ["[]", "5", "null", '"x"'])
def test_end_tokens_in_a_file_that_is_no_object(
    content: str, llama: dict[str, Any], model_folder: Folder
) -> None:
    folder = model_folder(llama)
    (folder / "generation_config.json").write_text(content)
    assert _reason(folder) == "BAD_MODEL_CONFIG"


def test_a_word_of_pythons_is_said_with_its_kind(llama: dict[str, Any], model_folder: Folder) -> None:
    """A key alone says nothing to a reader."""
    folder = model_folder(llama | {"quantization": FOUR_BITS})
    odd = FOUR_BITS | {"model.layers.0.mlp.up_proj": {"bits": "x"}}
    (folder / "config.json").write_text(json.dumps(llama | {"quantization": odd}))
    with pytest.raises(ModelError, match="TypeError"):
        load_stage(folder, 0, 1)


def test_a_missing_parameter_is_never_left_random(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama)
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    del weights["model.layers.4.mlp.up_proj.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert _reason(folder) == "WEIGHTS_MISMATCH"
