"""Conversations that share a system prompt: what kept prefixes save, and what routing by prefix saves beside.

Conversations go on side by side, each asks its next question when its last one is answered. First on rings of
one and more stages: with prefixes to be found, and with a word of its own in front of every prompt, so that
nothing is. Then on two rings, with a longer first question in each conversation, as of a document: they go to
the ring that has their prefix, or to the least busy one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from bench.clusters import Deployment, can_pin, cluster, pin_stages
from bench.frame import Benchmark, Result, Table, progress
from bench.models import by_name
from bench.openai_client import Reply, ask, get_metrics
from bench.scaling import numbers
from bench.serve import prompt
from bench.summaries import median, summary
from bench.verdict import Check, ratios
from sealring.cli.local.cluster import LocalCluster

_MODEL = "bench"
_MIB = 1 << 20
_Turns = list[list[Reply]]


def run(options: argparse.Namespace) -> Result:
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> Result:
    model = by_name(options.model)
    wanted = {str(stages): (stages, 1) for stages in options.stages}
    if options.rings > 1:
        wanted["rings"] = (1, options.rings)
    cores = os.cpu_count() or 1
    used = max(stages * replicas for stages, replicas in wanted.values())
    rest = list(range(used, cores)) or [cores - 1]
    found: dict[str, dict[str, list[Result]]] = {}
    async with AsyncExitStack() as stack:
        made: dict[str, LocalCluster] = {}
        for name, (stages, replicas) in wanted.items():
            deployment = Deployment(_MODEL, model, stages=stages, replicas=replicas, spec={"max_rows": 16})
            made[name] = await stack.enter_async_context(cluster([deployment]))
            pin_stages(made[name], list(range(min(used, cores))), rest)
        if can_pin():
            os.sched_setaffinity(0, rest)
        for number in range(options.rounds):
            for name, each in made.items():
                modes = list(_ROUTED if name == "rings" else _CACHED)
                for mode in modes if number % 2 == 0 else reversed(modes):
                    progress(f"round {number + 1} of {options.rounds}: {name}, {mode}")
                    told = found.setdefault(name, {}).setdefault(mode, [])
                    told.append(await _round(each.http_url, options, mode, crowd=name == "rings"))
    rings = found.pop("rings", {})
    return {
        "model": options.model,
        "conversations": {"cached": options.conversations, "routed": options.crowd},
        "turns": options.turns,
        "stages": found,
        "rings": {"count": options.rings, "rounds": rings},
    }


_CACHED = ("on", "off")
_ROUTED = ("by prefix", "by load")
_COLORS = dict(zip((*_CACHED, *_ROUTED), ("C0", "C1", "C2", "C3"), strict=True))


async def _round(url: str, options: argparse.Namespace, mode: str, *, crowd: bool) -> Result:
    """All conversations of one round, which begins with nothing that could be found."""
    await _settled(url)
    before = await get_metrics(url, _MODEL)
    word = secrets.token_hex(4)
    places = asyncio.Semaphore(options.crowd if crowd else options.at_once)
    begun = time.perf_counter()
    turns: _Turns = await asyncio.gather(
        *(
            _conversation(url, options, mode, word, number, places)
            for number in range(options.crowd if crowd else options.conversations)
        )
    )
    seconds = time.perf_counter() - begun
    after = await get_metrics(url, _MODEL)
    return _told(turns, seconds, {name: after[name] - before.get(name, 0) for name in after}, after)


async def _conversation(
    url: str, options: argparse.Namespace, mode: str, word: str, number: int, places: asyncio.Semaphore
) -> list[Reply]:
    """One turn after the other; what went wrong ends it."""
    generator = random.Random(number)
    system = prompt(random.Random(0), options.system_words)
    messages: list[dict[str, str]] = []
    replies: list[Reply] = []
    document = options.document_words if mode in _ROUTED else 0
    for turn in range(options.turns):
        words = options.words + (document if turn == 0 else 0)
        messages.append({"role": "user", "content": prompt(generator, words)})
        first = secrets.token_hex(4) if mode == "off" else word
        body: dict[str, Any] = {
            "model": _MODEL,
            "messages": [{"role": "system", "content": f"{first} {system}"}, *messages],
            "max_tokens": options.tokens,
            "temperature": 0,
            "stream_options": {"include_usage": True},
        }
        if mode == "by load":
            body["prompt_cache_key"] = ""
        async with places:
            replies.append(await ask(url, body))
        if not replies[-1].ok:
            break
        messages.append({"role": "assistant", "content": replies[-1].text})
        await asyncio.sleep(generator.uniform(0, options.pause))
    return replies


async def _settled(url: str) -> None:
    """Returns when nothing of the round before is under way."""

    async def busy() -> float:
        told = await get_metrics(url, _MODEL)
        return told["num_requests_waiting"] + told["num_requests_running"]

    await _until_zero(busy)


async def _until_zero(look: Callable[[], Awaitable[float]]) -> None:
    for _ in range(100):
        if not await look():
            return
        await asyncio.sleep(0.05)


def _told(turns: _Turns, seconds: float, change: dict[str, float], after: dict[str, float]) -> Result:
    good = [reply for replies in turns for reply in replies if reply.ok]
    later = [reply for replies in turns for reply in replies[1:] if reply.ok]
    queried = change.get("prefix_cache_queries", 0.0)
    return {
        "failed": sum(not reply.ok for replies in turns for reply in replies),
        "ttft_first_ms": summary([replies[0].ttft * 1e3 for replies in turns if replies and replies[0].ok]),
        "ttft_later_ms": summary([reply.ttft * 1e3 for reply in later]),
        "prompt_tokens": sum(reply.prompt_tokens for reply in good),
        "computed_tokens": sum(reply.prompt_tokens - reply.cached_tokens for reply in good),
        "hit_rate": round(change.get("prefix_cache_hits", 0.0) / queried, 4) if queried else 0.0,
        "tokens_per_second": round(sum(reply.completion_tokens for reply in good) / seconds, 2),
        "seconds": round(seconds, 3),
        "kept_tokens": after.get("prefix_cache_tokens", 0.0),
        "kept_mib": round(after.get("prefix_cache_bytes", 0.0) / _MIB, 2),
        "routed": change.get("requests_routed_by_key", 0.0),
        "routed_hits": change.get("routed_by_key_hits", 0.0),
        "moved": change.get("routed_by_key_moved", 0.0),
    }


def ratio(rounds: dict[str, list[Result]], mode: str, other: str, *path: str) -> float | None:
    """Of a figure in one mode against another, median over rounds; None without one."""
    found = [one for one in by_round(rounds, mode, other, *path) if one is not None]
    return round(median(found), 3) if found else None


def by_round(rounds: dict[str, list[Result]], mode: str, other: str, *path: str) -> list[float | None]:
    """The same, of each round."""

    def figure(told: Any) -> float:
        for name in path:
            told = told.get(name, 0.0)
        return float(told)

    return ratios(
        [figure(one) for one in rounds.get(mode, ())], [figure(one) for one in rounds.get(other, ())]
    )


def checks(result: Result) -> list[Check]:
    found = []
    for stages, rounds in result["stages"].items():
        later = by_round(rounds, "on", "off", "ttft_later_ms", "p50")
        found.append(Check(f"TTFT of later turns with kept prefixes, {_stages(stages)}", later, 0.5))
        speed = by_round(rounds, "on", "off", "tokens_per_second")
        found.append(Check(f"tokens/s with kept prefixes, {_stages(stages)}", speed, 1.0, True))
    rounds = result["rings"]["rounds"]
    if rounds:
        computed = by_round(rounds, "by prefix", "by load", "computed_tokens")
        found.append(Check("prompt tokens computed by prefix, against by load", computed, 1.0))
    everything = [*result["stages"].values(), rounds]
    failures = zip(*(mode for one in everything for mode in one.values()), strict=True)
    failed = [sum(each["failed"] for each in of_round) for of_round in failures]
    return [*found, Check("requests that failed", failed, 0)]


_COLUMNS = ("TTFT first", "later p50", "p95", "prompt", "computed", "hits", "tok/s", "kept MiB")


def tables(result: Result) -> list[Table]:
    cached = [
        [f"{_stages(stages)}, {mode}", *_row(rounds[mode])]
        for stages, rounds in result["stages"].items()
        for mode in _CACHED
    ]
    routed = [
        [mode, *_row(rounds), sum(each["moved"] for each in rounds)]
        for mode, rounds in result["rings"]["rounds"].items()
    ]
    count, turns = result["conversations"], result["turns"]
    shown = [Table(f"{count['cached']} conversations of {turns} turns, ms", ["", *_COLUMNS], cached)]
    if routed:
        title = f"{result['rings']['count']} rings, {count['routed']} conversations of {turns} turns, ms"
        shown.append(Table(title, ["", *_COLUMNS, "moved"], routed))
    return shown


def _stages(count: str) -> str:
    return "1 stage" if count == "1" else f"{count} stages"


def _row(rounds: list[Result]) -> list[object]:
    """Medians over rounds; counts are of one round."""
    first = [each["ttft_first_ms"].get("p50", 0.0) for each in rounds]
    later = [[each["ttft_later_ms"].get(part, 0.0) for each in rounds] for part in ("p50", "p95")]
    rest = ("prompt_tokens", "computed_tokens", "hit_rate", "tokens_per_second", "kept_mib")
    return [
        round(median(first), 1),
        *(round(median(each), 1) for each in later),
        *(median([each[name] for each in rounds]) for name in rest),
    ]


def chart(result: Result, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    groups = {_stages(stages): rounds for stages, rounds in result["stages"].items()}
    if result["rings"]["rounds"]:
        groups[f"{result['rings']['count']} rings"] = result["rings"]["rounds"]
    for place, rounds in enumerate(groups.values()):
        for index, (mode, each) in enumerate(rounds.items()):
            style = {"width": 0.38, "color": _COLORS[mode]}
            first = [one["ttft_later_ms"].get("p50", 0.0) for one in each]
            left.bar(place + index * 0.4, median(first), **style)
            right.bar(place + index * 0.4, median([one["computed_tokens"] for one in each]), **style)
    for axes, title in ((left, "ms to the first token, later turns"), (right, "prompt tokens computed")):
        axes.set_xticks([place + 0.2 for place in range(len(groups))], list(groups))
        axes.set_ylabel(title)
    shown = [mode for rounds in groups.values() for mode in rounds]
    left.legend([left.patches[shown.index(mode)] for mode in dict.fromkeys(shown)], dict.fromkeys(shown))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="6x128")
    parser.add_argument("--stages", type=numbers, default=[1, 2])
    parser.add_argument("--rings", type=int, default=2, help="of one stage each; 1: without that part")
    parser.add_argument("--conversations", type=int, default=3, help="on one ring")
    parser.add_argument("--at-once", type=int, default=1, help="how many of their questions are under way")
    parser.add_argument("--crowd", type=int, default=8, help="side by side on several rings")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-words", type=int, default=256, help="of the system prompt that all share")
    parser.add_argument("--words", type=int, default=48, help="of every question")
    parser.add_argument("--document-words", type=int, default=96, help="more in first questions, rings")
    parser.add_argument("--tokens", type=int, default=16, help="of every answer")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds at most before a question")
    parser.add_argument("--rounds", type=int, default=3)


BENCHMARK = Benchmark(
    "prefix",
    (__doc__ or "").splitlines()[0],
    options,
    run,
    tables,
    chart,
    checks,
    quick=("--rounds", "1", "--turns", "3", "--conversations", "2", "--crowd", "4", "--system-words", "192"),
    quick_seconds=90,
)
