"""Changes one thing at a time in a copy of the tree and runs the tests of its package that reach it.

Prints a table and JSON. A mutant that no test notices survives. Survivors that behave as the original does
stand in `equivalent.json`, each with the reason; those are run like the others, with leaks as errors, and one
that a test does notice is told as a false excuse. Mutants are drawn from a whole package: the same seed and
tree give the same sample.

    python -m bench.mutate --seed 7 --sample 15
    python -m bench.mutate --packages gateway --modules gateway/scheduler/memory.py
    python -m bench.mutate --excuses
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.mutate.run import Drawn, Report, draw, run
from bench.mutate.suite import TESTS, check_imports, copy_tree


def main() -> None:
    options = _options()
    drawn = {package: _drawn(package, options) for package in options.packages.split(",")}
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        work = [(package, one, options.tests) for package, one in drawn.items() if one]
        reports = dict(pool.imap_unordered(_package, work, chunksize=1))
    reports = {package: reports[package] for package in drawn if package in reports}
    print(_table(reports))
    killed, counted = (sum(getattr(one, what) for one in reports.values()) for what in ("killed", "counted"))
    written = {
        "seed": options.seed,
        "sample": options.sample,
        "killed": killed,
        "counted": counted,
        "packages": {package: asdict(report) for package, report in reports.items()},
    }
    if options.out:
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    else:
        print(json.dumps(written, indent=1))
    sys.exit(any(report.false_excuses or report.stale_excuses for report in reports.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--packages", default=",".join(TESTS), help="comma-separated, all by default")
    parser.add_argument("--modules", default="", help="only these files, comma-separated")
    parser.add_argument("--tests", nargs="*", default=(), help="only these test files")
    parser.add_argument("--sample", type=int, default=15, help="mutants of each package; 0: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--excuses", action="store_true", help="run every excused mutant instead of a sample")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="packages at a time")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of printing it")
    return parser.parse_args()


def _drawn(package: str, options: argparse.Namespace) -> list[Drawn]:
    every = draw(package, set(filter(None, options.modules.split(","))))
    if options.excuses:
        return [one for one in every if one.excuse]
    if not options.sample or options.sample >= len(every):
        return every
    return sorted(random.Random(f"{options.seed} {package}").sample(every, options.sample))


def _package(work: tuple[str, list[Drawn], list[str]]) -> tuple[str, Report]:
    package, drawn, tests = work
    with tempfile.TemporaryDirectory(prefix="sealring-mutate-") as temporary:
        folder = Path(temporary).resolve() / "tree"
        copy_tree(folder)
        check_imports(folder)
        return package, run(folder, package, drawn, tests)


def _table(reports: dict[str, Report]) -> str:
    lines = [f"{'package':<16}{'mutants':>9}{'run':>6}{'excused':>9}{'killed':>8}{'of':>5}{'%':>7}"]
    for package, one in reports.items():
        share = f"{100 * one.killed / one.counted:.1f}" if one.counted else "-"
        excused = len(one.excused)
        lines.append(
            f"{package:<16}{one.possible:>9}{one.run:>6}{excused:>9}{one.killed:>8}{one.counted:>5}{share:>7}"
        )
    killed, counted = (sum(getattr(one, what) for one in reports.values()) for what in ("killed", "counted"))
    share = f"{100 * killed / counted:.1f}" if counted else "-"
    lines.append(f"{'together':<16}{'':>24}{killed:>8}{counted:>5}{share:>7}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
