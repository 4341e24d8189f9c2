"""The examples of docs/testing.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sealring import testing

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text("utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
async def test_an_example_passes(number: int) -> None:
    found: dict[str, Any] = {}
    exec(compile(EXAMPLES[number], f"example {number}", "exec"), found)
    (test,) = (value for name, value in found.items() if name.startswith("test_"))
    await test()


def test_every_public_name_has_its_row() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(testing.__all__)
