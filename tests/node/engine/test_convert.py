from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from sealring.mesh.errors import ModelError
from sealring.node.engine.convert import convert
from sealring.node.engine.profile import profile

Folder = Callable[..., Path]
WIDE = {"hidden_size": 64, "intermediate_size": 128}


@pytest.mark.parametrize("bits", [4, 8])
def test_it_writes_what_mlx_lm_makes_of_the_model(
    bits: int, llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(llama | WIDE, dtype=mx.bfloat16)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    made = tmp_path / "made"
    assert convert(folder, made, bits)["bytes"] == sum(one.stat().st_size for one in made.iterdir())
    model, config = load_model(folder)
    expected, _ = quantize_model(model, config, 64, bits)
    found, written = load_model(made)
    assert written["quantization"]["bits"] == bits
    theirs, ours = (dict(tree_flatten(one.parameters())) for one in (expected, found))
    assert theirs.keys() == ours.keys()
    assert all(mx.array_equal(theirs[name], ours[name]) for name in theirs)
    assert (made / "tokenizer_config.json").exists()
    assert not (made / "modeling.py").exists()
    assert profile(made)["card"]["precision"] == f"int{bits}"


def test_a_converted_model_and_a_folder_that_is_there_are_refused(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder(llama | WIDE)
    with pytest.raises(ModelError, match="there already"):
        convert(folder, tmp_path, 4)
    convert(folder, tmp_path / "made", 4)
    with pytest.raises(ModelError, match="quantized already"):
        convert(tmp_path / "made", tmp_path / "again", 4)
    assert not (tmp_path / "again").exists()
