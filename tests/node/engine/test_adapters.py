"""Models tuned by adapters: stages compute what mlx-lm computes with the whole tuned model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from trained import write_adapter

from sealring.mesh.errors import ModelError
from sealring.node.engine import digest, mlx_lm_import, needed, weights
from sealring.node.engine.check import check
from sealring.node.engine.profile import profile

Folder = Callable[..., Path]
KEYS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"]


def tuned_logits(model: Path, adapter: Path, tokens: mx.array) -> mx.array:
    """mlx-lm's own, of the whole model."""
    mlx_lm_import.import_whole()
    from mlx_lm.tuner.utils import load_adapters

    whole, _ = mlx_lm_import.import_utils().load_model(model)
    whole = load_adapters(whole, str(adapter))
    whole.eval()
    logits: mx.array = whole(tokens)
    return logits


def staged_logits(model: Path, adapter: Path | None, cuts: list[int], tokens: mx.array) -> mx.array:
    state = [tokens]
    for lo, hi in pairwise(cuts):
        stage = weights.load_stage(model, lo, hi, adapter=adapter)
        state = stage(state, stage.make_cache())
    return state[0]


QUANTIZED = {"quantization": {"group_size": 32, "bits": 4}}
TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]], mx.uint32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "lora of some layers": ({}, {"layers": 2, "keys": KEYS}),
    "lora of a quantized model": (QUANTIZED, {}),
    "lora of embedding and output": ({}, {"keys": [*KEYS, "model.embed_tokens"]}),
    "dora": ({}, {"kind": "dora", "keys": KEYS}),
    "dora of a quantized model": (QUANTIZED, {"kind": "dora", "keys": KEYS}),
    "full": ({}, {"kind": "full"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [[0, 5], [0, 2, 5], [0, 1, 3, 5]])
def test_stages_are_the_tuned_model(
    case: str, cuts: list[int], llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    settings, options = CASES[case]
    model = model_folder(llama | settings)
    adapter = write_adapter(tmp_path / "adapter", model, **options)
    logits = staged_logits(model, adapter, cuts, TOKENS)
    assert mx.array_equal(logits, tuned_logits(model, adapter, TOKENS)).item()
    assert not mx.array_equal(logits, staged_logits(model, None, cuts, TOKENS)).item()


def test_experts_have_adapters(
    archs: dict[str, dict[str, Any]], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(archs["qwen3_moe"])
    keys = ["mlp.switch_mlp.up_proj", "self_attn.v_proj"]
    adapter = write_adapter(tmp_path / "adapter", model, keys=keys, layers=9)
    layers = archs["qwen3_moe"]["num_hidden_layers"]
    logits = staged_logits(model, adapter, [0, 1, layers], TOKENS)
    assert mx.array_equal(logits, tuned_logits(model, adapter, TOKENS)).item()


def as_peft(adapter: Path, folder: Path, **changes: Any) -> Path:
    """A LoRA as PEFT writes it."""
    arrays = mx.load(str(adapter / "adapters.safetensors"))
    parameters = json.loads((adapter / "adapter_config.json").read_text())["lora_parameters"]
    folder.mkdir()
    config = {"peft_type": "LORA", "r": parameters["rank"], "bias": "none", "target_modules": ["q_proj"]}
    config |= {"lora_alpha": parameters["scale"] * parameters["rank"], "modules_to_save": None} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {
        f"base_model.model.{name[:-2]}_{name[-1].upper()}.weight": mx.contiguous(array.T)
        for name, array in arrays.items()
    }
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), named)
    return folder


def test_lora_of_peft(llama: dict[str, Any], model_folder: Folder, tmp_path: Path) -> None:
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model)
    peft = as_peft(adapter, tmp_path / "peft")
    logits = staged_logits(model, peft, [0, 2, 5], TOKENS)
    assert mx.array_equal(logits, tuned_logits(model, adapter, TOKENS)).item()
    ranked = as_peft(adapter, tmp_path / "ranked", use_rslora=True, lora_alpha=7.5 * 3**0.5)
    assert mx.allclose(staged_logits(model, ranked, [0, 5], TOKENS), logits, atol=1e-4).item()


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"peft_type": "IA3"},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"alora_invocation_tokens": [1, 2]},  # tuned behind these alone
        {"init_lora_weights": "pissa"},  # of a model that is less by the adapter's first product
        {"what_comes_next": {"scale": 2}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_kinds_of_peft_are_refused(
    changes: dict[str, Any], llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    peft = as_peft(write_adapter(tmp_path / "adapter", model), tmp_path / "peft", **changes)
    assert _reason(model, peft) == "ADAPTER_UNSUPPORTED"


@pytest.mark.parametrize(
    "changes", [{"r": 4}, {"r": "3"}, {"lora_alpha": math.nan}, {"lora_alpha": math.inf}]
)
def test_a_lora_of_peft_has_the_numbers_that_it_says(
    changes: dict[str, Any], llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    peft = as_peft(write_adapter(tmp_path / "adapter", model), tmp_path / "peft", **changes)
    assert _reason(model, peft) == "ADAPTER_MISMATCH"


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapter_that_lacks_a_part_is_not_the_model_without_it(
    kind: str, llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model, kind=kind, keys=KEYS)
    file, config = adapter / "adapters.safetensors", adapter / "adapter_config.json"
    whole: Any = mx.load(str(file))
    for part in ("lora_a", "lora_b", *["m"] * (kind == "dora")):
        name = next(name for name in whole if name.endswith(f".{part}"))
        mx.save_safetensors(str(file), {other: array for other, array in whole.items() if other != name})
        assert _reason(model, adapter) == "ADAPTER_MISMATCH"
    mx.save_safetensors(str(file), whole)
    said = config.read_text()
    for number in ("NaN", "-Infinity", "1e999"):
        config.write_text(said.replace("7.5", number))
        assert _reason(model, adapter) == "ADAPTER_MISMATCH"
    config.write_text(said.replace(f'"{kind}"', '"other"'))
    assert _reason(model, adapter) == "ADAPTER_UNSUPPORTED"


def _reason(model: Path, adapter: Path | None) -> str:
    reasons = set()
    for read in (
        lambda: profile(model, adapter=adapter),
        lambda: weights.load_stage(model, 0, 2, adapter=adapter),
    ):
        with pytest.raises(ModelError) as caught:
            read()
        assert caught.value.hint
        reasons.add(caught.value.reason)
    (reason,) = reasons
    return reason


def test_a_folder_with_an_adapter_is_never_the_model_without_it(
    llama: dict[str, Any], model_folder: Folder
) -> None:
    model = model_folder(llama)
    plain, before = digest(model), profile(model)
    write_adapter(model, model)
    logits = staged_logits(model, None, [0, 1, 3, 5], TOKENS)
    assert mx.array_equal(logits, tuned_logits(model, model, TOKENS)).item()
    assert digest(model) != plain
    assert sum(profile(model)["layer_bytes"]) > sum(before["layer_bytes"])
    assert check(model, stages=3).right
    assert "adapters.safetensors" in {name for name, _, _ in needed(model, 4, 5)}
    with pytest.raises(ModelError, match="ranks"):
        profile(model, 2)
    (model / "adapter_config.json").unlink()
    assert _reason(model, None) == "ADAPTER_UNSUPPORTED"


ALONE = (
    *("adapters.npz", "adapter_model.bin", "adapter_model.pt", "0000100_adapters.safetensors"),
    *("lora.safetensors", "pytorch_lora_weights.safetensors", "adapter_model-00001-of-00002.safetensors"),
    *("new_embeddings.safetensors", "non_lora_trainables.bin", "trainable_params.bin", "adapter_config.json"),
)


@pytest.mark.parametrize("name", ALONE)
def test_adapters_of_formats_that_are_not_read_are_not_passed_over(
    name: str, llama: dict[str, Any], model_folder: Folder
) -> None:
    model = model_folder(llama)
    (model / name).write_bytes(b"\0" * 64)
    assert _reason(model, None) == "ADAPTER_UNSUPPORTED"


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_an_adapter_without_tensors_is_not_the_model_without_it(
    kind: str, llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model, kind=kind)
    peft = tmp_path / "peft"
    if kind == "lora":
        as_peft(adapter, peft)
        mx.save_safetensors(str(peft / "adapter_model.safetensors"), {})
        assert _reason(model, peft) == "ADAPTER_UNSUPPORTED"
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {})
    assert _reason(model, adapter) == "ADAPTER_UNSUPPORTED"


BESIDE = {
    "0000100_adapters.safetensors": True,
    "adapters.npz": True,
    "adapter_model.bin": True,
    "adapter_model.safetensors": False,
    "lora.safetensors": False,
    "new_embeddings.safetensors": False,
    "non_lora_trainables.bin": False,
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_an_adapter_has_besides_is_never_left_out(
    name: str, llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model)
    (adapter / name).write_bytes(b"x")
    if BESIDE[name]:
        assert profile(model, adapter=adapter)["layers"] == 5
        return
    assert _reason(model, adapter) == "ADAPTER_UNSUPPORTED"


def test_an_adapter_of_mlx_vlm_is_refused_by_name(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model)
    (adapter / "adapter_config.json").write_text('{"rank": 8, "alpha": 16, "dropout": 0.0}')
    with pytest.raises(ModelError, match="no lora_parameters") as caught:
        profile(model, adapter=adapter)
    assert caught.value.reason == "ADAPTER_UNSUPPORTED"


def test_a_digest_covers_all_of_an_adapter(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    """Adapters of one shape are as many as their trainings."""
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model)
    found = {digest(model), digest(model, adapter)}
    file = adapter / "adapters.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found.add(digest(model, adapter))
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace("7.5", "7.6"))
    found.add(digest(model, adapter))
    assert len(found) == 4


def test_adapters_of_other_models_and_damaged_ones(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    model = model_folder(llama)
    wider = model_folder(llama | {"hidden_size": 64, "vocab_size": 90}, name="wider")
    adapter = write_adapter(tmp_path / "adapter", wider)
    assert _reason(model, adapter) == "ADAPTER_MISMATCH"
    deeper = model_folder(llama | {"num_hidden_layers": 6}, name="deeper")
    assert _reason(model, write_adapter(tmp_path / "deep", deeper, layers=6)) == "ADAPTER_MISMATCH"
    own = write_adapter(tmp_path / "own", model)
    file = own / "adapters.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    assert _reason(model, own) == "WEIGHTS_CORRUPT"
    file.write_bytes(content)
    (own / "adapter_config.json").write_text("[]")
    assert _reason(model, own) == "ADAPTER_UNSUPPORTED"
    assert _reason(model, tmp_path / "nowhere") == "MODEL_NOT_FOUND"
    write_adapter(model, model)
    assert _reason(model, adapter) == "ADAPTER_UNSUPPORTED"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_a_digest_opens_no_pipe(
    name: str, llama: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    """It would wait for ever for somebody to write."""
    model, adapter = model_folder(llama), tmp_path / "adapter"
    write_adapter(adapter, model)
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(ModelError) as caught:
        digest(model, adapter)
    assert caught.value.reason == "MODEL_FOLDER_UNUSABLE"


def test_an_adapter_that_is_too_large(
    llama: dict[str, Any], model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder(llama)
    adapter = write_adapter(tmp_path / "adapter", model)
    monkeypatch.setattr("sealring.node.engine.adapters.MAX_BYTES", 100)
    assert _reason(model, adapter) == "ADAPTER_UNSUPPORTED"
