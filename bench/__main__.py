"""`python -m bench NAME ...` measures where the packages of the `sealring` command are not there.

`python -m bench report` makes docs/performance.md anew from the measurements beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench import frame, report


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", add_help=False)
    parser.add_argument("name", choices=[*frame.MODULES, "report"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given, own = parser.parse_known_args()
    if given.name == "report":
        report.main()
        return
    benchmark = frame.find(given.name)
    found = frame.measure(benchmark, [*(benchmark.quick if given.quick else ()), *own], given.times)
    if given.json:
        frame.write_json(found, given.json)
    for table in benchmark.tables(found["data"]):
        rows = ["  ".join(map(str, row)) for row in (table.columns, *table.rows)]
        sys.stdout.write("\n".join([table.title, *rows, ""]))


main()
