from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import architectures

DATA = Path(__file__).parents[1] / "data"


def test_the_page_says_what_was_found() -> None:
    found = json.loads(architectures.FOUND.read_bytes())
    assert architectures.PAGE.read_text() == architectures.page(found)


def test_every_configuration_of_the_tests_is_in_it() -> None:
    configurations = {
        key: one["model_type"]
        for file in ("archs.json", "archs-more.json")
        for key, one in json.loads((DATA / file).read_bytes()).items()
    }
    found = json.loads(architectures.FOUND.read_bytes())
    assert {key: one.get("model_type", configurations[key]) for key, one in found.items()} == configurations


def test_nothing_wrong_is_published() -> None:
    with pytest.raises(AssertionError, match="wrong in stages"):
        architectures.page({"llama": {"outcome": "wrong"}})
