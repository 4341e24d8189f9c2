"""An MTP head is loaded whole, refused by name, and counted where it is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mtpheads import save
from small_models import tiny
from stagering import config_of

from sealring.mesh.errors import ModelError
from sealring.node.engine import load_lazily, load_stage, needed, read_header
from sealring.node.engine.profile import profile
from sealring.node.engine.staging.mtp_head import keeps_embedding, one_layer
from sealring.node.engine.weights import load_mtp_head


@pytest.fixture
def config() -> dict[str, Any]:
    return tiny(config_of("glm4_moe"), "glm4_moe")


def rewrite(folder: Path, keep: str = "", leave: str = "\0") -> None:
    """Drops the tensors whose names do not begin with `keep`, and those whose names have `leave` in them."""
    file = folder / "model.safetensors"
    weights = {
        name: value
        for name, value in mx.load(str(file)).items()  # type: ignore[union-attr]
        if name.startswith(keep) and leave not in name
    }
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tail_takes_the_heads_weights_and_shares_the_models_own(tmp_path: Path, tied: bool) -> None:
    family = "qwen3_5" if tied else "glm4_moe"
    config = tiny(config_of(family), family)
    save(tmp_path, config)
    layers = (config.get("text_config") or config)["num_hidden_layers"]
    stage = load_stage(tmp_path, 2, layers)
    shares = keeps_embedding(stage.model, stage.kept)
    head = load_mtp_head(tmp_path, stage.model, shares=shares)
    assert shares == profile(tmp_path)["tied"]
    own = {id(array) for array in stage.kept}
    assert not own & {id(array) for array in head.kept}
    (measured,) = profile(tmp_path)["residents"]
    assert (measured["name"], measured["at"]) == ("mtp", "RING_END_TAIL")
    assert measured["bytes"] == head.weight_bytes > 0
    assert measured["bytes_per_token"] == head.kv_bytes_per_token > 0


def test_a_folder_without_a_head_or_with_a_part_of_one_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    save(tmp_path, config)
    whole, _ = load_lazily(tmp_path)
    rewrite(tmp_path, leave=f"layers.{config['num_hidden_layers']}.hnorm")
    with pytest.raises(ModelError) as part:
        load_mtp_head(tmp_path, whole, shares=False)
    assert part.value.reason == "WEIGHTS_MISMATCH"
    assert "MTP head" in part.value.message
    assert not profile(tmp_path)["residents"]
    rewrite(tmp_path, leave=f"layers.{config['num_hidden_layers']}.")
    with pytest.raises(ModelError) as none:
        load_mtp_head(tmp_path, whole, shares=False)
    assert (none.value.reason, none.value.message) == (
        "NO_MTP_HEAD",
        "no MTP head in this folder of glm4_moe",
    )
    assert not profile(tmp_path)["residents"]


def test_the_tails_part_of_the_files_has_the_head_and_no_other_part_has(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    save(tmp_path, config)
    file, layers = tmp_path / "model.safetensors", config["num_hidden_layers"]
    header = read_header(file)
    begin = 8 + len(header)
    first, last = (needed(tmp_path, *part) for part in ((0, 2), (2, layers)))

    def has(ranges: list[tuple[str, int, int]], name: str) -> bool:
        start, end = (begin + at for at in json.loads(header)[name]["data_offsets"])
        return any(one <= start and end <= other for _, one, other in ranges)

    for name in (f"model.layers.{layers}.eh_proj.weight", f"model.layers.{layers}.self_attn.q_proj.weight"):
        assert has(last, name)
        assert not has(first, name)
    assert has(last, "model.embed_tokens.weight")


def test_settings_of_single_parameters_are_those_of_the_heads_layer() -> None:
    """Else quantized weights of the head would be read by the settings of the model's first layer."""
    settings = {
        "group_size": 64,
        "bits": 4,
        "model.layers.0.mlp.gate": {"bits": 8},
        "model.layers.4.mlp.gate": {"bits": 6},
        "lm_head": False,
    }
    config = {"model_type": "glm4_moe", "num_hidden_layers": 4, "quantization": settings}
    one = one_layer(config)
    assert one["num_hidden_layers"] == 1
    assert one["quantization"] == {
        "group_size": 64,
        "bits": 4,
        "model.layers.0.mlp.gate": {"bits": 6},
        "lm_head": False,
    }
