"""One request on a ring of three: tokens guessed and verified several a step, against one token a step.

The same requests take turns on one ring, once as the deployment speculates and once with `num_draft_tokens`
0. The answer of the first kind repeats itself, as greedy answers of a model with random weights do sooner or
later; it begins with what the same model has said already. Those of the second kind are drawn at temperature
2, so that next to no guess is right.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench.clusters import Deployment, cluster
from bench.frame import Result, Table, progress
from bench.models import by_name
from bench.verdict import Check, ratios
from sealring.cli.calls.client import inference
from sealring.v1 import inference_pb2

QUICK = ("--rounds", "1", "--tokens", "64")
QUICK_SECONDS = 120.0

KINDS = {"repeats": inference_pb2.Sampling(), "at random": inference_pb2.Sampling(temperature=2.0, seed=1)}


async def run(options: argparse.Namespace) -> Result:
    """Tokens a second of each round, by kind, with and without; tokens guessed and right; whether the answers
    were the same."""
    model = by_name(options.model)
    deployment = Deployment("bench", model, 3, spec={"speculate": True, "max_rows": 4})
    found: dict[str, dict[str, list[float]]] = {kind: {"with": [], "without": []} for kind in KINDS}
    counted: dict[str, list[list[int]]] = {kind: [] for kind in KINDS}
    same = True
    async with cluster([deployment]) as made, inference(made.grpc_address) as client:
        text = "one two three"
        for _ in range(2):
            text += (await _ask(client.stub, text, KINDS["repeats"], options.tokens))[0]
        for number in range(options.rounds):
            for kind, sampling in KINDS.items():
                answers = {}
                for way in ("with", "without") if number % 2 else ("without", "with"):
                    asked = inference_pb2.Sampling()
                    asked.CopyFrom(sampling)
                    if way == "without":
                        asked.num_draft_tokens = 0
                    answers[way], rate, drafts = await _ask(client.stub, text, asked, options.tokens)
                    found[kind][way].append(rate)
                    progress(f"{kind}, {way} drafts: {rate:.1f} tokens/s, {drafts[1]} of {drafts[0]} right")
                    if way == "with":
                        counted[kind].append(drafts)
                same = same and answers["with"] == answers["without"]
    return {"model": options.model, "tokens": options.tokens, "kinds": found, "drafts": counted, "same": same}


async def _ask(
    stub: Any, text: str, sampling: inference_pb2.Sampling, tokens: int
) -> tuple[str, float, list[int]]:
    """The answer, tokens a second after its first piece, and tokens guessed and right."""
    envelope = inference_pb2.Envelope(clear=inference_pb2.Prompt(text=text, sampling=sampling))
    request = inference_pb2.GenerateRequest(model="bench", envelope=envelope, max_tokens=tokens)
    answer, first, counted, drafts = "", 0.0, 0, [0, 0]
    async for event in stub.Generate(request):
        if event.HasField("delta"):
            answer += event.delta.text
            if not first:
                first, counted = time.perf_counter(), event.delta.tokens
        elif event.HasField("finished"):
            drafts = [event.finished.drafted_tokens, event.finished.accepted_tokens]
    return answer, (tokens - counted) / (time.perf_counter() - first), drafts


def _gains(result: Result, kind: str) -> list[float | None]:
    return ratios(result["kinds"][kind]["with"], result["kinds"][kind]["without"])


def checks(result: Result) -> list[Check]:
    return [
        Check("drafts, one answer that repeats, 3 stages", _gains(result, "repeats"), 2.0, True),
        Check("drafts that are wrong, 3 stages", _gains(result, "at random"), 0.97, True),
    ]


def tables(result: Result) -> list[Table]:
    rows = []
    for kind, rates in result["kinds"].items():
        told = [" ".join(f"{rate:.1f}" for rate in rates[way]) for way in ("with", "without")]
        rows.append([kind, *told, " ".join(map(str, _gains(result, kind)))])
    return [Table("Tokens a second, round by round", ["answer", "with", "without", "ratio"], rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
