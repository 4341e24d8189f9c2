"""Requests on a ring with drafts verified several at a time, against one token per step.

The model repeats a cycle of tokens (bench.models), and picks others by chance when it samples. A single
request is one of three kinds: its answer repeats its prompt (a summary that quotes), or differs in every
twelfth token (an edit), or is sampled uniformly from the cycle. The last prompt holds most pairs of these
tokens, so drafts are offered and are wrong. Four requests take all rows of the ring, which then drafts
nothing. The same requests take turns on one ring, with drafts and with `num_draft_tokens` 0.

With `--draft` a small model, an MTP head or a drafter that reads hidden states guesses too, and nothing
repeats (bench.drafted). With `--held` the demo model answers in a JSON schema's form: the names of members
are forced, so they are guessed before they are said.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
from typing import Any

from bench import drafted
from bench.clusters import Deployment, cluster
from bench.drafters import LAYERS
from bench.frame import Result, Table, progress
from bench.models import DEMO, SAID, SHAPES, printable, random_model
from bench.verdict import Check, ratios
from sealring.cli.calls.gateway import inference
from sealring.v1 import inference_pb2

QUICK = ("--rounds", "1", "--tokens", "64")
QUICK_SECONDS = 120.0

SAYS = 64
ROWS = 4
KINDS = ("quotes", "edits", "wrong", "full")
DRAFTED = ("drafted", "wrong", "full")
DRAFTED_SHOWN = {
    "drafted": "drafts of a small model",
    "wrong": "drafts of a small model that are wrong",
    "full": "a small model, all rows taken",
}
_HELD: dict[str, Any] = {
    "type": "array",
    "minItems": 4,
    "maxItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "city_name": {"type": "string", "maxLength": 12},
            "temperature": {"type": "integer", "minimum": 0, "maximum": 60},
            "condition": {"enum": ["sunny", "rainy", "cloudy"]},
            "is_daytime": {"type": "boolean"},
        },
        "required": ["city_name", "temperature", "condition", "is_daytime"],
        "additionalProperties": False,
    },
}
SHOWN = {
    "quotes": "drafts, one answer that quotes",
    "edits": "drafts, one that edits",
    "wrong": "drafts that are wrong",
    "full": "drafts, all rows taken",
}
TARGETS = {"held": 1.2, "quotes": 2.0, "edits": 2.0, "wrong": 0.97, "full": 0.99}
MTP = "mtp"
GAINS = {2: 1.9, 3: 2.2}
"""The wanted gain by stages, with a draft model whose guesses are right with probability 0.7."""
HIDDEN_GAINS = {2: 2.5, 3: 2.8}
"""The wanted gain by stages, with a drafter that guesses 8 tokens in a pass. Each is right with probability
0.89, so 5 of them are in the mean."""


async def run(options: argparse.Namespace) -> Result:
    """Tokens a second of each round, by kind, with and without; tokens guessed and right; whether the answers
    were the same."""
    names = ("held",) if options.held else DRAFTED if options.draft else KINDS
    kinds = {
        f"{name} {right}" if len(options.right) > 1 else name: (name, right)
        for name in names
        for right in options.right
        if options.kind in ("", name)
    }
    spec: dict[str, Any] = {"speculate": True, "max_rows": options.rows}
    if options.draft:
        if options.draft == MTP:
            model = drafted.model_with_head(SHAPES[options.model])
        elif options.draft in LAYERS:
            model, drafter = drafted.model_with_drafter(SHAPES[options.model], options.draft)
            spec["draft"] = str(drafter)
        else:
            model, small = drafted.models(SHAPES[options.model], SHAPES[options.draft])
            spec["draft"] = str(small)
    elif options.held:
        model = DEMO
    else:
        model = random_model(dataclasses.replace(SHAPES[options.model], says=SAYS))
    deployment = Deployment("bench", model, options.stages, spec=spec)
    found: dict[str, dict[str, list[float]]] = {kind: {"with": [], "without": []} for kind in kinds}
    counted: dict[str, list[list[int]]] = {kind: [] for kind in kinds}
    same = True
    async with cluster([deployment], gpus=options.gpus) as made, inference(made.grpc_address) as client:
        for number in range(options.rounds + 1):  # in the first one prompts are computed that are kept then
            for kind, (name, right) in kinds.items():
                answers = {}
                for way in ("with", "without") if number % 2 else ("without", "with"):
                    rows = options.rows if name == "full" else 1
                    requests = [
                        _request(name, options, number * rows + row, right, drafts=way == "with")
                        for row in range(rows)
                    ]
                    got = await asyncio.gather(*(drafted.answer(client.stub, each) for each in requests))
                    rate = sum(each.rate for each in got)
                    guessed, true = (sum(each) for each in zip(*(one.drafts for one in got), strict=True))
                    answers[way] = [each.text for each in got]
                    if number:
                        found[kind][way].append(rate)
                        progress(f"{kind}, {way} drafts: {rate:.1f}/s, {true} of {guessed} right")
                    if number and way == "with":
                        counted[kind].append([guessed, true])
                same = same and answers["with"] == answers["without"]
    return {
        "model": options.model,
        "draft": options.draft,
        "right": options.right,
        "stages": options.stages,
        "rows": options.rows,
        "gpus": options.gpus,
        "tokens": options.tokens,
        "kinds": found,
        "drafts": counted,
        "same": same,
    }


def _request(
    kind: str, options: argparse.Namespace, number: int, right: float, *, drafts: bool
) -> inference_pb2.GenerateRequest:
    if options.draft:
        right = 0.0 if kind == "wrong" else right
        return drafted.request("bench", number, options.tokens, right, drafts=drafts)
    if kind == "held":
        return _held(options, drafts=drafts)
    said = printable(SAYS)
    sampling = inference_pb2.Sampling(seed=1)
    ids = said * 2
    if kind == "edits":
        sampling.temperature = SAID / 6.6  # exp(6.6) is 11 times what 63 others have
    elif kind == "wrong":
        sampling.temperature = 2.0
        ids = random.Random(1).choices(said, k=1024)
    if not drafts:
        sampling.num_draft_tokens = 0
    prompt = inference_pb2.Prompt(tokens=inference_pb2.TokenIds(ids=ids), sampling=sampling)
    envelope = inference_pb2.Envelope(clear=prompt)
    return inference_pb2.GenerateRequest(model="bench", envelope=envelope, max_tokens=options.tokens)


def _held(options: argparse.Namespace, *, drafts: bool) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.Sampling()
    if not drafts:
        sampling.num_draft_tokens = 0
    asked = "What is the weather in four cities? Answer in JSON."
    message = inference_pb2.ChatMessage(role="user", content=asked)
    chat = inference_pb2.Chat(messages=[message])
    prompt = inference_pb2.Prompt(chat=chat, schema=json.dumps(_HELD), sampling=sampling)
    envelope = inference_pb2.Envelope(clear=prompt)
    return inference_pb2.GenerateRequest(model="bench", envelope=envelope, max_tokens=options.tokens)


def _gains(result: Result, kind: str) -> list[float | None]:
    return ratios(result["kinds"][kind]["with"], result["kinds"][kind]["without"])


def checks(result: Result) -> list[Check]:
    targets, shown = TARGETS, SHOWN | {"held": "drafts, one answer held to a schema"}
    if result.get("draft"):
        gains = HIDDEN_GAINS if result["draft"] in LAYERS else GAINS
        targets = TARGETS | {"drafted": gains.get(result["stages"], 1.0), "wrong": 0.98}
        shown = DRAFTED_SHOWN
    found = {kind: kind.split()[0] for kind in result["kinds"]}
    return [Check(shown[name], _gains(result, kind), targets[name], True) for kind, name in found.items()]


def tables(result: Result) -> list[Table]:
    rows = []
    for kind, rates in result["kinds"].items():
        shown = [" ".join(f"{rate:.1f}" for rate in rates[way]) for way in ("with", "without")]
        right = " ".join(f"{right}/{drafted}" for drafted, right in result["drafts"][kind])
        rows.append([kind, *shown, " ".join(map(str, _gains(result, kind))), right])
    columns = ["answer", "with", "without", "ratio", "drafts right"]
    return [Table("Tokens a second, round by round", columns, rows)]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="12x256", choices=[name for name in SHAPES if "qwen" not in name])
    small = [name for name, shape in SHAPES.items() if shape.kind == "llama"]
    parser.add_argument(
        "--draft",
        default="",
        choices=["", *small, MTP, *LAYERS],
        help="a model that guesses, too; mtp: an MTP head; a drafter's kind: one that reads hidden states",
    )
    parser.add_argument("--held", action="store_true", help="the demo model in a schema's form")
    parser.add_argument(
        "--right", type=float, nargs="+", default=[0.7], help="probabilities that its guesses are right"
    )
    parser.add_argument("--kind", default="", choices=["", *SHOWN, "drafted"], help="of answers, alone")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--rows", type=int, default=ROWS, help="of the ring; all answer at once for `full`")
    parser.add_argument("--gpus", type=int, default=0, help="node n computes on GPU n modulo this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
