"""Gives the demo model eyes: `python train.py --minutes 6 --out FOLDER`.

The result has Pixtral's architecture (Agrawal et al., 2024, arXiv:2410.07073), by mlx-vlm's classes. Its
small tower is trained from random weights, and the demo model's layers are trained on with it. A part of what
it learns from is the demo model's own conversations, so that it forgets little of them. Needs mlx, mlx-vlm,
numpy, pillow and tokenizers.
"""

import argparse
import importlib
import importlib.util
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import sealring.node.engine  # noqa: F401  # a folder of its own for what mlx compiles

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from tokenizers import AddedToken, Tokenizer

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo_model"
sys.path.append(str(DEMO))

from make_tokenizer import BEGIN, END, PAD, ROLES  # noqa: E402
from pictures import SIDE, SIZES, background_of, draw, question, shapes_of  # noqa: E402
from separation import held_out_questions, training_conversation  # noqa: E402

PATCH = 16
IMAGE, BREAK, FINISH = "<|image|>", "<|image_break|>", "<|image_end|>"
MIDDLE = 0.5
"""What is taken from each channel, and what it is divided by."""

PICTURES, CONVERSATIONS, LENGTH, LONGEST = 48, 12, 256, 1024
"""Conversations in a batch about pictures, and in another batch; the most tokens in one of the latter."""

CHAT_TEMPLATE = """\
{%- macro plain(text) %}{{ text | replace('<|', '<') | trim }}{% endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('unknown role ' + message.role) -}}
{%- endif -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}
{{- plain(message.content) -}}
{%- else -%}
{%- for part in message.content or [] -%}
{%- if part.type == 'image' %}{{ '<|image|>' }}{% else %}{{ plain(part.text) }}{% endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""


class Batch(NamedTuple):
    """Token ids (rows, length) and which of them are to be predicted; pixels (rows, height, width, 3) of a
    batch about pictures, in 0 to 255."""

    tokens: np.ndarray
    learnt: np.ndarray
    pixels: np.ndarray | None


def pixtral() -> Any:
    """mlx-vlm's module of the architecture, without the servers and trainers that the package imports."""
    if "mlx_vlm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_vlm")
        assert spec is not None, "mlx-vlm is not installed"
        sys.modules["mlx_vlm"] = importlib.util.module_from_spec(spec)
    return importlib.import_module("mlx_vlm.models.pixtral")


def tokenizer() -> Tokenizer:
    """The demo model's, with three tokens more: a patch, the end of a line of them, the end of a picture."""
    made = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    made.add_special_tokens([AddedToken(token, special=True) for token in (IMAGE, BREAK, FINISH)])
    return made


def config(made: Tokenizer) -> dict[str, Any]:
    """`config.json`, as mlx-lm, mlx-vlm and transformers read it."""
    text = json.loads((DEMO / "model" / "config.json").read_text())
    text |= {"vocab_size": made.get_vocab_size(), "tie_word_embeddings": False}
    del text["architectures"], text["torch_dtype"]
    ids = {
        f"{name}_token_id": made.token_to_id(token)
        for name, token in (("bos", BEGIN), ("eos", END), ("pad", PAD))
    }
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "pixtral",
        "image_token_index": made.token_to_id(IMAGE),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "vocab_size": made.get_vocab_size(),
        "torch_dtype": "float32",
        **ids,
        "text_config": text,
        "vision_config": {
            "model_type": "pixtral",
            "num_hidden_layers": 4,
            "hidden_size": 128,
            "head_dim": 32,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "image_size": SIDE,
            "patch_size": PATCH,
            "num_channels": 3,
            "rope_theta": 10000.0,
        },
    }


class Writer:
    """Writes batches from a seed."""

    def __init__(self, seed: int) -> None:
        self._random, self._tokenizer, self._forbidden = Random(seed), tokenizer(), held_out_questions()
        ids = self._tokenizer.token_to_id
        self._begin, self._end, self._pad = ids(BEGIN), ids(END), ids(PAD)
        self._roles = {role: ids(token) for role, token in ROLES.items()}
        self._image, self._break, self._finish = ids(IMAGE), ids(BREAK), ids(FINISH)

    def pictures(self) -> Batch:
        """Conversations of one to three questions, each about a picture; all pictures have one size."""
        size = self._random.choice(SIZES)
        columns, lines = (math.ceil(side / PATCH) for side in size)
        line = [self._image] * columns
        grid = [*([*line, self._break] * lines)[:-1], self._finish]
        rows, pixels = [], []
        for _ in range(PICTURES):
            shapes = shapes_of(self._random, size)
            pixels.append(np.asarray(draw(shapes, size, background_of(self._random))))
            turns = [question(shapes, self._random) for _ in range(self._random.choice((1, 1, 2, 3)))]
            ids, learnt = [self._begin], [False]
            for number, (asked, answer) in enumerate(turns):
                said = self._ids(asked)
                if number == 0:
                    said = grid + said if self._random.random() < 0.7 else said + grid
                ids += [self._roles["user"], *said, self._end, self._roles["assistant"]]
                learnt += [False] * (len(said) + 3)
                told = [*self._ids(answer), self._end]
                ids += told
                learnt += [True] * len(told)
            rows.append((ids, learnt))
        return Batch(*self._padded(rows), np.stack(pixels))

    def conversations(self, count: int, least: int = 0, most: int = LENGTH) -> Batch:
        """Some of the demo model's own conversations, of `least` to `most` tokens."""
        rows: list[tuple[list[int], list[bool]]] = []
        while len(rows) < count:
            ids, learnt = [self._begin], [False]
            for message in training_conversation(self._random, self._forbidden):
                said = self._ids(message["content"])
                ids += [self._roles[message["role"]], *said, self._end]
                learnt += [False, *[message["role"] == "assistant"] * (len(said) + 1)]
            if least <= len(ids) <= most:
                rows.append((ids, learnt))
        return Batch(*self._padded(rows), None)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _padded(self, rows: list[tuple[list[int], list[bool]]]) -> tuple[np.ndarray, np.ndarray]:
        length = -max(len(ids) for ids, _ in rows) // 32 * -32
        tokens = np.full((len(rows), length), self._pad, dtype=np.int32)
        mask = np.zeros((len(rows), length), dtype=bool)
        for row, (ids, learnt) in enumerate(rows):
            tokens[row, : len(ids)], mask[row, : len(ids)] = ids, learnt
        return tokens, mask


def write(seed: int, queue: Any, pictures: bool, conversations: int) -> None:
    """Puts batches into the queue, three about pictures and then one of other conversations; without
    pictures three of short ones and then one of long ones."""
    writer = Writer(seed)
    while True:
        for _ in range(3):
            queue.put(writer.pictures() if pictures else writer.conversations(conversations))
        if pictures:
            queue.put(writer.conversations(conversations))
        else:
            queue.put(writer.conversations(conversations // 4, LENGTH, LONGEST))


def batches(
    workers: int, seed: int, pictures: bool = True, conversations: int = CONVERSATIONS
) -> Iterator[Batch]:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue(maxsize=4 * workers)
    for number in range(workers):
        context.Process(
            target=write, args=(seed * 1000 + number, queue, pictures, conversations), daemon=True
        ).start()
    while True:
        yield queue.get()


def rows_of(model: Any, pixels: mx.array) -> mx.array:
    """The tower's rows (pictures, patches, width) of pixels (pictures, height, width, 3) of one size."""
    tower = model.vision_tower.vision_model
    patches = tower.patch_conv((pixels / 255 - MIDDLE) / MIDDLE)
    _, lines, columns, width = patches.shape
    at = (mx.arange(lines)[:, None] * (SIDE // PATCH) + mx.arange(columns)).flatten()
    hidden = tower.ln_pre(patches.reshape(len(patches), -1, width))
    positions = tower.patch_positional_embedding(hidden, at)
    for layer in tower.transformer.layers:
        hidden = layer(hidden, position_embeddings=positions)
    return model.multi_modal_projector(hidden)


def logits_of(model: Any, tokens: mx.array, pixels: mx.array | None) -> mx.array:
    """Logits (rows, length, vocabulary) behind each token; each row's picture stands at its IMAGE tokens."""
    embedded = model.language_model.model.embed_tokens(tokens)
    if pixels is not None:
        rows = rows_of(model, pixels)
        shown = tokens == model.config.image_token_index
        which = mx.maximum(mx.cumsum(shown.astype(mx.int32), axis=1) - 1, 0)
        placed = mx.take_along_axis(rows, which[..., None], axis=1)
        embedded = mx.where(shown[..., None], placed, embedded)
    return model.language_model(tokens, inputs_embeds=embedded).logits


def loss_of(model: Any, tokens: mx.array, learnt: mx.array, pixels: mx.array | None) -> mx.array:
    """Cross entropy in nats a predicted token."""
    logits = logits_of(model, tokens, pixels)[:, :-1]
    losses = nn.losses.cross_entropy(logits, tokens[:, 1:]) * learnt[:, 1:]
    return losses.sum() / learnt[:, 1:].sum()


def weights_of(folder: Path) -> dict[str, mx.array]:
    """The weights of a model's folder, those that are quantized as floats."""
    weights: Any = mx.load(str(folder / "model.safetensors"))
    how = json.loads((folder / "config.json").read_text()).get("quantization")
    for name in [name for name in weights if name.endswith(".scales")]:
        stem = name.removesuffix("scales")
        rounded = (weights.pop(f"{stem}{part}") for part in ("weight", "scales", "biases"))
        weights[f"{stem}weight"] = mx.dequantize(*rounded, **how)
    return dict(weights)


def begun(made: Tokenizer, settings: dict[str, Any]) -> Any:
    """The demo model with a tower of random weights."""
    family = pixtral()
    model_config = family.ModelConfig.from_dict(settings)
    model_config.text_config = family.TextConfig.from_dict(settings["text_config"])
    model_config.vision_config = family.VisionConfig.from_dict(settings["vision_config"])
    model = family.Model(model_config)
    weights = weights_of(DEMO / "model")
    words = weights["model.embed_tokens.weight"]
    more = made.get_vocab_size() - len(words)
    words = mx.concatenate([words, mx.random.normal((more, words.shape[1])) * 0.04])
    weights |= {"model.embed_tokens.weight": words, "lm_head.weight": words}
    model.load_weights([(f"language_model.{name}", value) for name, value in weights.items()], strict=False)
    return model


def fit(model: Any, options: argparse.Namespace) -> float:
    """Trains until the minutes are over and leaves the weights' running mean in the model.

    Returns the mean of the last losses about pictures.
    """
    began = time.monotonic()
    progress = 0.0
    optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.01)
    gradient = nn.value_and_grad(model, loss_of)
    mean = tree_map(lambda value: value + 0, model.parameters())
    losses: list[float] = []
    for step, batch in enumerate(batches(options.workers, options.seed)):
        if step == 1:
            began = time.monotonic()
        progress = (time.monotonic() - began) / (60 * options.minutes)
        if progress >= 1:
            break
        warm = min(1.0, step / 200)
        optimizer.learning_rate = options.rate * warm * 0.5 * (1 + math.cos(math.pi * progress))
        pixels = None if batch.pixels is None else mx.array(batch.pixels).astype(mx.float32)
        loss, gradients = gradient(model, mx.array(batch.tokens), mx.array(batch.learnt), pixels)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        keep = min(0.999, (1 + step) / (10 + step))
        mean = tree_map(lambda old, new, keep=keep: keep * old + (1 - keep) * new, mean, model.parameters())
        mx.eval(model.parameters(), optimizer.state, mean)
        if batch.pixels is not None:
            losses.append(loss.item())
        if step % 100 == 0:
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step} {time.monotonic() - began:.0f} s, loss {recent:.4f}", flush=True)
    model.update(mean)
    return sum(losses[-50:]) / len(losses[-50:])


def export(model: Any, made: Tokenizer, settings: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    made.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": settings,
        "generation_config.json": {
            "bos_token_id": settings["bos_token_id"],
            "eos_token_id": settings["eos_token_id"],
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": 2048,
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "do_resize": True,
            "size": {"longest_edge": SIDE},
            "patch_size": {"height": PATCH, "width": PATCH},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [MIDDLE] * 3,
            "image_std": [MIDDLE] * 3,
            "do_convert_rgb": True,
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": PATCH,
            "image_token": IMAGE,
            "image_break_token": BREAK,
            "image_end_token": FINISH,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    mx.random.seed(options.seed)
    made = tokenizer()
    settings = config(made)
    model = begun(made, settings)
    print(f"{sum(value.size for _, value in tree_flatten(model.parameters()))} parameters", flush=True)
    loss = fit(model, options)
    export(model, made, settings, options.out)
    print(f"final loss {loss:.4f}, written to {options.out}")


if __name__ == "__main__":
    main()
