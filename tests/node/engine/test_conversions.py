"""Repositories as they are published give, bit for bit, the weights that mlx-lm's own load makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from released import Weights, experts_apart

from sealring.node.engine import device, mlx_lm_import, needed, weights
from sealring.node.engine.ranges import Range
from sealring.node.engine.staging import build_skeleton
from sealring.node.engine.staging.conversions import TIED_OUTSIDE


def mixtral(given: Weights) -> Weights:
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return experts_apart(given, "switch_mlp", "experts", **names)


def qwen3_next(given: Weights) -> Weights:
    """Norms are one less, and a convolution's axes the other way round."""
    found = experts_apart(given, "switch_mlp", "experts")
    for name, array in found.items():
        if "conv1d" in name:
            found[name] = mx.contiguous(array.moveaxis(1, 2))
    return found


def deepseek_v3(given: Weights) -> Weights:
    """8-bit floats with a scale for each block, and one projection where mlx-lm has two."""
    found = experts_apart(given, "switch_mlp", "experts")
    for name in [name for name in found if name.endswith("embed_q.weight")]:
        queries = found.pop(name).swapaxes(-1, -2)
        values = found.pop(name.replace("embed_q", "unembed_out"))
        joined = mx.concatenate([queries, values], axis=1)
        found[name.replace("embed_q", "kv_b_proj")] = joined.reshape(-1, joined.shape[-1])
    for name in [name for name in found if ".mlp." in name and name.endswith("proj.weight")]:
        blocks = tuple(-(-length // 128) for length in found[name].shape)
        found[name + "_scale_inv"] = mx.random.uniform(0.5, 2.0, blocks, key=mx.random.key(1))
        found[name] = mx.to_fp8(found[name])
    return found


def gpt_oss(given: Weights) -> Weights:
    """Experts in mxfp4, gate and up in one tensor, row by row."""
    found = {}
    for name, array in given.items():
        layer, is_expert, rest = name.partition(".experts.")
        if not is_expert or rest.startswith("up_proj"):
            continue
        if rest.startswith("gate_proj"):
            other = given[name.replace("gate_proj", "up_proj")]
            array = mx.stack([array, other], axis=2).reshape(array.shape[0], -1, *array.shape[2:])
        kind = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[rest.split(".")[1]]
        if kind == "_blocks":
            array = array.view(mx.uint8).reshape(*array.shape[:2], -1, 16)
        own = "down_proj" if rest.startswith("down") else "gate_up_proj"
        found[f"{layer}.experts.{own}{kind}"] = array
    return {name: array for name, array in given.items() if ".experts." not in name} | found


def awq(given: Weights) -> Weights:
    """4 bits in AutoAWQ's order, with zero points."""
    found = {}
    for name, array in given.items():
        base, is_linear, _ = name.rpartition("_proj.weight")
        if not is_linear:
            found[name] = array
            continue
        (out, wide), key = array.shape, mx.random.key(len(found))
        most = 2**32 - 1
        found[f"{base}_proj.qweight"] = mx.random.randint(0, most, (wide, out // 8), mx.uint32, key=key)
        found[f"{base}_proj.qzeros"] = mx.random.randint(0, most, (wide // 32, out // 8), mx.uint32, key=key)
        found[f"{base}_proj.scales"] = mx.random.uniform(0.5, 2, (wide // 32, out), mx.float16, key=key)
    return found


MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
SMALL_GPT_OSS = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "vocab_size": 300}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
CASES: dict[str, tuple[Callable[[Weights], Weights], dict[str, Any], dict[str, Any]]] = {
    "mixtral": (mixtral, {}, {}),
    "qwen3_next": (qwen3_next, {}, {}),
    "deepseek_v3": (deepseek_v3, {"vocab_size": 300}, {}),
    "gpt_oss": (gpt_oss, SMALL_GPT_OSS | {"quantization": MXFP4}, {"quant_method": "mxfp4"}),
    "llama": (awq, {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 300}, AWQ),
}


def published(
    folder: Path, config: dict[str, Any], convert: Callable[[Weights], Weights], quantization: dict[str, Any]
) -> Path:
    """The model's repository before mlx-lm's own conversion, with random weights."""
    model = build_skeleton(config)
    converted = convert(
        {
            name: mx.random.normal(array.shape, array.dtype, key=mx.random.key(place))
            if mx.issubdtype(array.dtype, mx.floating)
            else mx.random.randint(0, 100, array.shape, array.dtype, key=mx.random.key(place))
            for place, (name, array) in enumerate(tree_flatten(model.parameters()))
        }
    )
    written = {name: value for name, value in config.items() if name != "quantization"}
    if quantization:
        written["quantization_config"] = quantization
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written))
    mx.save_safetensors(str(folder / "model.safetensors"), converted)
    return folder


@pytest.mark.parametrize("key", CASES)
def test_converted_as_mlx_lm_converts_it_and_never_twice_in_memory(
    key: str, archs: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, smaller, quantization = CASES[key]
    folder = published(tmp_path / "model", archs[key] | smaller, convert, quantization)
    monkeypatch.setattr(device, "read_bytes", lambda: 1)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    parts: list[float] = []
    stage = weights.load_stage(folder, 1, 4, progress=lambda done, total: parts.append(done / total))
    layer = max(
        sum(array.nbytes for _, array in tree_flatten(stage.model.layers[index].parameters()))
        for index in (1, 2, 3)
    )
    if convert is awq:  # which unpacks each 4 bits to 64, some times over
        layer = max(64 * array.nbytes for array in stage.kept)
    if (
        convert is deepseek_v3
    ):  # which has a parameter some times over, as far as MLX runs ahead of what it frees
        layer = max(5 * array.nbytes for array in stage.kept)
    assert mx.get_peak_memory() - before < stage.weight_bytes + layer + 64 * 1024
    assert parts == sorted(parts)
    assert len(parts) == len(stage.kept)
    assert parts[-1] == 1.0
    whole, _ = mlx_lm_import.import_utils().load_model(folder)
    expected = dict(tree_flatten(whole.parameters()))
    kept = {id(array) for array in stage.kept}
    found = {name: array for name, array in tree_flatten(stage.model.parameters()) if id(array) in kept}
    assert len(found) == len(kept)
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        assert bytes(memoryview(array.view(mx.uint8))) == bytes(memoryview(expected[name].view(mx.uint8)))
    _clear_others(folder / "model.safetensors", needed(folder, 1, 4))
    again = weights.load_stage(folder, 1, 4)
    for one, other in zip(stage.kept, again.kept, strict=True):
        assert bytes(memoryview(one.view(mx.uint8))) == bytes(memoryview(other.view(mx.uint8)))


def _clear_others(file: Path, ranges: list[Range]) -> None:
    """What a stage's ranges do not name, but the header, becomes 0xFF, which no weight survives."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    cleared = bytearray(content[:start]).ljust(len(content), b"\xff")
    for _, first, end in ranges:
        cleared[first:end] = content[first:end]
    assert cleared != content
    file.write_bytes(cleared)


@pytest.mark.parametrize("key", TIED_OUTSIDE)
@pytest.mark.parametrize(
    ("outside", "inside", "tied"), [(False, None, False), (True, None, True), (None, True, True)]
)
def test_head_and_embedding_are_one_wherever_a_configuration_says_so(
    key: str, outside: bool | None, inside: bool | None, tied: bool, archs: dict[str, dict[str, Any]]
) -> None:
    """Qwen3-VL's configurations from 8B on say it beside the text part alone."""
    config = dict(archs[key])
    for part, said in ((config, outside), (text := dict(config["text_config"]), inside)):
        part.pop("tie_word_embeddings", None)
        part.update({} if said is None else {"tie_word_embeddings": said})
    model = build_skeleton(config | {"text_config": text})
    assert any("lm_head" in name for name, _ in tree_flatten(model.parameters())) is not tied
