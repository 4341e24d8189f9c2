from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine.converted import GROUP, converted_profile
from sealring.node.engine.profile import profile

Folder = Callable[..., Path]
ARCHS = json.loads((Path(__file__).parents[2] / "data" / "archs.json").read_text("utf-8"))
OF_A_FOLDER = {"digest", "image_tokens", "not_seeing", "card"}
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "llama:sliding"])
def test_it_is_the_profile_of_the_folder_that_a_conversion_writes(
    name: str, bits: int, model_folder: Folder
) -> None:
    config = ARCHS[name] | WIDE
    quantization = {"quantization": {"group_size": GROUP, "bits": bits}} if bits < 16 else {}
    expected = profile(model_folder(config | quantization, dtype=mx.bfloat16))
    found = converted_profile(config, bits)
    assert {key: value for key, value in expected.items() if key not in OF_A_FOLDER} == {
        key: found[key] for key in expected if key not in OF_A_FOLDER
    }
    assert found["card"]["parameters"] == profile_parameters(config)


def profile_parameters(config: dict[str, Any]) -> int:
    return int(converted_profile(config, 16)["card"]["parameters"])


def test_of_experts_a_step_reads_the_chosen_ones() -> None:
    config = ARCHS["qwen3_moe"] | WIDE | {"num_experts": 8, "num_experts_per_tok": 2}
    two, all_eight = (converted_profile(config | {"num_experts_per_tok": chosen}, 4) for chosen in (2, 8))
    assert all_eight["read_bytes"] == all_eight["layer_bytes"] == two["layer_bytes"]
    config["num_experts"] = 2
    fewer = converted_profile(config, 4)
    routers = [(a - b) for a, b in zip(two["read_bytes"], fewer["layer_bytes"], strict=True)]
    assert all(0 <= one < 0.1 * two["layer_bytes"][0] for one in routers)


def test_experts_of_which_nobody_says_how_many_are_chosen_are_refused() -> None:
    config = ARCHS["qwen3_moe"] | WIDE
    wrapped = {"model_type": "qwen3_moe", **config, "num_experts_per_tok": 0}
    with pytest.raises(ModelError, match="how many experts"):
        converted_profile(wrapped, 16)
