"""Counts right answers about pictures that training has not drawn: `python evaluate.py --model FOLDER`.

An answer counts only if it is, letter for letter, the one expected. The model gives it greedily exactly when
each token of the expected answer is the most probable one behind those before it. So one pass over whole
conversations measures all of their answers.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import sealring.node.engine  # noqa: F401  # a folder of its own for what mlx compiles

# isort: split
import mlx.core as mx
from train import HERE, Writer, begun, logits_of, tokenizer, weights_of

SEED = 1 << 20
"""Seed of the pictures here. Seeds of training are below it."""


def measured(model: Any, batches: int) -> dict[str, Any]:
    """How many answers are right, of how many."""
    writer, right, asked = Writer(SEED), 0, 0
    for _ in range(batches):
        batch = writer.pictures()
        tokens = mx.array(batch.tokens)
        pixels = mx.array(batch.pixels).astype(mx.float32)
        found = mx.argmax(logits_of(model, tokens, pixels)[:, :-1], axis=-1)
        same = (found == tokens[:, 1:]).tolist()
        for row, learnt in zip(same, batch.learnt[:, 1:].tolist(), strict=True):
            answers = [[]]
            for equal, told in zip(row, learnt, strict=True):
                if told:
                    answers[-1].append(equal)
                elif answers[-1]:
                    answers.append([])
            asked += sum(bool(answer) for answer in answers)
            right += sum(bool(answer) and all(answer) for answer in answers)
    return {"right": right, "asked": asked, "score": round(right / asked, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--out", type=Path, default=HERE / "score.json")
    parser.add_argument("--batches", type=int, default=10)
    options = parser.parse_args()
    made = tokenizer()
    model = begun(made, json.loads((options.model / "config.json").read_text()))
    model.load_weights(list(weights_of(options.model).items()))
    score = measured(model, options.batches)
    options.out.write_text(json.dumps(score, indent=1) + "\n")
    print(score)


if __name__ == "__main__":
    main()
