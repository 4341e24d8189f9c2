"""Runs stories by their seeds: `python tests/simulation/run.py FIRST [NUMBER]`. Prints what went wrong."""

# ruff: noqa: T201 - it is a program

from __future__ import annotations

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
from typing import Any

import structlog

HERE = Path(__file__).parent
REPEATABLE = {"PYTHONHASHSEED": "0"}
"""Sets of texts have the same order in each run."""


def live(seed: int) -> tuple[list[str], list[str], int, int, int]:
    """What was wrong in the story of a seed, its history, and the numbers of requests, of rows that went on
    in a later epoch, and of callbacks."""
    from stories import Story
    from virtualloop import VirtualLoop

    random.seed(seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        story = Story(seed, Path(folder), loop)
        hear(story.wrong)
        try:
            loop.run_until_complete(story.run())
        except Exception as error:
            story.wrong.append(f"the story broke off: {error!r}")
            if "-v" in sys.argv:
                traceback.print_exc()
    return story.wrong, story.history, len(story.asked), story.cluster.wires.resumed, loop.handled


def hear(wrong: list[str]) -> None:
    """Has logs judged: what no fault of a machine can be the cause of is wrong."""

    def judge(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        ended = event["event"] == "ring_lost" and str(event.get("reason")).startswith("BAD_")
        if ended or event.get("exc_info"):
            wrong.append(f"the log has {dict(event)}")
        if "-v" in sys.argv:
            return event
        raise structlog.DropEvent

    level = logging.INFO if "-v" in sys.argv else logging.WARNING
    structlog.configure(
        processors=[judge, *structlog.get_config()["processors"]],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


def alone(seed: int, *, tell: bool) -> bool:
    """Lives a story in a process of its own, and prints what was wrong; whether nothing was. What killed
    programs have left lying about ends with that process."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    gc.freeze()
    gc.set_threshold(20_000)
    began = time.process_time()
    wrong, history, requests, resumed, handled = live(seed)
    seconds = time.process_time() - began
    work = f"{requests} requests, {resumed} went on, {handled} callbacks"
    print(f"seed {seed}: {work}, {seconds:.2f} s of a processor")
    if wrong:
        print("\n".join([*(history if tell else []), *(f"WRONG: {one}" for one in wrong)]))
        print(f"again: python tests/simulation/run.py {seed}")
    sys.stdout.flush()
    os._exit(1 if wrong else 0)


def main() -> int:
    first, *rest = (int(one) for one in sys.argv[1:] if one != "-v")
    number = rest[0] if rest else 1
    import stories  # noqa: F401 - once for all seeds

    bad = [seed for seed in range(first, first + number) if not alone(seed, tell=number == 1)]
    return 1 if bad else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | REPEATABLE)
    sys.path[:0] = [str(HERE), str(HERE.parent / "support")]
    sys.exit(main())
