"""The frame that every benchmark stands in: options, a run that returns plain data, tables, checks.

A run's data is written to JSON together with the machine, the command and the date, so that a number in
docs/performance.md can be traced to how it was made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.verdict import Check, joined
from sealring.doctor.hardware import machine as mac
from sealring.doctor.system import System
from sealring.mesh.errors import ConfigError, NotFound

Result = dict[str, Any]

MODULES = (
    *("scenarios", "serve", "peers", "mixed", "together", "prefill", "overhead", "rest", "scheduler"),
    *("control", "members", "clients", "ring", "macs", "hostile", "long", "pause", "passing", "speculate"),
    *("sampling", "stored", "hop", "metal"),
)
"""The benchmarks by name. Each is a module of this package with the functions `options`, `run`, `tables` of
a Benchmark, and with `checks`, QUICK and QUICK_SECONDS where they are not as usual. Its summary is the
first line of its docstring."""


@dataclass(frozen=True)
class Table:
    """Something to print. `rows` are as long as `columns`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Benchmark:
    """`run`, which may be a coroutine, takes the parsed options and returns data fit for JSON; `tables` and
    `checks` look at that data alone.

    `quick` are the options of `--quick`, and `quick_seconds` is how long such a run may take in `all`.
    """

    name: str
    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]
    tables: Callable[[Result], list[Table]]
    checks: Callable[[Result], list[Check]] = lambda result: []
    quick: Sequence[str] = ()
    quick_seconds: float = 60.0


def find(name: str) -> Benchmark:
    """Raises NotFound (BENCH_NOT_FOUND)."""
    if name not in MODULES:
        raise NotFound(
            f"there is no benchmark {name[:64]}",
            hint=f"the benchmarks are: {', '.join(MODULES)}",
            reason="BENCH_NOT_FOUND",
        )
    module = importlib.import_module(f"bench.{name}")
    special = {"checks": "checks", "quick": "QUICK", "quick_seconds": "QUICK_SECONDS"}
    given = {field: getattr(module, its) for field, its in special.items() if hasattr(module, its)}
    summary = (module.__doc__ or "").splitlines()[0]
    return Benchmark(name, summary, module.options, module.run, module.tables, **given)


def numbers(text: str) -> list[int]:
    """An option's value: whole numbers between commas, maybe none."""
    return [int(part) for part in text.split(",")] if text else []


def names_of(what: str, known: Collection[str]) -> Callable[[str], list[str]]:
    """Parses an option's value: names between commas, each a `what` that is known."""

    def parsed(text: str) -> list[str]:
        found = text.split(",")
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"there is no {what} {sorted(unknown)[0][:32]}")
        return found

    return parsed


def parse(benchmark: Benchmark, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one benchmark; a wrong one ends the process with status 2, as argparse does."""
    parser = argparse.ArgumentParser(f"python -m bench {benchmark.name}", description=benchmark.summary)
    benchmark.options(parser)
    return parser.parse_args(list(arguments))


def measure(benchmark: Benchmark, arguments: Sequence[str], times: int = 1) -> Result:
    """Runs a benchmark `times` times; returns its data with their origin and the checks of its targets.

    Each run adds its rounds to the checks; `data` is from the last run, `earlier` from those before.
    """
    options = parse(benchmark, arguments)
    load_before = os.getloadavg()[0]
    runs = []
    for _ in range(times):
        with _own_cores():
            found = benchmark.run(options)
            runs.append(asyncio.run(found) if inspect.iscoroutine(found) else found)
    repeated = ["--times", str(times)] if times > 1 else []
    checks = joined([benchmark.checks(result) for result in runs])
    return {
        "bench": benchmark.name,
        "command": " ".join(["python", "-m", "bench", benchmark.name, *repeated, *arguments]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"load_before": round(load_before, 2), "load_after": os.getloadavg()[0]},
        "checks": [one.as_data() for one in checks],
        "data": runs[-1],
        "earlier": runs[:-1],
    }


@contextlib.contextmanager
def _own_cores() -> Iterator[None]:
    """Undoes what a benchmark does to the cores of this process, for the next one."""
    if sys.platform == "linux" and hasattr(os, "sched_setaffinity"):
        before = os.sched_getaffinity(0)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)
    else:
        yield


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        **mac(System()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mlx", "mlx-lm", "grpcio", "cryptography")},
    }


def write_json(report: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def write_png(report: Result, path: Path) -> None:
    """Draws how far each round was from each target, in parts of the target; nothing where there are none.

    Raises ConfigError (NO_MATPLOTLIB).
    """
    if not report["checks"]:
        progress(f"{report['bench']} measured no target, so there is no chart")
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "charts need matplotlib, which is not installed",
            hint="make env makes an environment that has it; or leave --png away",
            reason="NO_MATPLOTLIB",
        ) from None
    figure = Figure(figsize=(9, 2 + 0.4 * len(report["checks"])), layout="constrained")
    axes = figure.subplots()
    for place, one in enumerate(report["checks"]):
        target = one["target"]
        away = [(each - target) / (abs(target) or 1) for each in one["rounds"] if each is not None]
        axes.plot(away, [place] * len(away), "o")
    names = [f"{one['name']} {'≥' if one['at_least'] else '≤'} {one['target']:g}" for one in report["checks"]]
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0.0, color="gray", linestyle="--")
    axes.invert_yaxis()
    where = report["machine"]
    axes.set_xlabel("each round: distance from the target, in parts of it")
    axes.set_title(
        f"{report['command']}  |  {where['processor']}, {where['cores']} cores  |  {report['date'][:10]}",
        fontsize=7,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def progress(text: str) -> None:
    """A line about what is being measured, on standard error."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def commit() -> str:
    """The measured tree's commit, with a + if it has changes; "" without git."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    return ""


def _version(name: str) -> str:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return ""


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return mac(System()).get("chip") or platform.processor() or platform.machine()
