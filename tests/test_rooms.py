"""The layout of docs/architecture.md: few files beside folders, imports in one direction."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = {"coordinator", "node", "gateway", "cli"}


def imports(package: str) -> list[tuple[Path, str]]:
    """Each file below the package, and what of sealring it imports, as `mesh.rpc.tls`."""
    return [
        (file.relative_to(ROOT), f"{node.module}.{alias.name}".removeprefix("sealring."))
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sealring")
        for alias in node.names
    ]


@pytest.mark.parametrize("package", ["mesh", "coordinator", "node", "gateway", "cli"])
def test_folders_import_each_other_in_one_direction(package: str) -> None:
    needs: dict[str, set[str]] = {}
    for file, name in imports(package):
        parts = name.split(".")
        room = file.parts[1] if len(file.parts) > 2 else file.stem
        if parts[0] == package and len(parts) > 1 and parts[1] != room:
            needs.setdefault(room, set()).add(parts[1])
    assert len(needs) > 2
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("package", ["mesh", "coordinator", "node", "gateway", "cli"])
def test_few_files_stand_beside_the_folders(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= 6


@pytest.mark.parametrize("package", ["mesh", "coordinator", "node", "gateway"])
def test_packages_share_mesh_alone(package: str) -> None:
    found = {name.partition(".")[0] for _, name in imports(package)}
    assert not found & (OTHERS - {package})
