"""The frame that every benchmark stands in: options, a run that returns plain data, tables, a chart, checks.

A run's data is written to JSON together with the machine, the command and the date, so that a number in
docs/performance.md can be traced to how it was made.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.verdict import MISSED, Check, joined
from sealring.mesh.errors import ConfigError, NotFound

Result = dict[str, Any]

MODULES = (
    "scenarios",
    "serve",
    "peers",
    "scaling",
    "solo",
    "prefill",
    "prefix",
    "comms",
    "overhead",
    "scheduler",
    "control",
    "simulate",
    "copies",
    "seal",
    "loop",
    "ring",
    "hostile",
)
"""The benchmarks by name; each is a module of this package with a BENCHMARK in it."""


@dataclass(frozen=True)
class Table:
    """Something to print. `rows` are as long as `columns`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Benchmark:
    """`run` takes the parsed options and returns data fit for JSON; the others look at that data alone.

    `quick` are the options of `--quick`, and `quick_seconds` is how long such a run may take in `all`. `gate`
    says whether failed checks fail the command.
    """

    name: str
    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Result]
    tables: Callable[[Result], list[Table]]
    chart: Callable[[Result, Any], None]
    checks: Callable[[Result], list[Check]] = lambda result: []
    quick: Sequence[str] = ()
    quick_seconds: float = 60.0
    gate: bool = False


def find(name: str) -> Benchmark:
    """Raises NotFound (BENCH_NOT_FOUND)."""
    if name not in MODULES:
        raise NotFound(
            f"there is no benchmark {name[:64]}",
            hint=f"the benchmarks are: {', '.join(MODULES)}",
            reason="BENCH_NOT_FOUND",
        )
    found = importlib.import_module(f"bench.{name}").BENCHMARK
    assert isinstance(found, Benchmark)
    return found


def parse(benchmark: Benchmark, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of one benchmark; a wrong one ends the process with status 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog=f"sealring bench {benchmark.name}", description=benchmark.summary, add_help=True
    )
    benchmark.options(parser)
    return parser.parse_args(list(arguments))


def measure(benchmark: Benchmark, arguments: Sequence[str], times: int = 1) -> Result:
    """Runs it so many times; its data, with where it came from and what it says of the targets.

    Each run adds its rounds to the checks; `data` is the last one's, `earlier` that of those before.
    """
    options = parse(benchmark, arguments)
    load_before = os.getloadavg()[0]
    runs = []
    for _ in range(times):
        with _own_cores():
            runs.append(benchmark.run(options))
    repeated = ["--times", str(times)] if times > 1 else []
    checks = joined([benchmark.checks(result) for result in runs])
    return {
        "bench": benchmark.name,
        "command": " ".join(["sealring", "bench", benchmark.name, *repeated, *arguments]),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine() | {"load_before": round(load_before, 2), "load_after": os.getloadavg()[0]},
        "passed": all(one.verdict != MISSED and None not in one.rounds for one in checks),
        "checks": [one.told() for one in checks],
        "data": runs[-1],
        "earlier": runs[:-1],
    }


@contextlib.contextmanager
def _own_cores() -> Iterator[None]:
    """Undoes what a benchmark does to the cores of this process, for the next one."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mlx", "mlx-lm", "grpcio", "cryptography")},
    }


def standalone(benchmark: Benchmark) -> None:
    """Without the `sealring` command and its packages: options, then `--json FILE` last."""
    arguments, out = sys.argv[1:], None
    if len(arguments) > 1 and arguments[-2] == "--json":
        out = Path(arguments[-1])
        arguments = arguments[:-2]
    report = measure(benchmark, arguments)
    if out is not None:
        write_json(report, out)
    for table in benchmark.tables(report["data"]):
        rows = ["  ".join(map(str, row)) for row in (table.columns, *table.rows)]
        sys.stdout.write("\n".join([table.title, *rows, ""]))


def write_json(report: Result, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def write_png(benchmark: Benchmark, report: Result, path: Path) -> None:
    """Draws the chart. Raises ConfigError (NO_MATPLOTLIB)."""
    figure = new_figure()
    benchmark.chart(report["data"], figure)
    where = report["machine"]
    figure.text(
        0.01,
        0.005,
        f"{report['command']}  |  {where['processor']}, {where['cores']} cores  |  {report['date'][:10]}",
        fontsize=6,
        color="gray",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def new_figure() -> Any:
    """An empty figure that needs no display. Raises ConfigError (NO_MATPLOTLIB)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "charts need matplotlib, which is not installed",
            hint="make env makes an environment that has it; or leave --png away",
            reason="NO_MATPLOTLIB",
        ) from None
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def progress(text: str) -> None:
    """A line about what is being measured, on standard error."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def _commit() -> str:
    """Of the tree that was measured, with a + when it was changed; "" where there is no git."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return ""


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
