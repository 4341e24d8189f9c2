#!/usr/bin/env python3
"""Make the list of models that `sealring model fits` knows, and the tables of docs/fits.md, from facts.

.ci/models.py --write    write both; --tables writes the tables alone, --check-tables compares them

The facts are those of each model's config.json (tests/data/published.json, with their sources).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sealring.cli.fitting.known import LISTS, NUMBERS, WIDTHS
from sealring.cli.fitting.tables import tables

PUBLISHED, LIST, PAGE = (
    Path("tests/data/published.json"),
    Path("cli/fitting/models.json"),
    Path("docs/fits.md"),
)
_OF_WIDTHS = ("layer_bytes", "read_bytes", "embed_bytes", "head_bytes")
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


def row_of(id: str, source: str, profiles: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A row of the list, from a model's profiles by bits. Runs of layers alike are [number, value]."""
    first = next(iter(profiles.values()))
    short = {
        bits: {name: _short(one[name]) if name in LISTS else one[name] for name in (*LISTS, *NUMBERS)}
        for bits, one in profiles.items()
    }
    (alike, *_) = short.values()
    return {
        "id": id,
        "parameters": first["card"]["parameters"],
        "source": source,
        "layers": first["layers"],
        **{name: value for name, value in alike.items() if name not in _OF_WIDTHS},
        "widths": {str(bits): {name: one[name] for name in _OF_WIDTHS} for bits, one in short.items()},
    }


def _short(values: Iterable[int | None]) -> list[list[int]]:
    return [[len(list(run)), value] for value, run in groupby(one or 0 for one in values)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
