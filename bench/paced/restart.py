"""Agents whose ring is started again in the middle of their sessions, in virtual time (bench.paced.virtual).

Members have the SSDs of the data file. The same sessions run without disks, so that every prompt is computed
anew after the restart. The time in which processes start is not in it.
"""

from __future__ import annotations

from statistics import mean

from bench.frame import Result, Table
from bench.paced.disk import DiskTime
from bench.paced.figures import figures
from bench.paced.virtual import VirtualMacs, disk_of, sessions
from bench.summaries import summary
from sealring.mesh.errors import FailedPrecondition
from sealring.v1 import control_pb2 as control

PROMPT = 20_000
"""Tokens of the prompt that is asked for again."""

COLD = 0.15
"""Target: its first token after a restart, against cold."""

COLUMNS = (
    "load",
    "turn",
    "ttft p50 s",
    "ttft max s",
    "new tokens",
    "without disks",
    "max",
    "new tokens there",
)


def run(text: str, model: str, counts: list[int], turns: int) -> Result:
    """`prompt`: seconds to its first token. `loads`: figures of the sessions of each count of agents.

    Raises FailedPrecondition (NO_STATE_SIZES) for a model whose states are no keys and values.
    """
    if figures().models[model].kind == "delta":
        raise FailedPrecondition(
            f"no bytes of recurrent states are known of {model}",
            hint="choose a model that has keys and values alone",
            reason="NO_STATE_SIZES",
        )
    disk = disk_of(text, model)
    loads = []
    for count in counts:
        found = [
            sessions(text, model, count, count, turns=turns, rendered=True, disk=each, restart=True)
            for each in (disk, None)
        ]
        with_disks, without = found
        loads.append(
            {
                "load": f"{count} agents",
                "computed_again": round(with_disks["again"], 4),
                "after_restart": round(with_disks["after_restart"], 4),
                "turns": [
                    {"disks": _of(one), "without": _of(other)}
                    for one, other in zip(with_disks["by_turn"], without["by_turn"], strict=True)
                ],
            }
        )
    return {"prompt": _prompt(text, model, disk), "loads": loads, "middle": 1 + turns // 2}


def _of(turn: list[tuple[float, int]]) -> Result:
    return {"ttft_s": summary([seconds for seconds, _ in turn]), "new": round(mean(new for _, new in turn))}


def _prompt(text: str, model: str, disk: DiskTime) -> Result:
    """One prompt alone: cold, and with another last token once every process was started again."""
    ring = VirtualMacs(text, model, support=control.PREFIX_SUPPORT_ANY, rows=1, disk=disk)
    same = b"same" * (PROMPT - 1)
    for name in ("cold", "again"):
        ring.ask(name, PROMPT, 2, same + name[:4].encode() * 3)
        ring.run()
        ring.attach()
    return {"cold_s": round(ring.first("cold"), 2), "again_s": round(ring.first("again"), 2)}


def tables(title: str, runs: list[Result]) -> list[Table]:
    """Tables of runs that have their `cluster` and `model`."""
    prompts, turns, shares = [], [], []
    for one in runs:
        name, prompt = f"{one['cluster']}, {one['model']}", one["prompt"]
        prompts.append([name, prompt["cold_s"], prompt["again_s"], prompt["again_s"] / prompt["cold_s"]])
        for load in one["loads"]:
            shares.append([name, load["load"], load["computed_again"], load["after_restart"]])
            for number, turn in enumerate(load["turns"], 1):
                cells = [
                    cell
                    for way in ("disks", "without")
                    for cell in (
                        *(turn[way]["ttft_s"].get(part) for part in ("p50", "max")),
                        turn[way]["new"],
                    )
                ]
                label = f"{load['load']}, restarted before" if number == one["middle"] else load["load"]
                turns.append([f"{name}, {label}", number, *cells])
    again = ["ring", "agents", "prefix tokens computed again", "in the first turn after the restart"]
    return [
        Table(f"{title}: a prompt of {PROMPT} tokens", ["ring", "cold s", "restarted s", "of cold"], prompts),
        Table(f"{title}: turns", list(COLUMNS), turns),
        Table(f"{title}: shares", again, shares),
    ]
