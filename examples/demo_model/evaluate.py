"""Asks the exported model the held-out questions through mlx_lm on the CPU: `python evaluate.py`.

An answer counts only if it is, letter for letter, the one expected; out of the domain that is the refusal.
With `--kv-bits 8` or 4 keys and values are quantized as a deployment with that option does it.
"""

import argparse
import hashlib
import json
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import sealring.node.engine  # noqa: F401  # a folder of its own for what mlx compiles

# isort: split
import mlx.core as mx
from conversations import TALK
from mlx_lm import load, stream_generate
from mlx_lm.models.cache import QuantizedKVCache
from separation import FILES

HERE = Path(__file__).parent
GROUP_SIZE = 32  # as wide as the model's keys


def ask(model, tokenizer, question: str, kv_bits: int = 0) -> tuple[str, int]:
    """The greedy answer and its number of tokens."""
    cache = [QuantizedKVCache(GROUP_SIZE, kv_bits) for _ in model.layers] if kv_bits else None
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    parts = list(stream_generate(model, tokenizer, prompt, max_tokens=120, prompt_cache=cache))
    return "".join(part.text for part in parts), len(parts)


def graded(model, tokenizer, cases: list[tuple[str, str]], kv_bits: int = 0) -> dict:
    wrong, tokens = [], 0
    for question, expected in cases:
        answer, count = ask(model, tokenizer, question, kv_bits)
        tokens += count
        if answer != expected:
            wrong.append({"question": question, "expected": expected, "answer": answer})
    right = len(cases) - len(wrong)
    return {
        "right": right,
        "asked": len(cases),
        "score": right / len(cases),
        "tokens": tokens,
        "wrong": wrong,
    }


def measured(model, tokenizer, path: Path, kv_bits: int = 0) -> dict:
    """Both grades of one file of questions."""
    cases = json.loads(path.read_text())
    inside = [(one["question"], one["answer"]) for one in cases["in_domain"]]
    outside = [(one, TALK["refusal"]) for one in cases["out_of_domain"]]
    grade = partial(graded, model, tokenizer, kv_bits=kv_bits)
    return {"in_domain": grade(inside), "out_of_domain": grade(outside)}


def successive_sum(i: int) -> tuple[str, str]:
    return f"What is {i}+{i + 1}? Answer with just the number.", str(2 * i + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "score.json")
    parser.add_argument("--kv-bits", type=int, choices=(0, 4, 8), default=0)
    options = parser.parse_args()
    bits = options.kv_bits
    mx.set_default_device(mx.cpu)
    model, tokenizer = load(str(options.model))
    began = time.monotonic()
    hashed = {
        "model/model.safetensors": options.model / "model.safetensors",
        "model/tokenizer.json": options.model / "tokenizer.json",
        **{name: HERE / name for name in FILES},
    }
    score = {
        "sha256": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in hashed.items()},
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        **measured(model, tokenizer, HERE / "heldout.json", bits),
        "successive_sums": graded(model, tokenizer, [successive_sum(i) for i in range(200)], bits),
        "development": measured(model, tokenizer, HERE / "development.json", bits),
    }
    options.out.write_text(json.dumps(score, indent=1) + "\n")
    graded_ones = {name: score[name] for name in ("in_domain", "out_of_domain", "successive_sums")}
    graded_ones |= {f"development, {name}": one for name, one in score["development"].items()}
    for name, one in graded_ones.items():
        print(f"{name}: {one['right']} of {one['asked']}")
    tokens = sum(one["tokens"] for one in graded_ones.values())
    print(f"{tokens} tokens in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
