"""Model folders that would keep whoever opens them busy for ever."""

from __future__ import annotations

import builtins
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from opening import opened_in
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from visionmodels import FAMILIES, write_model

from sealring.mesh.errors import ModelError
from sealring.node.engine import contents, digest, own_options, read_config, weights
from sealring.node.engine.profile import COVERED, profile
from sealring.node.engine.text import check_alike, load_tokenizer
from sealring.node.models.json_files import LIMITS, limit_of

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
    monkeypatch.setattr(contents, "MAX_FILES", 1)
    with pytest.raises(ModelError) as caught:
        profile(folder)
    assert caught.value.reason == "MODEL_FOLDER_UNUSABLE"


LARGE = [
    *(
        "tokenizer.json",
        "merges.txt",
        "generation_config.json",
        "config.json",
        "vocab.json",
        "tokenizer.model",
    ),
    *(
        "preprocessor_config.json",
        "chat_template.jinja",
        "hf_quant_config.json",
        "model.safetensors.index.json",
    ),
    *("qwen.tiktoken", "chat_templates/tool_use.jinja", "1_Pooling/config.json"),
]


@pytest.mark.parametrize("name", LARGE)
def test_a_file_of_gigabytes_is_not_read(llama: dict[str, Any], model_folder: Write, name: str) -> None:
    folder = model_folder(llama)
    (folder / name).parent.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.truncate(3 << 30)
    readers: list[Callable[[Path], object]] = [profile, digest, load_tokenizer, read_config]
    for read in (*readers, lambda path: check_alike(path, path)):
        with opened_in(folder) as opened, pytest.raises(ModelError) as caught:
            read(folder)
        assert (caught.value.reason, opened) == ("MODEL_FOLDER_UNUSABLE", set())
        assert Path(name).name in caught.value.message


@pytest.mark.parametrize(
    "name", [name for name in [*LARGE, "tokenizer_config.json"] if name.endswith("json")]
)
def test_no_file_of_very_many_values_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether it is refused or ignored: 3 bytes of it may become 72 of memory."""
    folder, parse = write_model(tmp_path / "model"), json.loads
    most = next(most for pattern, _, most in LIMITS if fnmatch(Path(name).name, pattern))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b'{"model_type": "gemma3", "a": [' + b"0," * most + b"0]}")

    def loads(text: Any, **options: Any) -> Any:
        assert len(text) < most
        return parse(text, **options)

    monkeypatch.setattr(json, "loads", loads)
    readers: list[Callable[[Path], object]] = [profile, digest, own_options, load_tokenizer]
    for read in readers:
        with suppress(ModelError):
            read(folder)


def test_whatever_is_read_of_a_folder_has_a_bound(tmp_path: Path) -> None:
    """By all that reads one: profile and tokenizer, and the processor of images in a program of its own."""
    folder = write_model(tmp_path / "model")
    with opened_in(folder) as opened:
        profile(folder)
        load_tokenizer(folder, chats=False)
    special = json.dumps(FAMILIES["gemma3"].numbers)
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROCESSOR, str(folder), special], check=True, capture_output=True
    )
    opened |= set(json.loads(done.stdout))
    assert {"config.json", "preprocessor_config.json", "tokenizer_config.json"} <= opened
    unbounded = {name for name in opened | COVERED if limit_of(name) is None}
    assert all(fnmatch(name, contents.WEIGHTS) for name in unbounded)
    files = {name for name in opened if name.endswith(".json")}
    assert all(next(most for pattern, _, most in LIMITS if fnmatch(name, pattern)) for name in files)


PROCESSOR = """
import json, sys
from pathlib import Path
folder, opened = Path(sys.argv[1]), set()
def note(event, told):
    if event == "open" and str(told[0]).startswith(str(folder)):
        opened.add(str(Path(told[0]).name))
sys.addaudithook(note)
from sealring.node.engine.vision.processor import Processor
Processor(folder, {name: int(number) for number, name in json.loads(sys.argv[2]).items()})
print(json.dumps(sorted(opened)))
"""


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
