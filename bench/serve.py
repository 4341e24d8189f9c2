"""An open-loop client of OpenAI-compatible servers, in the manner of `vllm bench serve`, with its JSON keys.

Requests arrive as a Poisson process (gamma with --burstiness) at --request-rate, whatever the server does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.frame import Result, Table, progress
from bench.openai_client import ANSWER_SECONDS, Reply, ask, get_json

_WORDS = ("ring", "stone", "river", "seven", "light", "quiet", "letter", "garden", "winter", "music")


def prompt(generator: random.Random, words: int) -> str:
    """Words without a meaning, different for every request."""
    return " ".join(generator.choice(_WORDS) for _ in range(words))


def arrivals(generator: random.Random, count: int, rate: float, burstiness: float) -> list[float]:
    """Seconds after the start at which requests arrive; all at once for an infinite rate."""
    if rate == math.inf:
        return [0.0] * count
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += generator.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


async def load(
    url: str,
    model: str,
    *,
    count: int,
    words: int,
    max_tokens: int,
    rate: float = math.inf,
    seed: int = 0,
    burstiness: float = 1.0,
    concurrency: int = 0,
    path: str = "/v1/chat/completions",
    key: str = "",
    seconds: float = ANSWER_SECONDS,
) -> tuple[list[Reply], float]:
    """Sends them all; the replies, and seconds from the first request to the last answer."""
    generator = random.Random(seed)
    times = arrivals(generator, count, rate, burstiness)
    asked = [(prompt(generator, words), max_tokens) for _ in range(count)]
    return await send(url, model, asked, times, concurrency, path=path, key=key, seconds=seconds)


async def send(
    url: str,
    model: str,
    asked: Sequence[tuple[str, int]],
    times: Sequence[float],
    concurrency: int = 0,
    *,
    path: str = "/v1/chat/completions",
    key: str = "",
    seconds: float = ANSWER_SECONDS,
    goes_on: Sequence[dict[str, str]] = (),
) -> tuple[list[Reply], float]:
    """Sends prompts with their max_tokens, each at its time in seconds after the start, or as soon as fewer
    than `concurrency` (0: no limit) are under way. The messages `goes_on` follow each in a chat."""
    limit = asyncio.Semaphore(concurrency or len(asked))
    begun = time.perf_counter()

    async def one(at: float, text: str, max_tokens: int) -> Reply:
        await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        if path.endswith("chat/completions"):
            body["messages"] = [{"role": "user", "content": text}, *goes_on]
        else:
            body["prompt"] = text
        async with limit:
            return await ask(url, body, path=path, key=key, seconds=seconds)

    replies = await asyncio.gather(*(one(at, *each) for at, each in zip(times, asked, strict=True)))
    return list(replies), time.perf_counter() - begun


def vllm_result(replies: Sequence[Reply], seconds: float) -> Result:
    """The keys of `vllm bench serve --save-result`."""
    good = [one for one in replies if one.ok]
    output = sum(one.completion_tokens for one in good)
    total = output + sum(one.prompt_tokens for one in good)
    found: Result = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(replies) - len(good),
        "total_input_tokens": total - output,
        "total_output_tokens": output,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": total / seconds,
        "max_concurrent_requests": _most_at_once(good),
        "errors": sorted({one.error for one in replies if one.error}),
    }
    series = {
        "ttft": [one.ttft for one in good],
        "tpot": [one.tpot for one in good if one.completion_tokens > 1],
        "itl": [gap for one in good for gap in one.gaps],
        "e2el": [one.latency for one in good],
    }
    for name, values in series.items():
        ms = np.array(values or [0.0]) * 1e3
        parts = {"mean": np.mean(ms), "median": np.median(ms), "std": np.std(ms)}
        parts |= {f"p{part}": np.percentile(ms, part) for part in (90, 95, 99)}
        found |= {f"{part}_{name}_ms": float(value) for part, value in parts.items()}
    return found


def _most_at_once(replies: Sequence[Reply]) -> int:
    changes = sorted([(one.begun, 1) for one in replies] + [(one.ended, -1) for one in replies])
    return max(itertools.accumulate(change for _, change in changes), default=0)


async def run(options: argparse.Namespace) -> Result:
    model = options.model
    if not model:
        model = (await get_json(options.base_url, "/v1/models"))["data"][0]["id"]
    progress(f"{options.num_prompts} requests to {options.base_url}, model {model}")
    replies, seconds = await load(
        options.base_url,
        model,
        count=options.num_prompts,
        rate=options.request_rate,
        words=options.input_words,
        max_tokens=options.output_len,
        seed=options.seed,
        burstiness=options.burstiness,
        concurrency=options.max_concurrency,
        path=options.endpoint,
        key=options.api_key,
    )
    given = {
        "backend": "openai-chat",
        "model_id": model,
        "num_prompts": options.num_prompts,
        "request_rate": options.request_rate if options.request_rate < math.inf else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency or None,
        "seed": options.seed,
    }
    return given | vllm_result(replies, seconds)


def tables(result: Result) -> list[Table]:
    names = ("request_throughput", "output_throughput", "total_token_throughput", "completed", "failed")
    rows: list[list[object]] = [[name, result[name]] for name in names]
    for series in ("ttft", "tpot", "itl", "e2el"):
        rows += [[f"{part}_{series}_ms", result[f"{part}_{series}_ms"]] for part in ("mean", "median", "p99")]
    return [Table("serve", ["what", "value"], rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8080")
    parser.add_argument("--endpoint", default="/v1/chat/completions")
    parser.add_argument("--model", default="", help="[default: the first one that the server names]")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--request-rate", type=float, default=math.inf, help="requests per second")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 is Poisson; less is burstier")
    parser.add_argument("--max-concurrency", type=int, default=0)
    parser.add_argument("--input-words", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
