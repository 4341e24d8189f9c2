"""Models whose text part mlx-lm has: its classes, with the weights that belong to it."""

from __future__ import annotations

import mlx.core as mx
import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine.staging.skeleton import build_skeleton, model_classes
from sealring.node.engine.staging.text_part import text_weights

TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}


@pytest.mark.parametrize("name", ["text_config", "llm_config", "language_config"])
def test_the_text_model_is_mlx_lms(name: str) -> None:
    model = build_skeleton({"model_type": "idefics3", name: TEXT})
    assert type(model.layers[0]).__module__ == "mlx_lm.models.llama"
    assert model(mx.zeros((1, 3), mx.uint32)).shape == (1, 3, 100)
    assert "lm_head" in model.language_model


@pytest.mark.parametrize(
    "text", [None, {}, {"model_type": "no_such_model"}, {"model_type": "smolvlm", "text_config": TEXT}]
)
def test_without_one_it_is_refused_by_name(text: object) -> None:
    config = {"model_type": "idefics3"} | ({} if text is None else {"text_config": text})
    with pytest.raises(ModelError, match=r"idefics3|no_such_model|model_type"):
        model_classes(config)


@pytest.mark.parametrize(
    ("before", "head"),
    [
        ("model.text_model.", ""),
        ("language_model.", "language_model."),
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("language_model.model.", ""),
        ("language_model.model.", "language_model.model."),
        ("thinker.model.", "thinker."),
        ("model.", ""),
    ],
)
def test_its_weights_are_found_by_their_prefix(before: str, head: str) -> None:
    names = [
        "layers.0.mlp.up_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "embed_tokens.weight",
        "norm.weight",
    ]
    behind = ["layers.2.eh_proj.weight"]
    tower = [
        "vision_tower.layers.0.mlp.weight",
        "thinker.audio_tower.layers.0.mlp.weight",
        "image_newline",
        "model.vision_model.encoder.layers.0.weight",
        "connector.weight",
    ]
    given = {before + name: mx.array(0) for name in names + behind} | {name: mx.array(0) for name in tower}
    made = text_weights(given | {head + "lm_head.weight": mx.array(0)}, 2)
    assert set(made) == {"lm_head.weight", *("model." + name for name in names)}


def test_a_text_part_of_another_name_has_its_settings_beside_all_others() -> None:
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}
    flat = TEXT | {"model_type": "dots_ocr", "vision_config": {"hidden_size": 8}, "num_key_value_heads": 2}
    nested = TEXT | {"model_type": "glm_ocr_text", "num_key_value_heads": 2, "head_dim": 16}
    nested |= {"attention_bias": False, "rope_parameters": rope}
    model = build_skeleton(flat)
    assert type(model.layers[0]).__module__ == "mlx_lm.models.qwen2"
    model = build_skeleton({"model_type": "glm_ocr", "text_config": nested})
    assert type(model.layers[0]).__module__ == "mlx_lm.models.glm4"
    assert model.layers[0].self_attn.rope.dims == 8
