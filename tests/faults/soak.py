"""`make soak`: requests come in an open loop while a random fault happens every 10 s.

    make soak ARGS="--quick"
    make soak ARGS="--seconds 600 --requests 3000 --seed 7"

The printed seed makes the same faults at the same seconds again, and the same requests if there are as many.
There are fewer than asked for where the ring is slow: it is measured first, and gets a quarter of what it can
answer. Of ten seconds a fault may take five; in the other five the ring also answers what has waited, beside
the machine's starting anew what was killed.

A client that loses the gateway asks it again; one that finds the queue full comes again when it may.
Exits with 1 if an answer was lost, wrong or late, or if the memory of a process grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
from acts import ACTS
from answering import Answer, Progress, ask_clear, ask_sealed
from harness import MODULES, Outcome, SeparatePlace, family, separate_place

FAULTS = (
    *(f"kill {part} {rank}" for part in ("engine", "carrier", "daemon") for rank in range(3)),
    *(f"stop {part} {rank} 5" for part in ("engine", "carrier", "daemon") for rank in range(3)),
    *(f"reset {what}" for what in ("ring", "control", "session", "watch")),
    *("kill gateway", "stop gateway 5", "reset client"),
    *("kill coordinator", "stop coordinator 5", "cut daemon 1 both 4", "cut coordinator both 4"),
    *("lose daemon 1 0.05 5", "delay daemon 1 0.1 5", "leave"),
)

LOGS = Path(__file__).parents[2] / "build" / "soak"
"""The folder with the logs of the last run's components."""

EVERY_SECONDS = 10.0
SHARE = 0.25
"""The rate of requests, as a part of the rate at which the undisturbed ring answers."""
MEASURED = 8
"""Answers of each kind by which that is measured."""
WARM_SECONDS = 300.0
"""Until memory has to be flat; of a run of less than three times that it tells nothing."""
GROWTH = 1.15, 16 << 20
"""The share and the bytes on top of it by which the most that a process needs may be above what it was. What
it needs at other times says little: one that was just killed has nothing yet."""


async def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="sealring-soak-") as folder:
        async with separate_place(Path(folder) / "state") as place:
            able = await speed(place)
            requests = min(options.requests, int(SHARE * able * options.seconds))
            rate = requests / options.seconds
            say(
                f"seed {options.seed}: {requests} requests in {options.seconds:g} s, {rate:.2f} a second of "
                f"{able:.1f} that the ring can answer"
            )
            outcome, grown = await soak(place, options.seed, options.seconds, requests)
            shutil.copytree(place.cluster.state_dir / "logs", LOGS, dirs_exist_ok=True)
    late = outcome.errors.pop("DEADLINE_EXCEEDED", 0)
    errors = ", ".join(f"{count} x {name}" for name, count in outcome.errors.items()) or "none"
    say(
        f"{outcome.requests} requests, asked again {outcome.again} times, told {outcome.full} times of a "
        f"full queue: lost {outcome.lost} ({errors}), wrong {outcome.wrong}, hung {late}"
    )
    say(
        "\n".join(
            grown or ["memory: flat" if options.seconds >= 3 * WARM_SECONDS else "memory: too short to tell"]
        )
    )
    return int(bool(outcome.lost or outcome.wrong or late or grown))


async def one(place: SeparatePlace, kind: str, progress: Progress) -> Answer:
    answer, (name, _, sealed) = Answer(), kind.partition(", ")
    if sealed:
        await ask_sealed(place.client, name, answer, progress, patient=True)
    else:
        await ask_clear(place.ring, name, answer, progress, again=True, patient=True)
    return answer


def kinds(place: SeparatePlace) -> list[str]:
    return [kind for kind in place.expected if kind != "http"]


async def speed(place: SeparatePlace) -> float:
    """Answers a second of the ring while nothing breaks, each kind as often as the others."""
    begun, asked = time.monotonic(), kinds(place) * MEASURED
    await asyncio.gather(*(one(place, kind, Progress()) for kind in asked))
    return len(asked) / (time.monotonic() - begun)


async def soak(place: SeparatePlace, seed: int, seconds: float, requests: int) -> tuple[Outcome, list[str]]:
    """Returns the outcome of the answers, and the processes that have grown."""
    outcome, memory = Outcome(), defaultdict[str, list[tuple[float, int]]](list)
    begun, chance, harm = time.monotonic(), random.Random(seed), random.Random(f"faults {seed}")
    arrivals = sorted(chance.uniform(0, seconds) for _ in range(requests))
    asked = [(chance.choice(kinds(place)), at) for at in arrivals]
    faults = [(harm.choice(FAULTS), at * EVERY_SECONDS) for at in range(1, int(seconds / EVERY_SECONDS))]

    async def ask(kind: str, at: float) -> None:
        await asyncio.sleep(begun + at - time.monotonic())
        progress = Progress()
        answer = await one(place, kind, progress)
        outcome.count(answer, place.expected[kind])
        took = time.monotonic() - begun - at
        if answer.error:
            pieces = sum(map(len, progress.times.values()))
            say(f"{at:5.1f} s  {kind}: {answer.error} after {took:.1f} s and {pieces} pieces")

    async def break_it() -> None:
        for fault, at in faults:
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            kind, *words = fault.split()
            done = outcome.requests
            with contextlib.suppress(AssertionError):  # nothing was there to be reset
                await ACTS[kind](place, *words)
            say(f"{at:5.0f} s  {fault}  ({done} answered)")

    async def watch() -> None:
        while True:
            for name, size in sizes(place).items():
                memory[name].append((time.monotonic() - begun, size))
            await asyncio.sleep(min(5.0, seconds / 20))

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        breaking = group.create_task(break_it())
        await asyncio.gather(breaking, *(group.create_task(ask(*each)) for each in asked))
        watching.cancel()
    if seconds < 3 * WARM_SECONDS:
        return outcome, []
    return outcome, list(filter(None, (grown(name, all_of) for name, all_of in memory.items())))


def sizes(place: SeparatePlace) -> Counter[str]:
    """Bytes of memory of every process, by what it is."""
    found = Counter[str]()
    for name, pid in place.cluster.processes.items():
        for one in family(pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = " ".join(one.cmdline())
                kind = next((kind for kind in ("engine", "carrier") if MODULES[kind] in words), "process")
                found[f"{name}'s {kind}"] += one.memory_info().rss
    return found


def grown(name: str, samples: list[tuple[float, int]]) -> str:
    """What to say of a process whose last third needs more than its first, once it was warm."""
    after = [size for at, size in samples if at >= WARM_SECONDS]
    if not after:
        return ""
    first, last = max(after[: len(after) // 3 or 1]), max(after[-(len(after) // 3 or 1) :])
    if last <= first * GROWTH[0] + GROWTH[1]:
        return ""
    return f"memory of {name}: {first / 2**20:.0f} to {last / 2**20:.0f} MiB"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--quick", action="store_true", help="60 s and 60 requests")
    given = parser.parse_args()
    if given.quick:
        given.seconds, given.requests = 60.0, 60
    sys.exit(asyncio.run(main(given)))
