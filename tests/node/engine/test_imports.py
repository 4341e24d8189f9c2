"""No circle among the files of the engine."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from sealring.node import engine

FOLDER = Path(engine.__file__).parent
PACKAGE = "sealring.node.engine"


def modules() -> dict[str, Path]:
    """Each file of the engine, by the name of its module below the engine's."""
    found = {}
    for file in FOLDER.rglob("*.py"):
        parts = file.relative_to(FOLDER).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(name: str, file: Path) -> set[str]:
    """The modules that a file imports, also in functions and for types only, by what it takes of packages."""
    known = modules()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = ".".join(part for part in (package, node.module or "") if part)
        elif (node.module or "").startswith(PACKAGE):
            base = (node.module or "").removeprefix(PACKAGE).removeprefix(".")
        else:
            continue
        for alias in node.names:
            whole = ".".join(part for part in (base, alias.name) if part)
            found.add(whole if whole in known else base)
    return found - {name}


def test_no_file_of_the_engine_is_imported_by_what_it_imports() -> None:
    TopologicalSorter({name: imported(name, file) for name, file in modules().items()}).prepare()
