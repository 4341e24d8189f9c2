"""The layout of docs/architecture.md: few files beside folders, imports in one direction."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "mesh": set(),
    "api": {"mesh"},
    "edge": {"mesh", "api"},
    "client": {"mesh", "api", "edge"},
    "coordinator": {"mesh"},
    "node": {"mesh"},
    "gateway": {"mesh", "api", "edge"},
    "doctor": {"mesh", "node"},
    "testing": {"mesh", "edge", "client"},
}
"""The packages of sealring that each may import besides itself and the stubs.

`cli` may import all but `testing`."""

PACKAGES = ["mesh", "edge", "coordinator", "node", "gateway", "doctor", "cli"]


def imports(package: str) -> list[tuple[Path, str]]:
    """Each file below the package, and what of sealring it imports, as `mesh.rpc.tls`."""
    return [
        (file.relative_to(ROOT), f"{node.module}.{alias.name}".removeprefix("sealring."))
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sealring")
        for alias in node.names
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_each_other_in_one_direction(package: str) -> None:
    needs: dict[str, set[str]] = {}
    for file, name in imports(package):
        parts = name.split(".")
        room = file.parts[1] if len(file.parts) > 2 else file.stem
        if parts[0] == package and len(parts) > 1 and parts[1] != room:
            needs.setdefault(room, set()).add(parts[1])
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    "package", [one for one in PACKAGES if one != "doctor"]
)  # which is one folder of checks
def test_few_files_stand_beside_the_folders(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= 6


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_those_that_they_may(package: str) -> None:
    folder = f"sealring/{package}" if package in ("api", "client", "testing") else package
    found = {name.partition(".")[0] for _, name in imports(folder)}
    assert found <= MAY_IMPORT[package] | {package, "v1", "openai"}


def test_the_command_line_imports_no_doubles() -> None:
    assert not [file for file, name in imports("cli") if name.startswith("testing")]
