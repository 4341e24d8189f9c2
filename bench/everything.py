"""All benchmarks one after the other, each in a process of its own and with a time limit.

A benchmark that fails, hangs or dies does not stop the others; each outcome is shown and written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.frame import MODULES, Benchmark, find, machine, write_json

QUICK_TOTAL_SECONDS = 600.0
LIMIT_SECONDS = 3600.0
"""The longest time of one benchmark without `--quick`."""

_GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Outcome:
    """What became of one benchmark: `done`, `failed`, `out of time` or `not begun`."""

    bench: str
    outcome: str
    seconds: float
    limit: float

    @property
    def good(self) -> bool:
        return self.outcome == "done"


def benchmarks() -> list[Benchmark]:
    """Benchmarks that need nothing from outside (`serve` wants an address), short ones first: if time runs
    out, few are missing."""
    return sorted((find(name) for name in MODULES if name != "serve"), key=lambda one: one.quick_seconds)


def run_all(
    *,
    quick: bool,
    out: Path | None,
    say: Callable[[str], None],
    total: float = QUICK_TOTAL_SECONDS,
    chosen: Sequence[Benchmark] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "bench"),
) -> list[Outcome]:
    """Runs them in turn, by default all; with `quick` no longer than `total` seconds altogether."""
    until = time.monotonic() + total if quick else float("inf")
    outcomes: list[Outcome] = []
    for one in chosen or benchmarks():
        limit = min(one.quick_seconds if quick else LIMIT_SECONDS, until - time.monotonic())
        if limit < 1:
            outcomes.append(Outcome(one.name, "not begun", 0.0, 0.0))
            continue
        arguments = [*command, one.name, *(["--quick"] if quick else [])]
        outcomes.append(_run(one.name, [*arguments, *(["--out", str(out)] if out else [])], limit))
        say(f"{one.name}: {outcomes[-1].outcome} in {outcomes[-1].seconds:.0f} s")
    if out is not None:
        written = {"machine": machine(), "quick": quick, "outcomes": [asdict(one) for one in outcomes]}
        write_json(written, out / "all.json")
    return outcomes


def _run(name: str, arguments: Sequence[str], limit: float) -> Outcome:
    """What it started is asked to end; then nothing of its session is left, whether it did or not."""
    began = time.monotonic()
    process = subprocess.Popen(arguments, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        status = process.wait(limit)
        outcome = f"failed with status {status}" if status else "done"
    except subprocess.TimeoutExpired:
        outcome = "out of time"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Outcome(name, outcome, round(time.monotonic() - began, 1), round(limit, 1))
