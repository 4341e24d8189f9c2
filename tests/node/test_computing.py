"""The packages that models are computed with."""

from __future__ import annotations

import re
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from sealring.node import computing
from sealring.node.computing import COMPUTING, versions

ENGINE = Path(__file__).parents[2] / "node/engine"


def test_all_packages_that_the_engine_takes_models_code_from_are_among_them() -> None:
    """Their versions tell what is kept from one start to the next."""
    imported = {
        name
        for file in ENGINE.rglob("*.py")
        for name in re.findall(r"\b(?:import|from) (mlx\w*)|[\"'f](mlx_\w+)\b", file.read_text("utf-8"))
        for name in name
        if name
    }
    known = packages_distributions()
    sources = {one for name in imported & known.keys() for one in known[name]}
    assert {"mlx", "mlx_lm", "mlx_vlm"} <= imported
    assert sources <= set(COMPUTING)


def test_versions_are_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()["mlx-vlm"] == version("mlx-vlm")
    monkeypatch.setattr(computing, "COMPUTING", ("mlx", "mlx-of-no-index"))
    assert versions() == {"mlx": version("mlx")}
