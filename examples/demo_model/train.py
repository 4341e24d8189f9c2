"""Trains the demo model and writes a folder for `mlx_lm.load`: `python train.py --minutes 9 --out FOLDER`.

Runs on CUDA when there is one, otherwise on the CPU. Needs torch, numpy, tokenizers and safetensors.
"""

import argparse
import json
import math
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from make_tokenizer import BEGIN, END, PAD, ROLES
from network import Llama, Shape, configuration
from safetensors.torch import save_file
from separation import held_out_questions, training_conversation
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IGNORED = -100
LENGTHS = (256, 1024)  # of rows for short and for long conversations
AVERAGING = 0.999
Encoded = tuple[list[int], list[bool]]


def encoded(seed: int, count: int) -> list[Encoded]:
    """Token ids of conversations as the chat template writes them, and which ids are to be predicted."""
    tokenizer = Tokenizer.from_file(str(HERE / "model" / "tokenizer.json"))
    begin, end = tokenizer.token_to_id(BEGIN), tokenizer.token_to_id(END)
    roles = {role: tokenizer.token_to_id(token) for role, token in ROLES.items()}
    random, forbidden, result = Random(seed), held_out_questions(), []
    for _ in range(count):
        messages = training_conversation(random, forbidden)
        ids, learnt = [begin], [False]
        texts = tokenizer.encode_batch([message["content"] for message in messages], add_special_tokens=False)
        for message, text in zip(messages, texts, strict=True):
            ids += [roles[message["role"]], *text.ids, end]
            learnt += [False, *[message["role"] == "assistant"] * (len(text.ids) + 1)]
        result.append((ids, learnt))
    return result


def packed(conversations: list[Encoded], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, length + 1) of whole conversations, and the mask of the ids to predict."""
    rows: list[Encoded] = [([], [])]
    for ids, learnt in conversations:
        if len(rows[-1][0]) + len(ids) > length + 1:
            rows.append(([], []))
        rows[-1][0].extend(ids[: length + 1])
        rows[-1][1].extend(learnt[: length + 1])
    tokens = np.full((len(rows), length + 1), pad, dtype=np.int16)
    mask = np.zeros((len(rows), length + 1), dtype=bool)
    for i, (ids, learnt) in enumerate(rows):
        tokens[i, : len(ids)], mask[i, : len(ids)] = ids, learnt
    return tokens, mask


Rows = tuple[np.ndarray, np.ndarray]


def write_rows(folder: Path, seed: int, count: int, pad: int) -> None:
    conversations = encoded(seed, count)
    for length in LENGTHS:
        fitting = [one for one in conversations if (len(one[0]) > LENGTHS[0] + 1) == (length != LENGTHS[0])]
        tokens, mask = packed(fitting, length, pad)
        np.savez(folder / f"{seed}.{length}.npz", tokens=tokens, mask=mask)


def dataset(options: argparse.Namespace, pad: int) -> list[Rows]:
    """Rows for each of LENGTHS, written by `options.workers` processes, each with a seed of its own."""
    share = math.ceil(options.conversations / options.workers)
    seeds = [options.seed * 1000 + i for i in range(options.workers)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writers = [
            multiprocessing.get_context("spawn").Process(target=write_rows, args=(folder, seed, share, pad))
            for seed in seeds
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        return [joined([folder / f"{seed}.{length}.npz" for seed in seeds]) for length in LENGTHS]


def joined(files: list[Path]) -> Rows:
    parts = [np.load(file, allow_pickle=False) for file in files]
    return np.concatenate([part["tokens"] for part in parts]), np.concatenate(
        [part["mask"] for part in parts]
    )


def batches(data: list[Rows], size: int, generator: np.random.Generator) -> Iterator[tuple[int, np.ndarray]]:
    """Batches: the index of a length, and rows of about `size` tokens in all. Each row comes once before any
    repeats.

    The first batches are one of each length: the network is compiled for both before the clock starts.
    """
    counts = [max(1, min(len(rows[0]), size // length)) for rows, length in zip(data, LENGTHS, strict=True)]
    shares = np.array([len(rows[0]) / count for rows, count in zip(data, counts, strict=True)])
    orders: list[list[np.ndarray]] = [[] for _ in data]
    first = list(range(len(data)))
    while True:
        kind = first.pop(0) if first else int(generator.choice(len(data), p=shares / shares.sum()))
        if not orders[kind]:
            order, count = generator.permutation(len(data[kind][0])), counts[kind]
            orders[kind] = [order[i : i + count] for i in range(0, len(order) - count + 1, count)]
        yield kind, orders[kind].pop()


def rate(progress: float, peak: float) -> float:
    """Learning rate: up over 3 % of the time, then down to nothing along a cosine."""
    if progress < 0.03:
        return peak * progress / 0.03
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.03) / 0.97)))


def optimiser(model: Llama) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def mean_loss(model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over the targets (batch, length) that are not ignored."""
    logits = model(tokens).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def fit(model: Llama, rows: list[Rows], options: argparse.Namespace) -> float:
    """Trains until the minutes are over and leaves the weights' running mean in the model.

    Returns the mean of the last losses, in nats per predicted token.
    """
    device = next(model.parameters()).device
    cuda = device.type == "cuda"
    data = [(torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)) for tokens, mask in rows]
    loss_of = torch.compile(mean_loss, dynamic=False) if cuda else mean_loss
    optimizer = optimiser(model)
    parameters = list(model.parameters())
    mean = [parameter.detach().clone() for parameter in parameters]
    losses, seen = [], 0
    for step, (kind, chosen) in enumerate(batches(rows, options.tokens, np.random.default_rng(options.seed))):
        if step <= len(LENGTHS):  # the first steps compile, at a rate of nothing: the clock starts after them
            began = time.monotonic()
        progress = (time.monotonic() - began) / (60 * options.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate(progress, options.rate)
        tokens, learnt = data[kind]
        picked = torch.from_numpy(chosen).to(device)
        batch = tokens[picked].long()
        targets = batch.masked_fill(~learnt[picked], IGNORED)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = loss_of(model, batch[:, :-1], targets[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(mean, parameters, 1 - min(AVERAGING, (1 + step) / (10 + step)))
        seen += batch.numel() if step >= len(LENGTHS) else 0
        if step % (500 if cuda else 50) == 0:
            losses.append(loss.item())
            seconds = time.monotonic() - began + 1e-9
            speed = seen / seconds
            print(f"step {step} {seconds:.0f} s, {speed:.0f} tokens/s, loss {losses[-1]:.4f}", flush=True)
    with torch.no_grad():
        torch._foreach_copy_(parameters, mean)
    return sum(losses[-5:]) / len(losses[-5:])


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    begin, end, pad = (tokenizer.token_to_id(token) for token in (BEGIN, END, PAD))
    weights = {name: value.detach().float().cpu().contiguous() for name, value in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = configuration(model.shape, begin, end, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        if folder.resolve() != (HERE / "model").resolve():
            shutil.copy(HERE / "model" / name, folder / name)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="of training, after the data is written")
    parser.add_argument("--conversations", type=int, default=2_000_000 if cuda else 200_000)
    parser.add_argument("--tokens", type=int, default=32768 if cuda else 4096, help="tokens in a batch")
    parser.add_argument("--width", type=int, default=Shape.hidden_size)
    parser.add_argument("--heads", type=int, default=Shape.num_attention_heads)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=12 if cuda else 2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch._dynamo.config.suppress_errors = True  # without a compiler the model runs uncompiled
    torch.set_float32_matmul_precision("high")
    if not cuda:
        torch.set_num_threads(options.workers)
    tokenizer = Tokenizer.from_file(str(HERE / "model" / "tokenizer.json"))
    began = time.monotonic()
    pad = tokenizer.token_to_id(PAD)
    rows = dataset(options, pad)
    counts = " and ".join(f"{tokens.size} tokens, {mask.sum()} to predict" for tokens, mask in rows)
    print(f"{counts}, in {time.monotonic() - began:.0f} s", flush=True)
    shape = Shape(
        hidden_size=options.width, num_attention_heads=options.heads, num_key_value_heads=options.heads
    )
    model = Llama(shape, tokenizer.token_to_id(BEGIN), options.dropout).to("cuda" if cuda else "cpu")
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    loss = fit(model, rows, options)
    export(model, tokenizer, options.out)
    (options.out / "model.safetensors").chmod(0o644)
    print(f"final loss {loss:.4f}, written to {options.out}")


if __name__ == "__main__":
    main()
