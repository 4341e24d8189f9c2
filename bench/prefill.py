"""Long prompts: time to the first token on N stages against one, and what running streams feel of it.

Stages have a core each, as in `scaling`, or with --gpus a GPU. The second part runs streams on the longest
ring, undisturbed and while a long prompt prefills, or several one after the other, and compares the p95 of
the time between tokens. A stream's steps take longer the longer it has run, so undisturbed are the same
tokens, by their place in the answer, of streams that run afterwards without the prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.clusters import rings
from bench.frame import Result, Table, numbers, progress
from bench.models import by_name
from bench.openai_client import Reply, ask
from bench.summaries import percentile, summary
from bench.verdict import Check, ratios
from sealring.mesh.errors import Unavailable

_SECONDS = 1800.0
"""After which an answer counts as failed: beside streams a long prompt takes many times as long as alone."""

QUICK = ("--rounds", "1", "--tokens", "1024", "--quiet", "3", "--settle", "3", "--beside-tokens", "512")
QUICK_SECONDS = 130.0


async def run(options: argparse.Namespace) -> Result:
    """`seconds` to the first token by stages and round; `streams` as _streams has it."""
    times: dict[str, list[float]] = {}
    spec = {"max_rows": max(16, options.stream_rows + 1), "prefill_chunk": options.prefill_chunk}
    async with rings(by_name(options.model), options.stages, spec=spec, gpus=options.gpus) as made:
        for number in range(options.rounds):
            for stages, each in made.items():
                progress(f"round {number + 1} of {options.rounds}: {stages} stages")
                reply = await _prompt(each.http_url, options.tokens)
                _counts(reply)
                times.setdefault(str(stages), []).append(round(reply.ttft, 3))
        progress("streams beside a long prompt")
        streams = await _streams(made[max(options.stages)].http_url, options)
    return {"model": options.model, "tokens": reply.prompt_tokens, "seconds": times, "streams": streams}


async def _prompt(url: str, tokens: int, max_tokens: int = 2, into: Reply | None = None) -> Reply:
    body: dict[str, Any] = {
        "model": "bench",
        "prompt": secrets.token_hex(8) + " the" * tokens,  # else a kept prefix would be all of it
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    return await ask(url, body, path="/v1/completions", into=into, seconds=_SECONDS)


def _counts(*prompts: Reply, streams: Sequence[Reply] = ()) -> None:
    """Raises Unavailable where a prompt has no answer, or a stream ended before it had."""
    if errors := sorted({one.error or "nothing came" for one in prompts if not one.ok}):
        raise Unavailable(f"a prompt was not answered: {', '.join(errors)}", reason="BENCH_FAILED")
    if any(one.ended for one in streams):
        found = next((one.error for one in streams if one.error), "it had all its tokens")
        raise Unavailable(
            f"a stream ended while it was watched: {found}",
            reason="BENCH_FAILED",
            hint="give streams more with --stream-tokens, or the prompt fewer",
        )


async def _streams(url: str, options: argparse.Namespace) -> Result:
    """Gaps between the tokens of streams in ms: before long prompts, beside them, and as far on without them.

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
        "before": summary([gap for each in disturbed for gap in each.before]),
        "beside": summary(list(itertools.chain(*beside))),
        "undisturbed": summary(list(itertools.chain(*quiet))),
        "p95_ratios": [round(percentile(busy, 0.95) / percentile(idle, 0.95), 3) for busy, idle in both],
        "prefill_seconds": round(median([took for each in disturbed for took in each.seconds]), 3),
    }


@dataclass(slots=True)
class _Disturbed:
    """Gaps in ms before and beside prompts, which took so many seconds, and the tokens beside them: number of
    the stream, first, and last but one."""

    before: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)


async def _disturbed(url: str, options: argparse.Namespace) -> _Disturbed:
    found = _Disturbed()
    async with _running(url, options) as replies:
        for _ in range(options.prompts):
            seen = [len(one.arrivals) for one in replies]
            await asyncio.sleep(options.quiet)
            begins = [len(one.arrivals) for one in replies]
            begun = time.perf_counter()
            long = await _prompt(url, options.beside_tokens or options.tokens)
            _counts(long, streams=replies)
            ended = long.arrivals[0]
            found.seconds.append(ended - begun)
            for number, (one, start, first) in enumerate(zip(replies, seen, begins, strict=True)):
                last = sum(arrival <= ended for arrival in one.arrivals)
                found.before += _gaps(one.arrivals[start:first])
                found.beside += _gaps(one.arrivals[first:last])
                found.spans.append((number, first, last))
    return found


async def _undisturbed(url: str, options: argparse.Namespace, like: _Disturbed) -> list[float]:
    """Gaps in ms of the same tokens, by their place in the answer, without prompts."""
    gaps: list[float] = []
    async with _running(url, options) as replies:
        async with asyncio.timeout(options.prompts * (2 * max(like.seconds) + options.quiet) + 10):
            for number, _, last in like.spans:
                while len(replies[number].arrivals) < last:
                    _counts(streams=replies)
                    await asyncio.sleep(0.2)
        for number, first, last in like.spans:
            gaps += _gaps(replies[number].arrivals[first:last])
    return gaps


@contextlib.asynccontextmanager
async def _running(url: str, options: argparse.Namespace) -> AsyncIterator[list[Reply]]:
    """Streams that have been running for `options.settle` seconds."""
    replies = [Reply(time.perf_counter()) for _ in range(options.stream_rows)]
    running = [asyncio.create_task(_prompt(url, 16, options.stream_tokens, one)) for one in replies]
    try:
        await asyncio.sleep(options.settle)
        for one in replies:
            one.arrivals.clear()
        yield replies
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


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
    gaps = [
        [name, *(streams[name].get(part, "") for part in parts)]
        for name in ("before", "beside", "undisturbed")
    ]
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
    parser.add_argument("--settle", type=float, default=5.0, help="seconds before streams are watched")
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds watched before each prompt")
