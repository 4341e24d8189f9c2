"""`python -m bench NAME ...`: measure, one benchmark per table of docs/performance.md.

* `python -m bench list` shows what each benchmark measures.
* `python -m bench NAME [options]` runs one; with `--help` it lists its own options.
* `python -m bench all --quick --out DIR` runs all but `serve`, each in a process of its own.
* `python -m bench report` makes docs/performance.md from the measurements beside it.

A target is met when the worst of at least three rounds meets it, missed when any round misses it, and open
otherwise. `all` goes on after a benchmark that failed, and exits with 13 if any did.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import everything, frame, report
from sealring.cli.terminal.exit_codes import CHECK_FAILED
from sealring.mesh.errors import SealringError


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv` and returns its exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception, so that what was started is ended
        signal.signal(number, _leave)
    given, own = _parser().parse_known_args(argv)
    if given.name == "list":
        _print(
            frame.Table("", ["benchmark", "measures"], [[n, frame.find(n).summary] for n in frame.MODULES])
        )
        return 0
    if given.name == "report":
        report.main()
        return 0
    if given.name == "all":
        if own or given.json or given.png:
            raise SystemExit("bench: all takes --quick and --out only; name one benchmark")
        return _run_all(quick=given.quick, out=given.out)
    return _run_one(given, own)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", default="list", choices=[*frame.MODULES, "all", "list", "report"])
    parser.add_argument("--quick", action="store_true", help="shorter runs, for an impression")
    parser.add_argument("--times", type=_times, default=1, help="runs, each a round or more of every target")
    parser.add_argument("--json", metavar="FILE", help="write the measurements here; - prints them")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a chart here")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write NAME.json and NAME.png here")
    return parser


def _times(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text[:4]) <= 100):
        raise argparse.ArgumentTypeError("1 to 100")
    return int(text)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _run_one(given: argparse.Namespace, own: Sequence[str]) -> int:
    found = frame.find(given.name)
    frame.progress(f"{found.name}: {found.summary}")
    measured = frame.measure(found, [*(found.quick if given.quick else ()), *own], given.times)
    if given.json == "-":
        sys.stdout.write(json.dumps(measured, indent=1) + "\n")
    else:
        for table in found.tables(measured["data"]):
            _print(table)
        _print(_verdicts(measured))
    _write(found, measured, given)
    return 0


def _write(found: frame.Benchmark, measured: frame.Result, given: argparse.Namespace) -> None:
    if given.json and given.json != "-":
        frame.write_json(measured, Path(given.json))
    if given.png:
        frame.write_png(measured, given.png)
    if given.out:
        frame.write_json(measured, given.out / f"{found.name}.json")
        frame.write_png(measured, given.out / f"{found.name}.png")


def _run_all(*, quick: bool, out: Path | None) -> int:
    outcomes = everything.run_all(quick=quick, out=out, say=frame.progress)
    rows = [[one.bench, one.outcome, one.seconds, one.limit] for one in outcomes]
    seconds = sum(one.seconds for one in outcomes)
    _print(frame.Table(f"{seconds:.0f} s altogether", ["benchmark", "outcome", "s", "limit, s"], rows))
    failed = [one.bench for one in outcomes if not one.good]
    if failed:
        frame.progress(f"failed: {', '.join(failed)}")
    return CHECK_FAILED if failed else 0


def _verdicts(measured: frame.Result) -> frame.Table:
    rows = [
        [
            one["name"],
            "" if one["worst"] is None else f"{one['worst']:g}",
            f"{'>=' if one['at_least'] else '<='} {one['target']:g}",
            len(one["rounds"]),
            one["verdict"],
        ]
        for one in measured["checks"]
    ]
    return frame.Table("", ["target", "worst", "wanted", "rounds", "verdict"], rows)


def _print(table: frame.Table) -> None:
    """Writes a table in columns of equal width; nothing when it has no rows."""
    if not table.rows:
        return
    lines = [[_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    sys.stdout.write("\n".join([*([table.title] if table.title else []), *text, "", ""]))


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SealringError as error:
        sys.exit(f"bench: {error}")
