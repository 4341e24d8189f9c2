"""Runs stories by their seeds: `python tests/simulation/run.py FIRST [NUMBER]`. Prints what went wrong.

A seed has the same story on every computer and at any time. The number in brackets is made of all callbacks
in their order. With `--elsewhere` texts have other hashes, objects other addresses, and the clock another
time. If the number differs then, compare the files that `--trace FILE` writes with and without it.
"""

# ruff: noqa: T201 - it is a program

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from stories import Story
    from virtualloop import VirtualLoop

HERE = Path(__file__).parent


def live(seed: int, asked: argparse.Namespace) -> tuple[Story, VirtualLoop]:
    """The story of a seed, and the loop in which it was lived."""
    import onesource
    from stories import Story
    from virtualloop import VirtualLoop

    onesource.seed(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        loop = VirtualLoop()
        loop.trace = asked.trace
        asyncio.set_event_loop(loop)
        story = Story(seed, Path(folder), loop)
        hear(story.wrong, aloud=asked.v)
        try:
            loop.run_until_complete(story.run())
        except Exception as error:
            story.wrong.append(f"the story broke off: {error!r}")
            if asked.v:
                traceback.print_exc()
    return story, loop


def hear(wrong: list[str], *, aloud: bool) -> None:
    """Has logs judged: what no fault of a machine can be the cause of is wrong."""

    def judge(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        ended = event["event"] == "ring_lost" and str(event.get("reason")).startswith("BAD_")
        if ended or event.get("exc_info"):
            wrong.append(f"the log has {dict(event)}")
        if aloud:
            return event
        raise structlog.DropEvent

    level = logging.INFO if aloud else logging.WARNING
    structlog.configure(
        processors=[judge, *structlog.get_config()["processors"]],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


def alone(seed: int, asked: argparse.Namespace) -> bool:
    """Lives a story in a process of its own, and prints what was wrong; whether nothing was. What killed
    programs have left lying about ends with that process."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    gc.collect()
    gc.freeze()
    gc.disable()  # the loop collects garbage
    began = time.process_time()
    story, loop = live(seed, asked)
    seconds = time.process_time() - began
    wrong, requests, resumed = story.wrong, len(story.asked), story.cluster.wires.resumed
    work = f"{requests} requests, {resumed} went on, {loop.handled} callbacks ({loop.digest:08x})"
    print(f"seed {seed}: {work}, {seconds:.2f} s of a processor")
    if wrong:
        print("\n".join([*(story.history if asked.number == 1 else []), *(f"WRONG: {one}" for one in wrong)]))
        print(f"again: python tests/simulation/run.py {seed}")
    sys.stdout.flush()
    os._exit(1 if wrong else 0)


def elsewhere() -> list[object]:
    """Sets the clock wrong, and scatters free memory: new objects get addresses in any order."""
    right = time.time
    time.time = lambda: right() - 1e6
    held: list[object] = [bytes(random.randrange(512)) for _ in range(200_000)]
    random.shuffle(held)
    return held[::2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("number", type=int, nargs="?", default=1)
    parser.add_argument("-v", action="store_true", help="print logs and tracebacks")
    parser.add_argument("--elsewhere", action="store_true")
    parser.add_argument("--trace", type=argparse.FileType("w"), metavar="FILE")
    asked = parser.parse_args()
    hash_seed = "1" if asked.elsewhere else "0"
    if os.environ.get("PYTHONHASHSEED") != hash_seed:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": hash_seed})
    sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
    import onesource

    held = elsewhere() if asked.elsewhere else []
    onesource.take()
    import stories  # noqa: F401 - once for all seeds

    bad = [one for one in range(asked.first, asked.first + asked.number) if not alone(one, asked)]
    del held
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
