"""Configurations of tests/data made as small as they still are what they are.

`python tests/support/small_models.py` prints them all, as a file for `python -m bench.stages`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"
DEMO = Path(__file__).parents[2] / "examples" / "demo_model" / "model"

WIDTHS = {"hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"}
SMALLER: dict[str, dict[str, Any]] = {
    "dbrx": {"d_model": 64, "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "falcon_h1": {
        "hidden_size": 64,
        "intermediate_size": 64,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "head_dim": 16,
        "num_hidden_layers": 4,
    },
    "gpt2": {"n_embd": 48, "n_layer": 4},
    "mamba": {"num_hidden_layers": 4, "time_step_rank": 4},
    "nanochat": {"hidden_size": 80, "num_hidden_layers": 4},
    "openelm": {"model_dim": 128, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "llama:tied": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    "llama:sliding": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "layer_types": ["full_attention", *["sliding_attention"] * 2] * 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "text_config": {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        },
    },
    "gemma4:moe": {
        "text_config": {
            "num_hidden_layers": 6,
            "num_experts": 4,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
        }
    },
    "deepseek_v41": {"hc_sinkhorn_iters": 1},
    "iquestloopcoder": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 16},
    "gemma3_text": {"vocab_size": 300},
    "gpt_oss": {"vocab_size": 300, "num_local_experts": 4, "head_dim": 16},
    "starcoder2": {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 120},
    "youtu_llm": {"kv_lora_rank": 16, "q_lora_rank": 16, "num_attention_heads": 4},
    "plamo2": {"hidden_size": 64, "mamba_num_heads": 4, "hidden_size_per_head": 16},
}


def tiny(config: dict[str, Any], key: str = "") -> dict[str, Any]:
    """The configuration made smaller where it is bigger than the test needs."""
    small = dict(config)
    width = config.get("hidden_size", 0)
    if isinstance(width, int) and width > 256:
        for name in small.keys() & WIDTHS:
            small[name] //= 8
    for name in small.keys() & {"vocab_size", "vocab_size_per_layer_input"}:
        small[name] = min(small[name], 120)
    if isinstance(config.get("text_config"), dict):
        small["text_config"] = tiny(config["text_config"])
    for name, value in SMALLER.get(key, {}).items():
        small[name] = small[name] | value if isinstance(value, dict) else value
    return small


def write_model(folder: Path, config: dict[str, Any], seed: int = 3) -> Path:
    """Writes a model of random weights in float32, with the demo model's tokenizer and vocabulary."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from sealring.node.engine.staging import random_model

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    made = _with_vocabulary(config, json.loads((DEMO / "config.json").read_bytes())["vocab_size"])
    (folder / "config.json").write_text(json.dumps(made))
    weights = dict(tree_flatten(random_model(made, seed=seed, dtype=mx.float32).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _with_vocabulary(config: Any, tokens: int) -> Any:
    if not isinstance(config, dict):
        return config
    sizes = ("vocab_size", "unpadded_", "embedding_size")
    return {
        name: tokens if name.startswith(sizes) else _with_vocabulary(value, tokens)
        for name, value in config.items()
    }


if __name__ == "__main__":
    files = (DATA / "archs.json", DATA / "archs-more.json")
    found = {key: config for file in files for key, config in json.loads(file.read_bytes()).items()}
    sys.stdout.write(json.dumps({key: tiny(config, key) for key, config in found.items()}))
