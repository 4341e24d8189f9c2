"""Which models may guess for which."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine.text import check_alike

DEMO = Path(__file__).parents[4] / "examples" / "demo_model" / "model"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def change(folder: Path, *, swap: bool = False, more: int = 0) -> None:
    """Gives two tokens each other's ids, or adds tokens behind the last."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    if swap:
        one, two = list(vocabulary)[-2:]
        vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    size = 1 + max(vocabulary.values())
    for number in range(more):
        vocabulary[f"padding{number}"] = size + number
    file.write_text(json.dumps(content))


def test_the_same_tokens_may_be_more_in_one_than_in_the_other(other: Path) -> None:
    check_alike(DEMO, other)
    change(other, more=3)
    check_alike(DEMO, other)
    check_alike(other, DEMO)


def test_another_token_under_an_id_is_refused_by_name(other: Path) -> None:
    change(other, swap=True)
    with pytest.raises(ModelError) as caught:
        check_alike(DEMO, other)
    assert caught.value.reason == "DRAFT_NOT_ALIKE"
    assert caught.value.message.startswith(f"small cannot guess for {DEMO.name}")
    assert "2 are other tokens" in caught.value.message
    assert caught.value.hint


def test_one_id_that_is_another_token_is_enough(other: Path) -> None:
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["never said before"] = vocabulary.pop("#")
    file.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="1 are other tokens"):
        check_alike(DEMO, other)
