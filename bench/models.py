"""Models with random weights in the folders that mlx-lm and sealring load, with the demo model's tokenizer.

Their answers mean nothing, but take as long as those of a trained model of that shape. Two properties keep
measurements comparable. The output head knows only tokens that are printable on their own, so every token
shows as text at once. It never prefers the end of the sequence, so every answer has max_tokens.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

OWN_PROMPTS = 512
"""Tokens up to which every row of `bench ring` has a prompt of its own; longer ones are copied."""

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo_model" / "model"


_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mimo": "MiMoForCausalLM", "qwen2": "Qwen2ForCausalLM"}

SAID = 3.0
"""The logit of the token whose turn it is, in a model that `says` some; those of the others are near 0."""


@dataclass(frozen=True)
class Shape:
    """A llama, or a qwen2: one with biases, which mlx_lm.server can pipeline, or a mimo: a qwen2 with an MTP
    head. `dtype` is a name of mlx's."""

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
    says: int = 0
    """The length of the cycle of tokens that greedy answers repeat; 0: random weights decide. Where tokens
    are sampled, others come up by chance."""

    said: float = SAID
    guessed: float = SAID
    """The logit of that token by the MTP head."""


SHAPES = {
    "12x512-qwen2": Shape(kind="qwen2"),
    "12x512": Shape(),
    "12x256": Shape(hidden=256, intermediate=768, heads=4, kv_heads=4),
    "12x256-qwen2": Shape(kind="qwen2", hidden=256, intermediate=768, heads=4, kv_heads=4),
    "6x128": Shape(layers=6, hidden=128, intermediate=384, heads=4, kv_heads=4),
    "2x64": Shape(layers=2, hidden=64, intermediate=192, heads=2, kv_heads=2),
    "8b": Shape("llama", 32, 4096, 14336, heads=32, kv_heads=8, dtype="bfloat16", vocabulary=128256),
    "70b": Shape("llama", 32, 8192, 28672, heads=64, kv_heads=8, dtype="bfloat16", vocabulary=128256),
    "24x1024": Shape(layers=24, hidden=1024, intermediate=3072, heads=16, kv_heads=8),
    "4x64": Shape(layers=4, hidden=64, intermediate=128, heads=4, kv_heads=2, vocabulary=512),
}


def random_model(shape: Shape, folder: Path | None = None) -> Path:
    """A folder with such a model, made on first use: below `folder`, else where temporary files go."""
    key = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:12]

    def fill(work: Path) -> None:
        work.mkdir()
        for file in DEMO.iterdir():
            if (file.suffix == ".json" and file.name != "config.json") or file.suffix in (".jinja", ".txt"):
                shutil.copy(file, work / file.name)
        (work / "config.json").write_text(json.dumps(configuration(shape), indent=1))
        _write_weights(shape, work)

    return made_once(f"{shape.kind}-{shape.layers}x{shape.hidden}-{key}", folder, fill)


def stretched_demo(context: int, folder: Path | None = None) -> Path:
    """The demo model with another context length, for prompts longer than those that it was trained on."""
    stamp = int((DEMO / "model.safetensors").stat().st_mtime)

    def fill(work: Path) -> None:
        shutil.copytree(DEMO, work)
        config = json.loads((DEMO / "config.json").read_text())
        (work / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))

    return made_once(f"demo-{context}-{stamp}", folder, fill)


def made_once(name: str, folder: Path | None, fill: Callable[[Path], None]) -> Path:
    """A folder is there whole or not at all."""
    root = folder or Path(tempfile.gettempdir()) / "sealring-bench-models"
    made = root / name
    if not made.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as temporary:
            fill(Path(temporary) / "model")
            try:
                (Path(temporary) / "model").rename(made)
            except OSError:  # there is one, which another process has made meanwhile
                if not made.is_dir():
                    raise
    return made


def by_name(name: str) -> Path:
    """A model folder, or the name of a shape: "12x512", "demo"."""
    if name == "demo":
        return DEMO
    return random_model(SHAPES[name]) if name in SHAPES else Path(name).expanduser().absolute()


@lru_cache(maxsize=16)
def drawn_prompt(row: int, length: int, vocabulary: int) -> list[int]:
    """The tokens of a row's prompt, the same in every process."""
    drawn: list[int] = np.random.default_rng(row).integers(0, vocabulary, length).tolist()
    return drawn


def printable(count: int) -> list[int]:
    """The tokens that a model `says`, in their turn."""
    return _printable(configuration(Shape())["vocab_size"])[:count]


def configuration(shape: Shape) -> dict[str, Any]:
    """The config.json of a model of that shape."""
    demo: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    return demo | {
        "model_type": shape.kind,
        "architectures": [_ARCHITECTURES[shape.kind]],
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


def _printable(vocabulary: int) -> list[int]:
    """Ids of tokens that are text by themselves."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    return [
        number
        for text, number in tokenizer["model"]["vocab"].items()
        if number < vocabulary and number not in special and text.isascii() and text.isalnum()
    ]


_NEXT_TO_NOTHING = 1e-4
"""Weights of the output head for tokens that never win. They are not zero: a file with a long run of zeros
is taken for an unfinished download."""


def _write_weights(shape: Shape, folder: Path) -> None:
    import mlx.core as mx

    config = configuration(shape)
    dtype = getattr(mx, shape.dtype)
    mx.random.seed(0)

    def random(*size: int) -> Any:
        return (mx.random.normal(size) * size[-1] ** -0.5).astype(dtype)

    hidden, key_width = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    head = mx.full((config["vocab_size"], hidden), _NEXT_TO_NOTHING, dtype)
    known = mx.array(_printable(config["vocab_size"]))
    embedded = random(config["vocab_size"], hidden)
    if shape.says:
        known = known[: shape.says]
        embedded[:, 0] = shape.hidden**-0.5  # 1 behind the norm, so that no others are ever drawn
        head[:, 0] = -30.0
        head[mx.roll(known, -1)] = embedded[known] * (shape.said * shape.hidden**-0.5)
    else:
        head[known] = random(len(known), hidden)
    weights = {
        "model.embed_tokens.weight": embedded,
        "model.norm.weight": mx.ones((hidden,), dtype),
        "lm_head.weight": head,
    }
    projections = {
        **{f"self_attn.{part}_proj": (hidden, hidden) for part in "qo"},
        **{f"self_attn.{part}_proj": (key_width, hidden) for part in "kv"},
        **{f"mlp.{part}_proj": (shape.intermediate, hidden) for part in ("gate", "up")},
        "mlp.down_proj": (hidden, shape.intermediate),
    }
    biased = [f"self_attn.{part}_proj" for part in "qkv" if shape.kind != "llama"]
    layers = [f"model.layers.{layer}" for layer in range(shape.layers)]
    if shape.kind == "mimo":
        layers.append("model.mtp_layers.0")
        ones, sure = mx.ones((hidden,), dtype), shape.guessed / shape.said
        norms = {"token_layernorm": ones, "hidden_layernorm": ones, "final_layernorm": sure * ones}
        weights |= {f"{layers[-1]}.{norm}.weight": value for norm, value in norms.items()}
        # of the hidden state and the embedding, the latter
        weights[f"{layers[-1]}.input_proj.weight"] = mx.eye(hidden, 2 * hidden, hidden).astype(dtype)
    for name in layers:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = mx.ones((hidden,), dtype)
        for part, (rows, columns) in projections.items():
            quiet = shape.says and part in (
                "self_attn.o_proj",
                "mlp.down_proj",
            )
            weights[f"{name}.{part}.weight"] = random(rows, columns) * (1e-4 if quiet else 1)
            if part in biased:
                weights[f"{name}.{part}.bias"] = mx.zeros((rows,), dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    size = sum(each.nbytes for each in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
