"""The whole model of `bench.ring` in one process, under mlx-lm's BatchGenerator.

    python -m bench.ring_baseline --config JSON --prompt N

For every line "ROWS STEPS WARM" on standard input it answers with one line of JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from typing import Any

from bench.ring_engine import prompt


def measure(model: Any, prompts: list[list[int]], steps: int, warm: int) -> dict[str, Any]:
    """Tokens per second of `steps` steps after the first `warm`, all rows decoding together."""
    generate = importlib.import_module("mlx_lm.generate")
    rows = len(prompts)
    generator = generate.BatchGenerator(
        model, max_tokens=warm + steps, completion_batch_size=rows, prefill_batch_size=rows
    )
    generator.insert(prompts, [warm + steps] * rows)
    tokens: dict[int, list[int]] = {}
    times = []
    while len(times) < warm + steps:
        responses = generator.next_generated()
        if len(responses) == rows:
            times.append(time.perf_counter())
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
    generator.close()
    seconds = times[-1] - times[warm - 1]
    return {
        "rows": rows,
        "tokens_per_second": rows * (len(times) - warm) / seconds,
        "tokens": [tokens[uid] for uid in sorted(tokens)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--prompt", type=int, required=True)
    options = parser.parse_args()
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from node.engine.staging import random_model

    config = json.loads(options.config)
    model = random_model(config, seed=0, dtype=getattr(mx, config["torch_dtype"]))
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        rows, steps, warm = map(int, line.split())
        prompts = [prompt(row, options.prompt, config["vocab_size"]) for row in range(1, rows + 1)]
        sys.stdout.write(json.dumps(measure(model, prompts, steps, warm)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
