"""Makes a trained model small: `python quantise.py TRAINED --out FOLDER`, after either train.py.

Weights become codes of 4 bits with a scale and an offset for each group, as mlx-lm and mlx-vlm load them.
The model is trained on meanwhile with weights that are rounded in each step, to answer as it did in float32
(quantization-aware training; Jacob et al., 2018, arXiv:1712.05877). Scales, norms and convolutions are
float32 numbers of few digits: they compress well, and activations stay float32. Needs what
`seeing_model/train.py` needs, and a GPU: 4 minutes on one H200.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE / "seeing_model"), str(HERE / "demo_model")]

import sealring.node.engine  # noqa: E402, F401  # a folder of its own for what mlx compiles

# isort: split
import mlx.core as mx  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from train import Batch, batches, begun, logits_of, tokenizer, weights_of  # noqa: E402

BITS = 4
CONVERSATIONS = 96
SCALE_DIGITS, OTHER_DIGITS, CONVOLUTION_DIGITS = 5, 8, 3
"""Binary digits of scales and offsets, of norms and biases, of convolutions."""
SHARPNESS = 4
"""Factor of all logits, so that the model answers at temperature 1, the default of most clients, as at 0."""


def coarse(value: mx.array, digits: int) -> mx.array:
    """The nearest numbers that have only `digits` significant binary digits."""
    size = mx.power(2.0, digits - 1 - mx.floor(mx.log2(mx.maximum(mx.abs(value), 1e-30))))
    return mx.round(value * size) / size


def parts(weight: mx.array, group: int) -> tuple[mx.array, mx.array, mx.array]:
    """Packed codes, scales and offsets of a matrix (rows, columns)."""
    codes, scales, offsets = mx.quantize(weight, group_size=group, bits=BITS)
    return codes, coarse(scales, SCALE_DIGITS), coarse(offsets, SCALE_DIGITS)


def rounded(value: mx.array, group: int) -> mx.array:
    """A parameter as the written model has it. Its gradient passes as if it had not been rounded."""
    if value.ndim == 2:
        made = mx.dequantize(*parts(value, group), group_size=group, bits=BITS)
    else:
        made = coarse(value, CONVOLUTION_DIGITS if value.ndim == 4 else OTHER_DIGITS)
    return value + mx.stop_gradient(made - value)


def loaded(folder: Path) -> tuple[Any, Callable[[Any, Batch], mx.array]]:
    """The model of a folder, and its logits (rows, length, vocabulary) of a batch."""
    settings = json.loads((folder / "config.json").read_text())
    if settings["model_type"] == "llama":
        model: Any = llama.Model(llama.ModelArgs.from_dict(settings))
    else:
        model = begun(tokenizer(), settings)
    model.load_weights(list(weights_of(folder).items()))

    def logits(model: Any, batch: Batch) -> mx.array:
        if settings["model_type"] == "llama":
            return model(mx.array(batch.tokens))
        pixels = None if batch.pixels is None else mx.array(batch.pixels).astype(mx.float32)
        return logits_of(model, mx.array(batch.tokens), pixels)

    return model, logits


def fit(
    student: Any, teacher: Any, logits: Callable[[Any, Batch], mx.array], options: argparse.Namespace
) -> Any:
    """The parameters after training: before they are rounded."""
    pictures = options.model.joinpath("preprocessor_config.json").exists()
    sources = batches(options.workers, options.seed, pictures=pictures, conversations=CONVERSATIONS)
    parameters = student.trainable_parameters()
    optimizer = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.98], weight_decay=0.01)

    def loss_of(parameters: Any, batch: Batch, told: mx.array) -> mx.array:
        student.update(tree_map(lambda value: rounded(value, options.group), parameters))
        said = logits(student, batch)[:, :-1]
        said = said - mx.logsumexp(said, axis=-1, keepdims=True)
        learnt = mx.array(batch.learnt)[:, 1:]
        right = mx.take_along_axis(said, mx.array(batch.tokens)[:, 1:, None], axis=-1)[..., 0]
        losses = -(mx.exp(told) * said).sum(axis=-1) - options.data * right
        return (losses * learnt).sum() / learnt.sum()

    began, losses = time.monotonic(), []
    for step, batch in enumerate(sources):
        progress = (time.monotonic() - began) / (60 * options.minutes)
        if progress >= 1:
            break
        told = logits(teacher, batch)[:, :-1]
        told = told - mx.logsumexp(told, axis=-1, keepdims=True)
        optimizer.learning_rate = (
            options.rate * min(1.0, (step + 1) / 200) * 0.5 * (1 + math.cos(math.pi * progress))
        )
        loss, gradients = mx.value_and_grad(loss_of)(parameters, batch, told)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        parameters = optimizer.apply_gradients(gradients, parameters)
        mx.eval(parameters, optimizer.state)
        losses.append(loss.item())
        if step % 500 == 0:
            recent = sum(losses[-100:]) / len(losses[-100:])
            print(f"step {step} {time.monotonic() - began:.0f} s, loss {recent:.4f}", flush=True)
    return parameters


def write(parameters: Any, source: Path, folder: Path, group: int) -> None:
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(parameters):
        if name.endswith("model.norm.weight"):  # the last norm, which scales the logits
            value = value * SHARPNESS
        if value.ndim == 2:
            stem = name.removesuffix("weight")
            weights |= dict(zip((name, f"{stem}scales", f"{stem}biases"), parts(value, group), strict=True))
        else:
            weights[name] = coarse(value, CONVOLUTION_DIGITS if value.ndim == 4 else OTHER_DIGITS)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.parent.resolve() != folder.resolve():
            shutil.copy(file, folder / file.name)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    settings = json.loads((source / "config.json").read_text())
    settings["quantization"] = {"group_size": group, "bits": BITS, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group", type=int, default=64, help="weights that share a scale")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--data", type=float, default=0.5, help="weight of the training data beside the teacher"
    )
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    mx.set_cache_limit(8 << 30)
    teacher, logits = loaded(options.model)
    student, _ = loaded(options.model)
    parameters = fit(student, teacher, logits, options)
    write(parameters, options.model, options.out, options.group)
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
