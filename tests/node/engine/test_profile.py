from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from opening import opened_in
from vectormodels import write
from visionmodels import write_folder

import sealring.node.engine
from sealring.node.engine import digest, load_lazily, load_stage, read_header
from sealring.node.engine.profile import COVERED, max_context, profile
from sealring.node.engine.text import load_tokenizer
from sealring.node.models.manifest import belongs

Folder = Callable[..., Path]


def test_sizes_are_those_of_loaded_stages(llama: dict[str, Any], model_folder: Folder) -> None:
    for tied in (True, False):
        folder = model_folder(llama | {"tie_word_embeddings": tied}, name=f"tied_{tied}", dtype=mx.bfloat16)
        found = profile(folder)
        assert found["tied"] is tied
        head, middle, tail = (load_stage(folder, lo, hi).weight_bytes for lo, hi in ((0, 2), (2, 3), (3, 5)))
        layers = found["layer_bytes"]
        assert head == sum(layers[:2]) + found["embed_bytes"]
        assert middle == layers[2]
        assert tail == sum(layers[3:]) + found["head_bytes"] + (found["embed_bytes"] if tied else 0)


def test_fields(llama: dict[str, Any], model_folder: Folder) -> None:
    found = profile(model_folder(llama, dtype=mx.bfloat16))
    assert found | {"layer_bytes": [], "embed_bytes": 0, "head_bytes": 0, "digest": ""} == {
        "model_type": "llama",
        "layers": 5,
        "hidden_size": 32,
        "vocab_size": 100,
        "dtype": "bfloat16",
        "layer_bytes": [],
        "embed_bytes": 0,
        "head_bytes": 0,
        "tied": True,
        "kv_bytes_per_token": [2 * 2 * 8 * 2] * 5,
        "kv_max_tokens": [None] * 5,
        "state_bytes": [0] * 5,
        "quantized": [],
        "not_quantizable": "the KV cache of llama cannot be quantized: its keys or values are 8 wide, "
        "which no 32 divides",
        "trimmable": True,
        "travels": True,
        "residents": [],
        "image_tokens": 0,
        "not_seeing": "",
        "max_context": 512,
        "eos_token_ids": [2],
        "handoff_bytes_per_token": 64,
        "digest": "",
        "card": {
            "parameters": 100 * 32 + 5 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32,
            "precision": "bfloat16",
        },
    }


@pytest.mark.parametrize(
    ("quantization", "precision"),
    [
        ({"group_size": 32, "bits": 4}, "int4"),
        ({"group_size": 32, "bits": 8}, "int8"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, "mxfp4"),
    ],
)
def test_a_quantized_model_has_the_parameters_that_it_had_before(
    llama: dict[str, Any], model_folder: Folder, quantization: dict[str, Any], precision: str
) -> None:
    before = profile(model_folder(llama, dtype=mx.bfloat16))
    after = profile(model_folder(llama | {"quantization": quantization}, name="packed", dtype=mx.bfloat16))
    assert after["card"] == {"parameters": before["card"]["parameters"], "precision": precision}


def test_every_rank_reports_the_parameters_of_the_whole_model(
    llama: dict[str, Any], model_folder: Folder
) -> None:
    folder = model_folder(llama, dtype=mx.bfloat16)
    assert profile(folder, 2)["card"] == profile(folder)["card"]


def test_the_card_has_the_models_own_options(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama, dtype=mx.bfloat16)
    before = profile(folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 9, "do_sample": true}')
    after = profile(folder)
    assert after["card"] == before["card"] | {"temperature": 0.5, "top_k": 9}
    assert after["digest"] != before["digest"], "so receipts, which have it, tell the options too"


def test_quantized_caches_have_the_bytes_that_they_take(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama | {"head_dim": 64}, dtype=mx.bfloat16)
    found = profile(folder)
    assert found["not_quantizable"] == ""
    heads, scale = 2 * 2, 2 * 2  # keys and values of two heads; a scale and a bias per 64 values
    assert found["quantized"] == [
        {"bits": bits, "kv_bytes_per_token": [heads * (64 * bits // 8 + scale)] * 5} for bits in (8, 4)
    ]
    cache = load_stage(folder, 0, 5, kv_bits=4).make_cache()
    plain = load_stage(folder, 0, 5).make_cache()
    for caches, expected in ((cache, found["quantized"][1]), (plain, found)):
        for one, per_token in zip(caches, expected["kv_bytes_per_token"], strict=True):
            one.update_and_fetch(*[mx.zeros((1, 2, 300, 64), mx.bfloat16)] * 2)
            assert one.nbytes == 512 * per_token


def test_nothing_is_materialised(llama: dict[str, Any], model_folder: Folder) -> None:
    folder = model_folder(llama | {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 2000})
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    profile(folder)
    assert mx.get_peak_memory() - before < 64 * 1024


def test_windows_states_and_shared_caches(archs: dict[str, dict[str, Any]], model_folder: Folder) -> None:
    sliding = profile(model_folder(archs["llama:sliding"], name="sliding"))
    assert sliding["kv_max_tokens"] == [None, 8, 8, 8, None, 8, 8, 8]
    assert set(sliding["kv_bytes_per_token"]) == {2 * 4 * 32 * 4}

    jamba = profile(model_folder(archs["jamba"], name="jamba"))
    assert [size > 0 for size in jamba["state_bytes"]] == [True, False] * 4
    assert [size > 0 for size in jamba["kv_bytes_per_token"]] == [False, True] * 4

    shared = profile(model_folder(archs["gemma4_text"], name="shared"))
    assert [size > 0 for size in shared["kv_bytes_per_token"]] == [True] * 6 + [False] * 4
    assert shared["tied"] is False
    assert shared["handoff_bytes_per_token"] > 128 * 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_ctx": 1024}, 1024),
        ({"max_position_embeddings": None, "model_max_length": 7}, 7),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 0, "block_size": 1}, 1),
        ({}, None),
    ],
)
def test_max_context(config: dict[str, Any], expected: int | None) -> None:
    assert max_context(config) == expected


@pytest.mark.parametrize(
    ("config", "stops"), [({"eos_token_id": [True, 5, "6", 0]}, [5, 0]), ({"eos_token_id": None}, [])]
)
def test_only_numbers_end_answers(
    llama: dict[str, Any], model_folder: Folder, config: dict[str, Any], stops: list[int]
) -> None:
    assert profile(model_folder(llama | config))["eos_token_ids"] == stops


def test_digest(llama: dict[str, Any], model_folder: Folder) -> None:
    one, same, other = (
        model_folder(llama, name="one"),
        model_folder(llama, name="same"),
        model_folder(llama, name="x"),
    )
    assert digest(one) == digest(same)
    (other / "tokenizer.json").write_text("{}")
    assert digest(other) != digest(one)
    (same / "config.json").write_text(json.dumps(llama | {"rope_theta": 5.0}))
    assert digest(same) != digest(one)


OWN = Path(sealring.node.engine.__file__).parent
NOT_READ = {
    *("adapter_config.json", "audio_tokenizer_config.json", "modelcard.json"),
    *("pytorch_model.bin.index.json", "trainer_state.json"),
}
"""Files that transformers has names for and nobody reads here: of adapters, sounds, papers, training."""


def test_a_digest_covers_the_files_that_tokenizers_and_processors_have_names_for() -> None:
    """Both ways: what they may read is covered, and what is covered is something that they may read."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parent
    files = [
        *source.glob("models/*/tokenization_*.py"),
        *source.glob("*.py"),
        source / "utils" / "__init__.py",
    ]
    named = set()
    for text in (file.read_text("utf-8") for file in files):
        for table in re.findall(r"VOCAB_FILES_NAMES\s*=\s*\{([^}]*)\}", text):
            named |= set(re.findall(r':\s*"([^"]+)"', table))
        named |= set(re.findall(r'^[A-Z_]+(?:_FILE|_NAME) = "([^"]+)"', text, re.MULTILINE))
    weights = {name for name in named if "safetensors" in name}
    known = {name for name in named if belongs(name)} - weights - NOT_READ
    own = "".join(file.read_text("utf-8") for file in OWN.rglob("*.py") if file.name != "profile.py")
    read = set(re.findall(r'"([\w.-]+\.(?:json|jinja|model|tiktoken|txt))"', own))
    assert known <= COVERED, "transformers may read these, and two models that differ in them look alike"
    assert known | read >= COVERED, "nothing reads these"


READER = """
import sys
from pathlib import Path
folder, covered = Path(sys.argv[1]), sys.argv[2].split()
opened = set()
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, Path)) and Path(arguments[0]).parent == folder:
        opened.add(Path(arguments[0]).name)
sys.addaudithook(note)
from sealring.node.engine.text.tokenizer import LoadedTokenizer, load_tokenizer
for load in (load_tokenizer, lambda path: LoadedTokenizer(path, 64, chats=False)):
    load(folder).close()
if len(sys.argv) > 3:
    from sealring.node.engine.vision.processor import Processor
    names = load_tokenizer(folder).special
    Processor(folder, {name: number for number, name in names.items()})
print(sorted(name for name in opened if name not in covered and "safetensors" not in name))
"""


@pytest.mark.parametrize("family", ["gemma3", "kimi_vl"])
def test_a_digest_covers_every_file_that_is_opened(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", family)
    command = [sys.executable, "-c", READER, str(folder), " ".join(COVERED), "vision"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr[-2000:]


INDEX = "model.safetensors.index.json"
"""It says which files of weights there have to be, and nothing of what is computed with them."""


@pytest.mark.parametrize("scores", [False, True])
def test_prompts_of_a_model_of_vectors_have_no_answers_to_travel_for(scores: bool, tmp_path: Path) -> None:
    write(tmp_path / "model", scores=scores)
    assert not profile(tmp_path / "model")["travels"]


@pytest.mark.parametrize("scores", [False, True])
def test_what_is_read_of_a_folder_is_fetched_and_covered(scores: bool, tmp_path: Path) -> None:
    """A model of vectors may bring all of these, also in folders inside its own."""
    folder = tmp_path / "model"
    write(folder, scores=scores)
    header = json.loads(read_header(folder / "model.safetensors"))
    names = dict.fromkeys((name for name in header if name != "__metadata__"), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    (folder / "hf_quant_config.json").write_text("[]")
    for name in ("chat_templates", "additional_chat_templates"):
        (folder / name).mkdir()
        (folder / name / "tool_use.jinja").write_text("")
    with opened_in(folder) as opened:
        load_lazily(folder)
        load_tokenizer(folder).close()
    kind = "1_LogitScore" if scores else "1_Pooling"
    assert {"config.json", "modules.json", "hf_quant_config.json", f"{kind}/config.json"} <= opened
    assert "chat_templates/tool_use.jinja" in opened
    assert [name for name in opened if not belongs(name)] == []
    before = digest(folder)
    for name in sorted(opened - {INDEX, "model.safetensors"}):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert digest(folder) != before, name
        (folder / name).write_bytes(content)
    assert digest(folder) == before


@pytest.mark.parametrize("name", sorted(COVERED))
def test_every_file_that_is_covered_changes_the_digest(
    name: str, llama: dict[str, Any], model_folder: Folder
) -> None:
    folder = model_folder(llama)
    before = digest(folder)
    (folder / name).write_text(json.dumps(llama | {"rope_theta": 5.0}))
    assert digest(folder) != before
    (folder / "README.txt").write_text("read me")
    after = digest(folder)
    (folder / "README.txt").unlink()
    assert digest(folder) == after


def test_command(llama: dict[str, Any], model_folder: Folder, tmp_path: Path) -> None:
    def run(path: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sealring.node.engine.profile", str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    folder = model_folder(llama)
    good = run(folder)
    assert json.loads(good.stdout) == {"result": profile(folder)}
    bad = run(tmp_path / "nowhere")
    assert bad.returncode == 1
    assert json.loads(bad.stdout)["problem"]["reason"] == "MODEL_NOT_FOUND"
