"""Long prompts: time to the first token on N stages against one, and what running streams feel of it.

Stages have a core each, or with --gpus a GPU. The second part runs streams on the longest
ring, undisturbed and while a long prompt prefills, or several one after the other, and compares the p95 of
the time between tokens. A stream's steps take longer the longer it has run, so undisturbed are the same
tokens, by their place in the answer, of streams that run afterwards without the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.clusters import rings
from bench.frame import Result, Table, numbers, progress
from bench.models import by_name
from bench.openai_client import LOOK_SECONDS, STREAM_SECONDS, Reply, ask, still_coming, streams
from bench.summaries import percentile, summary
from bench.verdict import Check, ratios
from sealring.mesh.errors import Unavailable

QUICK = ("--rounds", "1", "--tokens", "1024", "--settle", "3", "--beside-tokens", "512")
QUICK_SECONDS = 130.0


async def run(options: argparse.Namespace) -> Result:
    """`seconds` to the first token by stages and round; `streams` as _streams has it."""
    times: dict[str, list[float]] = {}
    spec = {"max_rows": max(16, options.stream_rows + 1), "prefill_chunk": options.prefill_chunk}
    async with rings(by_name(options.model), options.stages, spec=spec, gpus=options.gpus) as made:
        for number in range(options.rounds):
            for stages, each in made.items():
                progress(f"round {number + 1} of {options.rounds}: {stages} stages")
                reply = await answered(each.http_url, options.tokens)
                times.setdefault(str(stages), []).append(round(reply.ttft, 3))
        progress("streams beside a long prompt")
        streams = await _streams(made[max(options.stages)].http_url, options)
    return {"model": options.model, "tokens": reply.prompt_tokens, "seconds": times, "streams": streams}


def _body(tokens: int, max_tokens: int = 2) -> dict[str, Any]:
    return {
        "model": "bench",
        "prompt": secrets.token_hex(8) + " the" * tokens,  # else a kept prefix would be all of it
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }


async def answered(url: str, tokens: int) -> Reply:
    """The answer. Raises Unavailable where there is none: its time would be that of giving up."""
    reply = await ask(url, _body(tokens), path="/v1/completions", seconds=STREAM_SECONDS)
    if not reply.ok:
        found = reply.error or "nothing came"
        raise Unavailable(f"a prompt was not answered: {found}", reason="BENCH_FAILED")
    return reply


async def _streams(url: str, options: argparse.Namespace) -> Result:
    """Gaps between the tokens of streams in ms: beside long prompts, and as far on without them.

    With and without take turns (with, without, without, with), for the machine is not always the same.
    """
    disturbed: list[_Disturbed] = []
    quiet: list[list[float]] = []
    for pair in range(options.pairs):
        if pair % 2:
            quiet.append(await _undisturbed(url, options, disturbed[-1]))
        disturbed.append(await _disturbed(url, options))
        if not pair % 2:
            quiet.append(await _undisturbed(url, options, disturbed[-1]))
    beside = [each.beside for each in disturbed]
    both = zip(beside, quiet, strict=True)
    return {
        "rows": options.stream_rows,
        "stages": max(options.stages),
        "beside": summary(list(itertools.chain(*beside))),
        "undisturbed": summary(list(itertools.chain(*quiet))),
        "p95_ratios": [round(percentile(busy, 0.95) / percentile(idle, 0.95), 3) for busy, idle in both],
        "prefill_seconds": round(median([took for each in disturbed for took in each.seconds]), 3),
    }


@dataclass(slots=True)
class _Disturbed:
    """Streams beside prompts: their gaps in ms, the `seconds` of each prompt, and the `spans` of tokens
    beside it (number of the stream, first, and last but one)."""

    beside: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)


async def _disturbed(url: str, options: argparse.Namespace) -> _Disturbed:
    found = _Disturbed()
    async with streams(url, _waiting(options)) as replies:
        for _ in range(options.prompts):
            await asyncio.sleep(options.settle)
            begins = [len(one.arrivals) for one in replies]
            begun = time.perf_counter()
            long = await answered(url, options.beside_tokens or options.tokens)
            still_coming(replies)
            ended = long.arrivals[0]
            found.seconds.append(ended - begun)
            for number, (one, first) in enumerate(zip(replies, begins, strict=True)):
                last = sum(arrival <= ended for arrival in one.arrivals)
                found.beside += _gaps(one.arrivals[first:last])
                found.spans.append((number, first, last))
    return found


async def _undisturbed(url: str, options: argparse.Namespace, like: _Disturbed) -> list[float]:
    """Gaps in ms of the same tokens, by their place in the answer, without prompts."""
    gaps: list[float] = []
    async with streams(url, _waiting(options)) as replies:
        for number, _, last in like.spans:
            while len(replies[number].arrivals) < last:
                still_coming(replies)
                await asyncio.sleep(LOOK_SECONDS)
        for number, first, last in like.spans:
            gaps += _gaps(replies[number].arrivals[first:last])
    return gaps


def _waiting(options: argparse.Namespace) -> list[dict[str, Any]]:
    return [_body(16, options.stream_tokens) for _ in range(options.stream_rows)]


def _gaps(arrivals: list[float]) -> list[float]:
    return [(after - before) * 1e3 for before, after in itertools.pairwise(arrivals)]


def checks(result: Result) -> list[Check]:
    seconds = result["seconds"]
    found = [
        Check(f"prefill on {stages} stages against one", ratios(seconds["1"], each), 0.8 * int(stages), True)
        for stages, each in seconds.items()
        if stages != "1" and "1" in seconds
    ]
    beside = result["streams"]["p95_ratios"]
    return [*found, Check("p95 between tokens beside a prefill, against undisturbed", beside, 1.5)]


def tables(result: Result) -> list[Table]:
    rows = [
        [stages, median(each), result["tokens"] / median(each)] for stages, each in result["seconds"].items()
    ]
    streams, parts = result["streams"], ("count", "mean", "p50", "p95", "p99", "max")
    gaps = [[name, *(streams[name].get(part, "") for part in parts)] for name in ("beside", "undisturbed")]
    title = (
        f"{streams['rows']} streams on {streams['stages']} stages, ms between tokens, "
        f"{streams['prefill_seconds']} s of prefill, p95 of pairs {streams['p95_ratios']}"
    )
    return [
        Table(f"prompt of {result['tokens']} tokens", ["stages", "s", "tok/s"], rows),
        Table(title, ["the prompt", *parts], gaps),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--tokens", type=int, default=4096, help="of the long prompt")
    parser.add_argument("--beside-tokens", type=int, default=0, help="of the prompt beside streams; 0: alike")
    parser.add_argument("--gpus", type=int, default=0, help="node n computes on GPU n modulo this")
    parser.add_argument("--prefill-chunk", type=int, default=0, help="the most tokens of one; 0: the default")
    parser.add_argument("--prompts", type=int, default=1, help="beside streams, one after the other")
    parser.add_argument("--pairs", type=int, default=1, help="of streams beside prompts and without")
    parser.add_argument("--stages", type=numbers, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-rows", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=7000)
    parser.add_argument(
        "--settle", type=float, default=5.0, help="seconds that streams run before each prompt"
    )
