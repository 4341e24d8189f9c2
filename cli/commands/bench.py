"""`sealring bench`: measure, one benchmark per table of docs/performance.md."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sealring.cli.terminal.command import command
from sealring.cli.terminal.exit_codes import CHECK_FAILED
from sealring.cli.terminal.output import print_json, print_table, say
from sealring.mesh.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from bench.frame import Benchmark, Result

app = typer.Typer()

_EVERYTHING = "all"


@command(
    app,
    example="sealring bench overhead --quick",
    rich_help_panel="Look",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="a benchmark, or: all, list")] = "list",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the measurements here; - prints them")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="draw a chart here")] = None,
    times: Annotated[
        int, typer.Option(min=1, max=100, help="runs, each a round or more of every target")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="shorter runs, for an impression")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write NAME.json and NAME.png of every run here")
    ] = None,
) -> None:
    """Run benchmarks. Further options are the benchmark's own: `sealring bench NAME -- --help`.

    A target is met when the worst of at least three rounds meets it, missed when any round misses it, and
    else open. `scenarios` exits with 13 when a request fails or an assertion does not hold. The other
    benchmarks show targets that are missed and exit with 0. `all` runs each in a process of its own, with a
    time limit, goes on after one that failed, and exits with 13 if any did; with --quick it takes 10 minutes
    at most.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is ended
        signal.signal(number, _leave)
    frame = _frame()
    if name == "list":
        rows = [[one, frame.find(one).summary] for one in frame.MODULES]
        print_table(["benchmark", "what it measures"], rows)
        return
    if name == _EVERYTHING and (json_file or png or context.args):
        raise InvalidInput("all takes --quick and --out only", hint="name one benchmark", reason="BAD_OPTION")
    if name == _EVERYTHING:
        _run_all(quick=quick, out=out)
        return
    found = frame.find(name)
    say(f"{name}: {found.summary}")
    report = frame.measure(found, [*(found.quick if quick else ()), *context.args], times)
    _show(found, report, to_stdout=str(json_file) != "-")
    _write(found, report, (json_file, png), out)
    if found.gate and not report["passed"]:
        say(f"failed: {name}")
        raise typer.Exit(CHECK_FAILED)


def _run_all(*, quick: bool, out: Path | None) -> None:
    from bench.everything import run_all

    outcomes = run_all(quick=quick, out=out, say=say)
    rows = [[one.bench, one.outcome, one.seconds, one.limit] for one in outcomes]
    seconds = sum(one.seconds for one in outcomes)
    print_table(["benchmark", "outcome", "s", "limit, s"], rows, title=f"{seconds:.0f} s altogether")
    failed = [one.bench for one in outcomes if not one.good]
    if failed:
        say(f"failed: {', '.join(failed)}")
        raise typer.Exit(CHECK_FAILED)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _show(found: Benchmark, report: Result, *, to_stdout: bool) -> None:
    if not to_stdout:
        return
    for table in found.tables(report["data"]):
        print_table(list(table.columns), list(table.rows), title=table.title)
    if report["checks"]:
        rows = [
            [
                one["name"],
                one["worst"],
                f"{'>=' if one['at_least'] else '<='} {one['target']:g}",
                len(one["rounds"]),
                one["verdict"],
            ]
            for one in report["checks"]
        ]
        print_table(["target", "worst", "wanted", "rounds", ""], rows)


def _write(
    found: Benchmark, report: Result, files: tuple[Path | None, Path | None], out: Path | None
) -> None:
    from bench import frame

    json_file, png = files
    if str(json_file) == "-":
        print_json(report)
    elif json_file is not None:
        frame.write_json(report, json_file)
    if png is not None:
        frame.write_png(report, png)
    if out is not None:
        frame.write_json(report, out / f"{found.name}.json")
        frame.write_png(report, out / f"{found.name}.png")


def _frame() -> Any:
    """The package of benchmarks, which lies in the source tree. Raises ConfigError (NO_BENCH)."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "frame.py").is_file():
        raise ConfigError(
            "the benchmarks are not here",
            hint="run from a clone of the repository",
            reason="NO_BENCH",
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from bench import frame

    return frame
