"""All benchmarks one after the other, each in a process of its own and with a time limit.

A benchmark that fails, hangs or dies does not stop the others; the outcome of each is told and written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.frame import MODULES, Benchmark, find, machine

QUICK_TOTAL_SECONDS = 600.0
LIMIT_SECONDS = 3600.0
"""Of one benchmark without `--quick`."""

_GRACE_SECONDS = 15.0
CHECK_FAILED = 13
"""Exit status of a benchmark whose checks failed, as cli.exit_codes has it."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What became of one benchmark: `done`, `checks failed`, `failed`, `out of time` or `not begun`."""

    bench: str
    outcome: str
    seconds: float
    limit: float

    @property
    def good(self) -> bool:
        return self.outcome == "done"


def benchmarks() -> list[Benchmark]:
    """Those that need nothing from outside (`serve` wants an address), short ones first: if time runs out,
    few are missing."""
    return sorted((find(name) for name in MODULES if name != "serve"), key=lambda one: one.quick_seconds)


def run_all(
    *,
    quick: bool,
    out: Path | None,
    say: Say,
    total: float | None = None,
    chosen: Sequence[Benchmark] | None = None,
    command: Sequence[str] = (sys.executable, "-P", "-m", "sealring.cli", "bench"),
) -> list[Outcome]:
    """Runs them in turn; with `quick` no longer than `total` seconds altogether (10 minutes by default)."""
    until = time.monotonic() + (total or QUICK_TOTAL_SECONDS) if quick or total else float("inf")
    outcomes: list[Outcome] = []
    for one in chosen if chosen is not None else benchmarks():
        own = one.quick_seconds if quick else LIMIT_SECONDS
        limit = min(own, until - time.monotonic())
        if limit < 1:
            outcomes.append(Outcome(one.name, "not begun", 0.0, 0.0))
            continue
        arguments = [*command, one.name, *(["--quick"] if quick else [])]
        arguments += ["--out", str(out)] if out is not None else []
        outcomes.append(_run(one.name, arguments, limit))
        say(f"{one.name}: {outcomes[-1].outcome} in {outcomes[-1].seconds:.0f} s")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        written = {"machine": machine(), "quick": quick, "outcomes": [asdict(one) for one in outcomes]}
        (out / "all.json").write_text(json.dumps(written, indent=1) + "\n")
    return outcomes


def _run(name: str, arguments: Sequence[str], limit: float) -> Outcome:
    began = time.monotonic()
    process = subprocess.Popen(arguments, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        status = process.wait(limit)
        outcome = {0: "done", CHECK_FAILED: "checks failed"}.get(status, f"failed with status {status}")
    except subprocess.TimeoutExpired:
        outcome = "out of time"
    finally:
        _end(process)
    return Outcome(name, outcome, round(time.monotonic() - began, 1), round(limit, 1))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks it to end what it started; then nothing of its session is left, whether it did or not."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
