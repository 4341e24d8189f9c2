"""Changes one thing at a time in a copy of the tree and runs the tests of its package that reach it.

Prints a table and JSON. A mutant that no test notices survives. Survivors that behave as the original does
stand in `equivalent.json`, each with the reason, and are not run in a sample; `--excuses` runs them, with
leaks as errors, and one that a test does notice is told as a false excuse. Mutants are drawn from a whole
package: the same seed and tree give the same sample.

    python -m bench.mutate --seed 7 --sample 15 --near
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
from bench.mutate.suite import TESTS, copy_tree


def main() -> None:
    options = _options()
    drawn = {package: _drawn(package, options) for package in options.packages.split(",")}
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        work = [
            (package, one, options.tests, options.near, options.excuses)
            for package, one in drawn.items()
            if one
        ]
        reports = dict(pool.imap_unordered(_package, work, chunksize=1))
    reports = {package: reports[package] for package in drawn if package in reports}
    counts = [(package, one.killed, one.counted, len(one.excused)) for package, one in reports.items()]
    killed, counted = (sum(column) for column in list(zip(*counts, strict=True))[1:3])
    print(f"{'package':<16}{'killed':>8}{'of':>5}{'%':>7}{'excused':>9}")
    for name, dead, of, excused in [*counts, ("together", killed, counted, "")]:
        print(f"{name:<16}{dead:>8}{of:>5}{100 * dead / of if of else 0:>7.1f}{excused:>9}")
    packages = {package: asdict(report) for package, report in reports.items()}
    written = {"seed": options.seed, "sample": options.sample, "killed": killed, "counted": counted}
    text = json.dumps(written | {"packages": packages}, indent=1) + "\n"
    (options.out.write_text if options.out else print)(text)
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
    near = "no tests more than two imports from a changed file: quicker, and notices fewer"
    parser.add_argument("--near", action="store_true", help=near)
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


def _package(work: tuple[str, list[Drawn], list[str], bool, bool]) -> tuple[str, Report]:
    package, drawn, tests, near, excused = work
    with tempfile.TemporaryDirectory(prefix="sealring-mutate-") as temporary:
        folder = Path(temporary).resolve() / "tree"
        copy_tree(folder)
        return package, run(folder, package, drawn, tests, near=near, excused=excused)


if __name__ == "__main__":
    main()
