"""Parts of models: a stage runs from its own bytes alone, and nothing runs from bytes that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine import load_stage, ranges
from sealring.node.engine.check import check
from sealring.node.engine.profile import profile
from sealring.node.models import kept, manifest, partial_model
from sealring.node.models.folders import NOTE

Folder = Callable[..., Path]
PART = 4096


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, partial_model, kept):
        monkeypatch.setattr(module, "PART", PART)


def test_parts_of_a_split_serve_their_stages_and_no_others(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(llama)
    stages = [(0, 2), (2, 3), (3, 5)]
    wanted = [ranges.needed(folder, *stage) for stage in stages]
    made = partial_model.split(folder, tmp_path / "parts", wanted, lambda told: None)
    size = (folder / "model.safetensors").stat().st_size
    for (lo, hi), (part, length) in zip(stages, made, strict=True):
        assert part.name == folder.name
        assert length < size
        assert profile(part) == profile(folder)
        ranges.check_here(part, lo, hi)
        own, other = (load_stage(path, lo, hi, parts=True).kept for path in (part, folder))
        assert all(mx.array_equal(one, two).item() for one, two in zip(own, other, strict=True))
        for lo, hi in stages:
            if not kept.note_of(part).holds(ranges.needed(folder, lo, hi)):  # type: ignore[union-attr]
                with pytest.raises(ModelError) as raised:
                    ranges.check_here(part, lo, hi)
                assert raised.value.reason == "MODEL_PART_MISSING"
    with pytest.raises(ModelError) as raised:
        ranges.check_here(made[1][0], 0, 2)
    for read in (check, lambda path: load_stage(path, 2, 3)):  # who does not ask which part it is gets none
        with pytest.raises(ModelError) as raised:
            read(made[1][0])
        assert raised.value.reason == "MODEL_PART_MISSING"
    ranges.check_here(folder, 0, 5)
    ranges.check_whole(folder)
    (made[1][0] / NOTE).unlink()
    ranges.check_here(made[1][0], 2, 3)
    for ask in (lambda path: ranges.check_here(path, 0, 2), ranges.check_whole, manifest.Manifest.of):
        with pytest.raises(ModelError) as raised:
            ask(made[1][0])
        assert raised.value.reason in ("MODEL_PART_MISSING", "MODEL_FOLDER_UNUSABLE")


def test_a_part_that_was_begun_is_gone_on_with(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(llama)
    wanted = [ranges.needed(folder, 0, 2)]
    added: list[str] = []

    def tell(line: str) -> None:
        added.extend([line] * line.startswith("stage 0"))
        if len(added) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        partial_model.split(folder, tmp_path / "parts", wanted, tell)
    assert not (tmp_path / "parts" / "stage-0" / "model").exists()
    added.append("interrupted")
    ((part, _),) = partial_model.split(folder, tmp_path / "parts", wanted, tell)
    ranges.check_here(part, 0, 2)
    assert len(added) - 1 == sum(map(len, kept.note_of(part).have))  # type: ignore[union-attr]
