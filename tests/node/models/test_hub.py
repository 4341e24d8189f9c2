"""Functions of huggingface_hub that ask the hub; test_fetch.py has the requests themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import sealring.node


def imported(file: Path) -> set[str]:
    """The modules that a file takes names from, and those names."""
    found = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.ImportFrom)]
    return {f"{one.module}.{name.name}" for one in found for name in one.names}


def test_only_public_names_of_huggingface_hub_are_used() -> None:
    """Others go with any minor release, and then no model can be fetched."""
    files = Path(next(iter(sealring.node.__path__))).rglob("*.py")
    used = {name for file in files for name in imported(file) if name.startswith("huggingface_hub.")}
    assert used
    assert not [name for name in used if any(part.startswith("_") for part in name.split("."))]
