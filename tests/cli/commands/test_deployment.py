"""`sealring deployment` and `sealring deploy`: names and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands import deployment
from sealring.mesh.errors import InvalidInput


@pytest.mark.parametrize(("layers", "fine"), [("1", True), ("99999", True), ("100000", False), ("0", False)])
def test_a_split_has_up_to_256_members_of_up_to_99999_layers(layers: str, fine: bool) -> None:
    if fine:
        assert deployment.parse_split(",".join([layers] * 256)) == [int(layers)] * 256
    for text in [] if fine else [layers]:
        with pytest.raises(InvalidInput):
            deployment.parse_split(text)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/models/Qwen3-0.6B/", "qwen3-0-6b"),
        ("org/name", "name"),
        ("/models/my model", "my-model"),
        ("/", "model"),
        ("é", "model"),
        ("x" * 300, "x" * 56),
    ],
)
def test_a_model_names_its_deployment(model: str, name: str) -> None:
    assert deployment.default_name(model) == name


def test_a_file_to_simulate_is_not_read_without_end(here: Any, home: Path) -> None:
    (home / "purchase.json").write_text(" " * (1 << 20) + "{}")
    assert "FILE_TOO_LARGE" in here("deployment", "plan", "--simulate", "purchase.json").err
