"""Model folders that would keep whoever opens them busy for ever."""

from __future__ import annotations

import builtins
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from sealring.mesh.errors import ModelError
from sealring.node.engine import weights
from sealring.node.engine.profile import digest, profile
from sealring.node.engine.text.tokenizer import load_tokenizer

Write = Callable[..., Path]
NAMES = ["model-2.safetensors", "config.json", "generation_config.json", "tokenizer.json", "notes"]


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_is_not_opened(llama: dict[str, Any], model_folder: Write, name: str) -> None:
    folder = model_folder(llama)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for read in (profile, digest):
        with pytest.raises(ModelError) as caught:
            read(folder)
        assert caught.value.reason == "MODEL_FOLDER_UNUSABLE"
        assert name in caught.value.message


def test_links_to_files_are_files(llama: dict[str, Any], model_folder: Write, tmp_path: Path) -> None:
    folder = model_folder(llama)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    (linked / "gone").symlink_to(tmp_path / "nowhere")
    assert profile(linked)["digest"] == digest(folder)


def test_a_folder_of_very_many_files_is_refused(
    llama: dict[str, Any], model_folder: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(llama)
    monkeypatch.setattr(weights, "_FILE_LIMIT", 1)
    with pytest.raises(ModelError) as caught:
        profile(folder)
    assert caught.value.reason == "MODEL_FOLDER_UNUSABLE"


def test_a_header_of_very_many_tensors_is_refused(
    llama: dict[str, Any], model_folder: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(llama)
    monkeypatch.setattr(weights, "_TENSOR_LIMIT", 10)
    header = json.dumps({f"{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(11)})
    (folder / "model-2.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(ModelError) as caught:
        profile(folder)
    assert "more tensors than a model has" in caught.value.message


@pytest.mark.parametrize("nested", [False, True])
def test_ten_million_layers_are_not_built(llama: dict[str, Any], model_folder: Write, nested: bool) -> None:
    folder = model_folder(llama)
    many = {"num_hidden_layers": 10**7}
    config = llama | ({"text_config": many} if nested else many)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        profile(folder)
    assert caught.value.reason == "BAD_MODEL_CONFIG"
    assert "10000000 layers" in caught.value.message


def test_nobody_is_asked_whether_a_models_own_code_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked"))
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    auto = {"AutoTokenizer": ["tokenization_own.Own", None], "AutoConfig": "configuration_own.Own"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": auto})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto}))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.reason == "TOKENIZER_CORRUPT"
