"""What `make env` says of a Python or a machine that cannot run this, before pip says it in other words."""

from __future__ import annotations

import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
obstacle: Callable[..., str] = runpy.run_path(str(ROOT / ".ci" / "suits.py"))["obstacle"]


@pytest.mark.parametrize(
    ("version", "system", "machine", "macos", "words"),
    [
        ((3, 11, 0), "Darwin", "arm64", "14.0", ""),
        ((3, 14, 2), "Darwin", "arm64", "26.2", ""),
        ((3, 12), "Darwin", "arm64", "16.0", ""),
        ((3, 12), "Linux", "x86_64", "", ""),
        ((3, 10, 9), "Linux", "x86_64", "", "Python 3.11 to 3.14, and this is 3.10"),
        ((3, 15, 0), "Darwin", "arm64", "26.2", "Python 3.11 to 3.14, and this is 3.15"),
        ((3, 12), "Darwin", "x86_64", "15.1", "Apple silicon"),
        ((3, 12), "Darwin", "arm64", "13.6", "macOS 14 or newer"),
        ((3, 12), "Darwin", "arm64", "", "macOS 14 or newer"),
    ],
)
def test_what_stands_in_the_way(
    version: tuple[int, ...], system: str, machine: str, macos: str, words: str
) -> None:
    said = obstacle(version, system, machine, macos)
    assert words in said
    assert bool(said) == bool(words)


def test_pip_and_make_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    for minor in range(8, 20):
        assert (f"3.{minor}" in allowed) == (not obstacle((3, minor), "Linux", "x86_64", ""))
