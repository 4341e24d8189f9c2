#!/usr/bin/env python3
"""Make the list of models that `sealring model fits` knows, and the tables of docs/fits.md, from facts.

.ci/models.py --write    write both; --tables writes the tables alone, --check-tables compares them

The facts are those of each model's config.json (tests/data/published.json, with their sources).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sealring.cli.fitting.known import WIDTHS, row_of
from sealring.cli.fitting.tables import tables

PUBLISHED, LIST, PAGE = (
    Path("tests/data/published.json"),
    Path("cli/fitting/models.json"),
    Path("docs/fits.md"),
)
BEGIN, END = "<!-- made by: .ci/models.py --write -->", "<!-- end of what is made -->"


def main(argv: Sequence[str]) -> int:
    if argv not in (["--write"], ["--tables"], ["--check-tables"]):
        sys.stdout.write(__doc__ or "")
        return 2
    if argv == ["--write"]:
        rows = [made(id, one) for id, one in json.loads(PUBLISHED.read_text("utf-8")).items()]
        LIST.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", "utf-8")
    text = PAGE.read_text("utf-8")
    new = re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{tables()}\n{END}", text, flags=re.DOTALL)
    if argv != ["--check-tables"]:
        PAGE.write_text(new, "utf-8")
    elif new != text:
        sys.stdout.write(f"{PAGE} is not what the code says: run .ci/models.py --tables\n")
        return 1
    return 0


def made(id: str, published: Mapping[str, Any], widths: Sequence[int] = WIDTHS) -> dict[str, Any]:
    """A model's row of the list, measured as a node measures a folder."""
    from sealring.node.engine.converted import converted_profile

    profiles = {bits: converted_profile(published["config"], bits) for bits in widths}
    return row_of(id, published["source"], profiles)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
