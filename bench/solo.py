"""One request at a time through the gateway and a ring of one, against bare mlx-lm: time between tokens.

The benchmark `peers` with one request and one core, and with its options and tables. Every system computes on
that core; gateway, coordinator and client use others. mlx-lm is measured as it is, and once more with the
scheduling policy that an engine sets for itself (Linux). The second ratio is the cost of the path through
gateway, daemon and engine.
"""

from __future__ import annotations

import argparse
import os

from bench import peers
from bench.clusters import cores_after
from bench.frame import Result
from bench.verdict import Check, ratios

run, tables = peers.run, peers.tables

QUICK = ("--rounds", "4")


def checks(result: Result) -> list[Check]:
    systems = result["systems"]
    ours = systems[peers.SYSTEMS["one"]]["token_ms"]
    return [
        Check(f"inter-token time, sealring, ring of one / {peers.SYSTEMS[short]}", ratios(ours, other), 1.10)
        for short in ("alone", "batched")
        if (other := systems.get(peers.SYSTEMS[short], {}).get("token_ms"))
    ]


def options(parser: argparse.ArgumentParser) -> None:
    peers.options(parser)
    others = cores_after(1)
    systems = ["alone", *(["batched"] if hasattr(os, "SCHED_BATCH") else []), "one"]
    one = {"requests": 1, "tokens": 96, "rounds": 12, "systems": systems, "cores": [0]}
    parser.set_defaults(model="12x256", gateway_cores=others, client_cores=others, **one)
