"""The whole model of `bench.ring` in one process, under mlx-lm alone.

    python -m bench.ring_baseline --config JSON

Every line on standard input is a JSON object with what to do, and is answered with one line of JSON:

    {"do": "decode", "rows": N, "context": N, "steps": N, "warm": N}   BatchGenerator
    {"do": "prefill", "tokens": N, "chunk": N}                         one prompt, by generate_step
    {"do": "batch", "rows": N, "tokens": N}                            prompts as one batch, and one by one
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from bench.ring_engine import prompt
from bench.ring_steps import OWN_PROMPTS
from sealring.node.engine import mlx_lm_import

CHUNK = 2048


class Baseline:
    def __init__(self, model: Any, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        mlx_lm_import.import_whole()
        self._mlx_lm = importlib.import_module("mlx_lm.generate")

    def decode(self, rows: int, context: int, steps: int, warm: int) -> dict[str, Any]:
        """Tokens per second of `steps` steps after the first `warm`, all rows decoding together."""
        generator = self._mlx_lm.BatchGenerator(
            self._model, max_tokens=warm + steps, completion_batch_size=rows, prefill_batch_size=rows
        )
        limits = [warm + steps] * rows
        if context > OWN_PROMPTS:
            cache, last = self._prefilled(context)
            generator.insert([[last]] * rows, limits, caches=[copy.deepcopy(cache) for _ in range(rows)])
            del cache
        else:
            generator.insert([self._prompt(row, context) for row in range(1, rows + 1)], limits)
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
            "tokens_per_second": rows * (len(times) - warm) / seconds,
            "tokens": [tokens[uid] for uid in sorted(tokens)],
        }

    def prefill(self, tokens: int, chunk: int) -> dict[str, Any]:
        """Seconds to the first token of one prompt."""
        begun = time.perf_counter()
        prompt_tokens = mx.array(self._prompt(1, tokens))
        steps = self._mlx_lm.generate_step(prompt_tokens, self._model, max_tokens=1, prefill_step_size=chunk)
        next(iter(steps))
        return {"seconds": time.perf_counter() - begun}

    def batch(self, rows: int, tokens: int) -> dict[str, Any]:
        """Seconds to the first tokens of so many prompts, as one batch and one prompt after the other.

        Both leave out the output head's product for all tokens but the last, as an engine does.
        """
        prompts = mx.array([self._prompt(row, tokens) for row in range(1, rows + 1)])

        def together() -> None:
            cache = importlib.import_module("mlx_lm.models.cache")
            caches = [cache.BatchKVCache([0] * rows) for _ in self._model.layers]
            mx.eval(self._first_token(prompts, caches))

        def one_by_one() -> None:
            mx.eval([self._first_token(prompts[row : row + 1], self._caches()) for row in range(rows)])

        return {"together": _best(together), "one_by_one": _best(one_by_one)}

    def _first_token(self, prompts: mx.array, caches: list[Any]) -> mx.array:
        self._model(prompts[:, :-1], cache=caches)
        mx.eval([one.state for one in caches])
        found: mx.array = mx.argmax(self._model(prompts[:, -1:], cache=caches)[:, -1, :], axis=-1)
        return found

    def _caches(self) -> list[Any]:
        caches: list[Any] = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(self._model)
        return caches

    def _prefilled(self, context: int) -> tuple[list[Any], int]:
        """The caches of row 1's prompt but for its last token, and that token."""
        caches, tokens = self._caches(), self._prompt(1, context)
        for start in range(0, context - 1, CHUNK):
            self._model(mx.array([tokens[start : min(start + CHUNK, context - 1)]]), cache=caches)
            mx.eval([one.state for one in caches])
        return caches, tokens[-1]

    def _prompt(self, row: int, length: int) -> list[int]:
        return prompt(row, length, self._vocabulary)


def _best(work: Callable[[], None], times: int = 5) -> float:
    """Seconds of the fastest but the first."""
    seconds = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    options = parser.parse_args()
    from mlx.utils import tree_flatten

    from sealring.node.engine.staging import random_model

    config = json.loads(options.config)
    model = random_model(config, seed=0, dtype=getattr(mx, config["torch_dtype"]))
    for _, value in tree_flatten(model.parameters()):
        mx.eval(value)
    baseline = Baseline(model, config["vocab_size"])
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        work = json.loads(line)
        answer = getattr(baseline, work.pop("do"))(**work)
        mx.clear_cache()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
