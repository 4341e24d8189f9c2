"""Adapters as training writes them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from sealring.node.engine import import_whole


def write_adapter(
    folder: Path,
    model: Path,
    *,
    kind: str = "lora",
    keys: list[str] | None = None,
    layers: int = 5,
    strength: float = 0.1,
) -> Path:
    """What `mlx_lm.lora` writes after training: here random numbers in all that it trains."""
    import_whole()
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    whole, _ = load_model(model)
    parameters = {"rank": 3, "scale": 7.5, "dropout": 0.1} | ({"keys": keys} if keys else {})
    if kind == "full":
        trained = {"model.layers.3.mlp.up_proj.weight": whole.model.layers[3].mlp.up_proj.weight}
    else:
        linear_to_lora_layers(whole, layers, parameters, use_dora=kind == "dora")
        found = tree_flatten(whole.parameters())
        trained = {
            name: array for name, array in found if name.rpartition(".")[2] in ("lora_a", "lora_b", "m")
        }
    folder.mkdir(exist_ok=True)
    config = {"fine_tune_type": kind, "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    arrays = {
        name: array * 0.5 + strength * mx.random.normal(array.shape, key=mx.random.key(place))
        for place, (name, array) in enumerate(trained.items())
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    return folder
