"""mlx-lm alone, in a process of its own: one row by generate_step, several by BatchGenerator. Prints JSON.

    python -m bench.baseline MODEL [--rows N] [--tokens N] [--prompt N] [--rounds N] [--cores A,B]
                             [--words N] [--in-batches]

With --serve it measures one round for every line on standard input, so that it can take turns with others.
With --words prompts are those that `bench.serve` asks a server for, new ones in every round.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import sys
import time
from typing import Any

from bench.serve import prompt


def solo(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One row; seconds to the first token, and those between tokens."""
    import mlx.core as mx

    generate_step = importlib.import_module("mlx_lm.generate").generate_step
    times = [time.perf_counter()]
    for _ in generate_step(mx.array(prompt), model, max_tokens=tokens):
        times.append(time.perf_counter())
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    return {"ttft": times[1] - times[0], "gaps": gaps, "seconds": times[-1] - times[0], "tokens": tokens}


def batch(model: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """All rows at once; seconds from the first prompt to the last token, and of each step with all rows."""
    generate = importlib.import_module("mlx_lm.generate")
    generator = generate.BatchGenerator(
        model, max_tokens=tokens, completion_batch_size=len(prompts), prefill_batch_size=8
    )
    begun = time.perf_counter()
    generator.insert(prompts, [tokens] * len(prompts))
    first: dict[int, float] = {}
    whole: list[float] = []
    made = 0
    while made < tokens * len(prompts):
        responses = generator.next_generated()
        if len(responses) == len(prompts):
            whole.append(time.perf_counter())
        for response in responses:
            first.setdefault(response.uid, time.perf_counter() - begun)
            made += 1
    seconds = time.perf_counter() - begun
    generator.close()
    return {
        "ttft": list(first.values()),
        "seconds": seconds,
        "tokens": made,
        "gaps": [after - before for before, after in itertools.pairwise(whole)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--words", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", default="")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--in-batches", action="store_true", help="with the scheduling policy of an engine")
    options = parser.parse_args()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    if options.in_batches:
        from sealring.node.engine.device import compute_in_batches

        compute_in_batches()
    from mlx_lm import load

    model, tokenizer = load(options.model)[:2]
    generator = random.Random(0)

    def one() -> list[int]:
        if not options.words:
            return [generator.randrange(300, 1500) for _ in range(options.prompt)]
        message = {"role": "user", "content": prompt(generator, options.words)}
        return list(tokenizer.apply_chat_template([message], add_generation_prompt=True))

    prompts = [one() for _ in range(options.rows)]

    def measure() -> dict[str, Any]:
        if options.rows == 1:
            return solo(model, prompts[0], options.tokens)
        if options.words:
            prompts[:] = [one() for _ in prompts]
        return batch(model, prompts, options.tokens)

    solo(model, prompts[0], 4)
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    rounds = sys.stdin if options.serve else range(options.rounds)
    for _ in rounds:
        sys.stdout.write(json.dumps(measure()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
