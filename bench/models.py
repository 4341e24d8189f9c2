"""Models with random weights in the folders that mlx-lm and sealring load, with the demo model's tokenizer.

What they answer means nothing; how long it takes is what a trained model of that shape takes. Two things
keep measurements comparable: the output head knows only tokens that are printable on their own, so every
token shows as text at once, and it never prefers the end of the sequence, so every answer has max_tokens.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo_model" / "model"


@dataclass(frozen=True)
class Shape:
    """A llama, or a qwen2: one with biases, which mlx_lm.server can pipeline. `dtype` is a name of mlx's."""

    kind: str = "llama"
    layers: int = 12
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 8
    context: int = 8192
    dtype: str = "float32"
    vocabulary: int = 0
    """Tokens; 0: the tokenizer's."""


SHAPES = {
    "12x512-qwen2": Shape(kind="qwen2"),
    "12x512": Shape(),
    "12x256": Shape(hidden=256, intermediate=768, heads=4, kv_heads=4),
    "12x256-qwen2": Shape(kind="qwen2", hidden=256, intermediate=768, heads=4, kv_heads=4),
    "6x128": Shape(layers=6, hidden=128, intermediate=384, heads=4, kv_heads=4),
    "2x64": Shape(layers=2, hidden=64, intermediate=192, heads=2, kv_heads=2),
    "8b": Shape(
        layers=32,
        hidden=4096,
        intermediate=14336,
        heads=32,
        kv_heads=8,
        dtype="bfloat16",
        vocabulary=128256,
    ),
    "24x1024": Shape(layers=24, hidden=1024, intermediate=3072, heads=16, kv_heads=8),
}


def random_model(shape: Shape, folder: Path | None = None) -> Path:
    """A folder with such a model, made on first use: below `folder`, else where temporary files go."""
    key = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:12]
    root = folder or Path(tempfile.gettempdir()) / "sealring-bench-models"
    made = root / f"{shape.kind}-{shape.layers}x{shape.hidden}-{key}"
    if (made / "model.safetensors").is_file():
        return made
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        work = Path(temporary) / "model"
        work.mkdir()
        _copy_tokenizer(work)
        (work / "config.json").write_text(json.dumps(_config(shape), indent=1))
        _write_weights(shape, work)
        work.rename(made)
    return made


def stretched_demo(context: int, folder: Path | None = None) -> Path:
    """The demo model with another context length, for prompts longer than those that it was trained on."""
    root = folder or Path(tempfile.gettempdir()) / "sealring-bench-models"
    stamp = int((DEMO / "model.safetensors").stat().st_mtime)
    made = root / f"demo-{context}-{stamp}"
    if (made / "config.json").is_file():
        return made
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        work = Path(temporary) / "model"
        shutil.copytree(DEMO, work)
        config = json.loads((DEMO / "config.json").read_text())
        (work / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
        work.rename(made)
    return made


def by_name(name: str) -> Path:
    """A model folder, or the name of a shape: "12x512", "demo"."""
    if name == "demo":
        return DEMO
    return random_model(SHAPES[name]) if name in SHAPES else Path(name).expanduser().absolute()


def _config(shape: Shape) -> dict[str, Any]:
    demo: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    return demo | {
        "model_type": shape.kind,
        "architectures": ["Qwen2ForCausalLM" if shape.kind == "qwen2" else "LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "max_position_embeddings": shape.context,
        "vocab_size": shape.vocabulary or demo["vocab_size"],
        "tie_word_embeddings": False,
        "torch_dtype": shape.dtype,
    }


def _copy_tokenizer(folder: Path) -> None:
    for file in DEMO.iterdir():
        if (file.suffix == ".json" and file.name != "config.json") or file.suffix in (".jinja", ".txt"):
            shutil.copy(file, folder / file.name)


def _printable(vocabulary: int) -> list[int]:
    """Ids of tokens that are text by themselves."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return [
        number
        for text, number in tokenizer["model"]["vocab"].items()
        if number < vocabulary and number not in special and text.isascii() and text.isalnum()
    ]


def _write_weights(shape: Shape, folder: Path) -> None:
    import mlx.core as mx

    config = _config(shape)
    dtype = getattr(mx, shape.dtype)
    mx.random.seed(0)

    def random(*size: int) -> Any:
        return (mx.random.normal(size) * size[-1] ** -0.5).astype(dtype)

    hidden, key_width = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    head = mx.zeros((config["vocab_size"], hidden), dtype)
    known = mx.array(_printable(config["vocab_size"]))
    head[known] = random(len(known), hidden)
    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": mx.ones((hidden,), dtype),
        "lm_head.weight": head,
    }
    for layer in range(shape.layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": mx.ones((hidden,), dtype),
            f"{name}.post_attention_layernorm.weight": mx.ones((hidden,), dtype),
            f"{name}.self_attn.q_proj.weight": random(hidden, hidden),
            f"{name}.self_attn.k_proj.weight": random(key_width, hidden),
            f"{name}.self_attn.v_proj.weight": random(key_width, hidden),
            f"{name}.self_attn.o_proj.weight": random(hidden, hidden),
            f"{name}.mlp.gate_proj.weight": random(shape.intermediate, hidden),
            f"{name}.mlp.up_proj.weight": random(shape.intermediate, hidden),
            f"{name}.mlp.down_proj.weight": random(hidden, shape.intermediate),
        }
        if shape.kind == "qwen2":
            for part, width in (("q", hidden), ("k", key_width), ("v", key_width)):
                weights[f"{name}.self_attn.{part}_proj.bias"] = mx.zeros((width,), dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    size = sum(each.nbytes for each in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
