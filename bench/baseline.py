"""mlx-lm alone, in a process of its own: one row by generate_step, several by BatchGenerator.

    python -m bench.baseline MODEL [--cores A,B] [--in-batches]

MODEL is a folder, or a config.json as text for random weights. Every line on standard input is a JSON object
with what to do, a method of `Baseline` and its arguments, and is answered with one line of JSON:

    {"do": "decode", "rows": 8, "context": 32, "warm": 8, "steps": 64}
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import json
import os
import random
import sys
import time
from collections import deque
from typing import Any

import mlx.core as mx

from bench.frame import numbers
from bench.models import OWN_PROMPTS, drawn_prompt
from bench.serve import prompt as words_of

CHUNK = 2048


class Baseline:
    """Prompts are of drawn tokens, or of `words` as `bench serve` asks them, new ones in every round."""

    def __init__(self, model: Any, tokenizer: Any, vocabulary: int) -> None:
        self._model, self._tokenizer, self._vocabulary = model, tokenizer, vocabulary
        self._mlx_lm = importlib.import_module("mlx_lm.generate")
        self._random = random.Random(0)

    def _solo(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """One row; seconds to the first token, and those between tokens."""
        times = [time.perf_counter()]
        for _ in self._mlx_lm.generate_step(mx.array(prompt), self._model, max_tokens=tokens):
            times.append(time.perf_counter())
        gaps = [after - before for before, after in itertools.pairwise(times[1:])]
        seconds = times[-1] - times[0]
        return {"ttft": [times[1] - times[0]], "gaps": gaps, "seconds": seconds, "tokens": tokens}

    def together(self, rows: int, tokens: int, words: int) -> dict[str, Any]:
        """All rows at once: seconds to first tokens, of steps with all rows, and until the last token."""
        prompts = []
        for _ in range(rows):
            message = {"role": "user", "content": words_of(self._random, words)}
            prompts.append(list(self._tokenizer.apply_chat_template([message], add_generation_prompt=True)))
        begun = time.perf_counter()
        if rows == 1:
            return self._solo(prompts[0], tokens)
        first, steps, made = self._generate(prompts, tokens, 8)
        return {
            "ttft": [moment - begun for moment in first.values()],
            "gaps": [after - before for before, after in itertools.pairwise(steps)],
            "seconds": time.perf_counter() - begun,
            "tokens": sum(map(len, made.values())),
        }

    def requests(self, asked: list[tuple[str, int]], times: list[float], rows: int) -> dict[str, Any]:
        """Answers prompts with their numbers of tokens, each sent at its time after the start, in at most
        `rows` rows. Returns fields of `bench.openai_client.Reply`."""
        generator = self._mlx_lm.BatchGenerator(
            self._model, completion_batch_size=rows, prefill_batch_size=min(8, rows)
        )
        todo = deque(zip(times, asked, strict=True))
        replies: dict[int, dict[str, Any]] = {}
        running: set[int] = set()
        begin = time.perf_counter()
        while todo or running:
            while todo and len(running) < rows and time.perf_counter() >= begin + todo[0][0]:
                _, (text, tokens) = todo.popleft()
                begun = time.perf_counter()
                message = {"role": "user", "content": text}
                prompt = list(self._tokenizer.apply_chat_template([message], add_generation_prompt=True))
                (uid,) = generator.insert([prompt], [tokens])
                running.add(uid)
                sizes = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
                replies[uid] = {"begun": begun, "arrivals": [], "ended": 0.0, **sizes}
            if not running:
                time.sleep(max(0.0, begin + todo[0][0] - time.perf_counter()))
                continue
            for response in generator.next_generated():
                replies[response.uid]["arrivals"].append(time.perf_counter())
                if response.finish_reason is not None:
                    replies[response.uid]["ended"] = time.perf_counter()
                    running.discard(response.uid)
        generator.close()
        return {"replies": list(replies.values())}

    def decode(self, rows: int, context: int, steps: int, warm: int) -> dict[str, Any]:
        """Tokens per second of `steps` steps after the first `warm`, all rows decoding together."""
        if context > OWN_PROMPTS:
            cache, last = self._prefilled(context)
            copies = [copy.deepcopy(cache) for _ in range(rows)]
            _, times, made = self._generate([[last]] * rows, warm + steps, rows, copies)
        else:
            prompts = [self._prompt(row, context) for row in range(1, rows + 1)]
            _, times, made = self._generate(prompts, warm + steps, rows)
        seconds = times[-1] - times[warm - 1]
        tokens = [made[uid] for uid in sorted(made)]
        return {"tokens_per_second": rows * (len(times) - warm) / seconds, "tokens": tokens}

    def _generate(
        self, prompts: list[list[int]], tokens: int, prefill_rows: int, caches: list[Any] | None = None
    ) -> tuple[dict[int, float], list[float], dict[int, list[int]]]:
        """Generates `tokens` tokens of every row. Returns the times of first tokens, the ends of steps with
        all rows, and the tokens."""
        generator = self._mlx_lm.BatchGenerator(
            self._model,
            max_tokens=tokens,
            completion_batch_size=len(prompts),
            prefill_batch_size=prefill_rows,
        )
        generator.insert(prompts, [tokens] * len(prompts), caches=caches)
        first: dict[int, float] = {}
        steps: list[float] = []
        made: dict[int, list[int]] = {}
        while sum(map(len, made.values())) < tokens * len(prompts):
            responses = generator.next_generated()
            now = time.perf_counter()
            if len(responses) == len(prompts):
                steps.append(now)
            for response in responses:
                first.setdefault(response.uid, now)
                made.setdefault(response.uid, []).append(response.token)
        generator.close()
        return first, steps, made

    def _prefilled(self, context: int) -> tuple[list[Any], int]:
        """The caches of row 1's prompt but for its last token, and that token."""
        caches = importlib.import_module("mlx_lm.models.cache").make_prompt_cache(self._model)
        tokens = self._prompt(1, context)
        for start in range(0, context - 1, CHUNK):
            self._model(mx.array([tokens[start : min(start + CHUNK, context - 1)]]), cache=caches)
            mx.eval([one.state for one in caches])
        return caches, tokens[-1]

    def _prompt(self, row: int, length: int) -> list[int]:
        return drawn_prompt(row, length, self._vocabulary)


def load(model: str) -> Baseline:
    if not model.startswith("{"):
        found, tokenizer = importlib.import_module("mlx_lm").load(model)[:2]
        return Baseline(found, tokenizer, tokenizer.vocab_size)
    from mlx.utils import tree_flatten

    from sealring.node.engine import mlx_lm_import
    from sealring.node.engine.staging import random_model

    mlx_lm_import.import_whole()
    config = json.loads(model)
    made = random_model(config, seed=0, dtype=getattr(mx, config["torch_dtype"]))
    for _, value in tree_flatten(made.parameters()):
        mx.eval(value)
    return Baseline(made, None, config["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--cores", type=numbers, default=[])
    parser.add_argument("--in-batches", action="store_true", help="with the scheduling policy of an engine")
    options = parser.parse_args()
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cores)
    if options.in_batches:
        from sealring.node.engine.device import compute_in_batches

        compute_in_batches()
    baseline = load(options.model)
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        answer = getattr(baseline, work.pop("do"))(**work)
        mx.clear_cache()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
