#!/usr/bin/env python3
"""Write the list of settings into docs/settings.md, from the models in the code.

.ci/settings.py --write    write it; --check compares it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sealring.cli import settings as cli_settings
from sealring.cli.here.found import Here
from sealring.cli.terminal.command import MODELS, settings_model
from sealring.cli.terminal.described import default_of, show_value, value_of
from sealring.mesh.system.paths import default_state_root
from sealring.node.settings import default_name

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

PAGE = Path("docs/settings.md")
BEGIN, END = "<!-- made by: .ci/settings.py --write -->", "<!-- end of what is made -->"
BOUNDS = {
    "ge": "at least {}",
    "gt": "more than {}",
    "le": "at most {}",
    "lt": "less than {}",
    "min_length": "at least {} of them",
    "max_length": "at most {} of them",
}


def main(argv: Sequence[str]) -> int:
    if argv not in (["--write"], ["--check"]):
        sys.stdout.write(__doc__ or "")
        return 2
    cli_settings.cluster_here = lambda: Here(default_state_root())  # whatever runs on this machine
    text = PAGE.read_text("utf-8")
    made = "\n\n".join([BEGIN, *map(_table, MODELS), END])
    new = re.sub(f"{BEGIN}.*{END}", lambda _: made, text, flags=re.DOTALL)
    if argv == ["--write"]:
        PAGE.write_text(new, "utf-8")
    elif new != text:
        sys.stdout.write(f"{PAGE} is not what the code says: run .ci/settings.py --write\n")
        return 1
    return 0


def _table(section: str) -> str:
    fields = settings_model(section).model_fields.items()
    rows = (f"| `{name}` | {' | '.join(_cells(field))} |" for name, field in fields)
    head = "| setting | value | default | bounds | what it does |\n|---|---|---|---|---|"
    return "\n".join([f"## [{section}]", head, *rows])


def _cells(field: FieldInfo) -> Iterator[str]:
    text = field.description or ""
    (said,) = re.findall(r" \[default: ([^]]*)\]$", text) or [""]
    value = (value_of(field) or "true or false").replace("|", ", ")
    yield f"list of {value}" if isinstance(field.get_default(call_default_factory=True), list) else value
    yield said or _default(field)
    yield ", ".join(_bounds(field))
    yield text.removesuffix(f" [default: {said}]").replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.default_factory is default_name:  # another on each machine
        return "its host name"
    root = str(default_state_root()).replace(str(Path.home()), "~")
    shown = default_of(field).replace(root, "STATE")
    return f"`{shown}`" if shown else ""


def _bounds(field: FieldInfo) -> Iterator[str]:
    for one in field.metadata:
        for name, words in BOUNDS.items():
            bound = getattr(one, name, None)
            if bound is not None:
                shown = str(bound) if name.endswith("length") else show_value(field, bound)
                yield words.format(shown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
