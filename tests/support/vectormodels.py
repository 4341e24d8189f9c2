"""Tiny models of embeddings and of scores, with the demo model's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from sealring.node.engine.staging import random_model

DEMO = Path(__file__).parents[2] / "examples" / "demo_model" / "model"
END, NO, YES = 2, 17, 23
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1536,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": END,
}


def write(folder: Path, *, scores: bool = False) -> Any:
    """Writes the folder of a model of embeddings or scores, as sentence-transformers has it; returns mlx-lm's
    whole model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = random_model(CONFIG, seed=3)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = ["LogitScore"] if scores else ["Pooling", "Normalize"]
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}] + [
        {"type": f"sentence_transformers.models.{name}", "path": f"{at}_{name}"}
        for at, name in enumerate(names, 1)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / f"1_{names[0]}").mkdir(exist_ok=True)
    settings = {"true_token_id": YES, "false_token_id": NO} if scores else {"pooling_mode_lasttoken": True}
    (folder / f"1_{names[0]}" / "config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((DEMO / "tokenizer.json").read_bytes())
    end = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}, end],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [END], "tokens": ["<|end|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_bytes((DEMO / "tokenizer_config.json").read_bytes())
    return model
