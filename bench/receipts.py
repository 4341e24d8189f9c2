"""Receipts: what they cost a token, by turns with answers that have none, and counted by themselves.

A ring of three answers with and without receipts, pair after pair: CPU seconds of all of its processes, and
tokens a second. Beside that the work for receipts alone is timed in this process, because it is far below the
noise of whole answers. Its target is 0.5 % of an answer's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.clusters import Deployment, cluster, cpu_seconds, family
from bench.frame import Result, Table, progress
from bench.models import by_name
from bench.openai_client import ask
from bench.serve import prompt
from bench.verdict import Check
from sealring.mesh.errors import Unavailable

TARGET = 0.005
QUICK = ("--rounds", "1", "--pairs", "1", "--tokens", "50")
QUICK_SECONDS = 90.0

_WORDS = 8


async def run(options: argparse.Namespace) -> Result:
    deployment = Deployment("bench", by_name(options.model), stages=3, spec={"max_rows": options.streams})
    rounds = []
    async with cluster([deployment]) as made:
        processes = [one for pid in made.processes.values() for one in family(pid)]

        async def turn(seed: int, *, receipts: bool) -> dict[str, float]:
            generator = random.Random(seed)
            before, begun = cpu_seconds(processes), time.perf_counter()
            await _answers(made.http_url, generator, options, receipts=receipts)
            return {"cpu_s": cpu_seconds(processes) - before, "s": time.perf_counter() - begun}

        await turn(0, receipts=True)
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            spent: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
            for pair in range(options.pairs):
                seed = 1 + number * options.pairs + pair  # a prompt that came before would be cached
                for way in ("with", "without") if pair % 2 else ("without", "with"):
                    spent[way].append(await turn(seed * 2 + (way == "with"), receipts=way == "with"))
            rounds.append(
                {way: {key: sum(one[key] for one in each) for key in each[0]} for way, each in spent.items()}
            )
    tokens = options.streams * options.tokens * options.pairs
    own = own_work(options.tokens)
    return {
        "model": options.model,
        "tokens_a_round": tokens,
        "answer": options.tokens,
        "rounds": rounds,
        "own": own,
    }


async def _answers(
    url: str, generator: random.Random, options: argparse.Namespace, *, receipts: bool
) -> None:
    """Raises Unavailable (BENCH_FAILED) where an answer fails or is short."""

    async def one(text: str) -> None:
        body = {
            "model": "bench",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": options.tokens,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        headers = [f"sealring-receipt: {secrets.token_hex(16)}"] if receipts else []
        reply = await ask(url, body, headers=headers)
        if not reply.ok or reply.completion_tokens != options.tokens:
            raise Unavailable(f"an answer failed: {reply.error}", reason="BENCH_FAILED")

    await asyncio.gather(*(one(prompt(generator, _WORDS)) for _ in range(options.streams)))


def own_work(tokens: int) -> dict[str, float]:
    """Microseconds of CPU of this process that receipts take at head, tail and gateway together.

    `token_us` is for each token. `answer_us` is for each answer of `tokens` tokens: hashes, both statements
    and signatures, and the receipt as JSON with a roster of 4 KiB.
    """
    from sealring.gateway.rings.receipts import RecentRosters
    from sealring.mesh.crypto.identity import SoftwareSigner
    from sealring.mesh.crypto.keys import Label
    from sealring.mesh.receipt.form import receipts_json
    from sealring.mesh.receipt.statement import Place, Statement, tail_statement
    from sealring.mesh.ring.composition import ResolvedStep
    from sealring.node.engine.receipts import Delivered, Sampled, bring
    from sealring.v1 import inference_pb2 as inference

    some, row, signer, rosters = bytes(32), 1, SoftwareSigner.generate(), RecentRosters()
    step = ResolvedStep(1, some, (), (), 0, (row,), (row,))
    delivered, sampled = Delivered(some, 9, 0), Sampled()
    sampled.begin(row, 1, some, 0)
    rosters.remember(some, (bytes(4096), bytes(1024)))
    hashes = (
        "roster_hash",
        "model_digest",
        "nonce",
        "request",
        "text",
        "reasoning",
        "calls",
        "order",
        "sampled",
    )
    numbers = dict.fromkeys(("roster_version", "epoch", "choice", "given", "opened", "finished"), 0)
    words = dict.fromkeys(("cluster", "ring", "deployment"), "bench") | {"finish": "length"}
    places = tuple(Place(f"{rank}" * 52, (rank, rank + 1), 10) for rank in range(3))
    given: dict[str, Any] = {**dict.fromkeys(hashes, some), **numbers, **words, "members": places}
    statement = Statement(**given, row=row, prompt_tokens=9, tokens=tokens, earlier=())

    def token() -> None:
        delivered.token(7)
        delivered.add(" word", None)
        bring(sampled.places(step), [7])

    def end() -> None:
        digests = delivered.digests(row, inference.FINISH_REASON_LENGTH)
        head = replace(statement, sampled=digests.sampled)
        tail = tail_statement(replace(statement, sampled=sampled.digests(row, tokens).sampled), 3)
        receipt = inference.Receipt()
        receipt.head.statement = head.encode()
        receipt.head.signature = signer.sign(Label.RECEIPT, receipt.head.statement)
        receipt.tail.signature = signer.sign(Label.RECEIPT, tail.encode())
        rosters.attach([receipt])
        json.dumps(receipts_json([receipt]))

    each = _timed(token, tokens)
    return {"token_us": each * 1e6, "answer_us": _timed(end, 200) * 1e6}


def _timed(work: Callable[[], Any], times: int) -> float:
    """CPU seconds of one call."""
    begun = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - begun) / times


def checks(result: Result) -> list[Check]:
    """The receipts' own work to the CPU of an answer without them, round by round.

    The ratio by turns is shown and has no target: two equal turns differ by 2 %.
    """
    shares = [round(one, 5) for one in _shares(result)]
    return [Check("own CPU of receipts / CPU of an answer", shares, TARGET)]


def _shares(result: Result) -> list[float]:
    own = result["own"]["token_us"] + result["own"]["answer_us"] / result["answer"]
    return [own / 1e6 / (one["without"]["cpu_s"] / result["tokens_a_round"]) for one in result["rounds"]]


def tables(result: Result) -> list[Table]:
    tokens = result["tokens_a_round"]
    rows = [
        [
            number,
            *(round(one[way]["cpu_s"] / tokens * 1e6, 1) for way in ("without", "with")),
            round(one["with"]["cpu_s"] / one["without"]["cpu_s"], 4),
            *(round(tokens / one[way]["s"], 1) for way in ("without", "with")),
        ]
        for number, one in enumerate(result["rounds"], 1)
    ]
    own = [[round(result["own"][key], 2) for key in ("token_us", "answer_us")]]
    return [
        Table("by turns", ["round", "CPU us a token", "with", "ratio", "tokens/s", "with"], rows),
        Table("receipts alone, CPU", ["us a token", "us an answer"], own),
    ]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=8, help="turns of each kind in a round")
    parser.add_argument("--streams", type=int, default=4, help="answers at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
