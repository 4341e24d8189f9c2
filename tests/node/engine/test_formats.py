"""Weights in other tools' formats are refused by name, or give what mlx-lm's arithmetic makes of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from released import Tensors, experts_apart, released, write

from sealring.mesh.errors import ModelError
from sealring.node.engine import mlx_lm_import, needed, weights
from sealring.node.engine.check import check
from sealring.node.engine.folder import profile_message
from sealring.node.engine.formats import block_of, foreign, from_blocks
from sealring.node.engine.profile import profile

NOWHERE = Path("/nowhere")
SMALL = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 100, "tie_word_embeddings": False}


def each_projection(convert: Callable[[str, mx.array], Tensors], given: Tensors) -> Tensors:
    """Linear layers' weights [m, n] as `convert` makes them of their name without `.weight`."""
    found: Tensors = {}
    for name, (dtype, array) in given.items():
        base, is_projection, _ = name.rpartition("_proj.weight")
        found |= convert(f"{base}_proj", array) if is_projection else {name: (dtype, array)}
    return found


def gptq(name: str, array: mx.array) -> Tensors:
    m, n = array.shape
    return {
        f"{name}.qweight": ("I32", mx.zeros((n // 8, m), mx.int32)),
        f"{name}.qzeros": ("I32", mx.zeros((n // 32, m // 8), mx.int32)),
        f"{name}.scales": ("F16", mx.ones((n // 32, m), mx.float16)),
        f"{name}.g_idx": ("I32", mx.zeros((n,), mx.int32)),
    }


def gptq_without_order(name: str, array: mx.array) -> Tensors:
    found = gptq(name, array)
    del found[f"{name}.g_idx"]
    return found


def packed(name: str, array: mx.array) -> Tensors:
    m, n = array.shape
    return {
        f"{name}.weight_packed": ("I32", mx.zeros((m, n // 8), mx.int32)),
        f"{name}.weight_scale": ("BF16", mx.ones((m, n // 32), mx.bfloat16)),
        f"{name}.weight_shape": ("I64", mx.array([m, n], mx.int64)),
    }


def nvfp4_packed(name: str, array: mx.array) -> Tensors:
    m, n = array.shape
    return {
        f"{name}.weight_packed": ("U8", mx.zeros((m, n // 2), mx.uint8)),
        f"{name}.weight_scale": ("F8_E4M3", mx.zeros((m, n // 16), mx.uint8)),
        f"{name}.weight_global_scale": ("F32", mx.ones((1,))),
    }


def modelopt(name: str, array: mx.array) -> Tensors:
    m, n = array.shape
    return {
        f"{name}.weight": ("U8", mx.zeros((m, n // 2), mx.uint8)),
        f"{name}.weight_scale": ("F8_E4M3", mx.zeros((m, n // 16), mx.uint8)),
        f"{name}.weight_scale_2": ("F32", mx.ones((1,))),
        f"{name}.input_scale": ("F32", mx.ones((1,))),
    }


def per_channel(name: str, array: mx.array) -> Tensors:
    return {
        f"{name}.weight": ("F8_E4M3", mx.to_fp8(array.astype(mx.float32))),
        f"{name}.weight_scale": ("F32", mx.ones((array.shape[0], 1))),
    }


def four_bits(name: str, array: mx.array) -> Tensors:
    return {
        f"{name}.weight": ("U8", mx.zeros((array.size // 2, 1), mx.uint8)),
        f"{name}.weight.absmax": ("F32", mx.ones((array.size // 64,))),
        f"{name}.weight.quant_map": ("F32", mx.ones((16,))),
        f"{name}.weight.quant_state.bitsandbytes__nf4": ("U8", mx.zeros((80,), mx.uint8)),
    }


def blocks(name: str, array: mx.array, block: int = 128) -> Tensors:
    shape = tuple(-(-length // block) for length in array.shape)
    scales = mx.random.uniform(1e-4, 3, shape, key=mx.random.key(len(name)))
    return {
        f"{name}.weight": ("F8_E4M3", mx.to_fp8(array.astype(mx.float32))),
        f"{name}.weight_scale_inv": ("F32", scales),
    }


def compressed(form: str, **weights_are: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights_are, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
IN_BLOCKS = FP8 | {"weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
INT4 = compressed("pack-quantized", num_bits=4, symmetric=True)
REFUSED: dict[str, tuple[Callable[[str, mx.array], Tensors], dict[str, Any] | None, str]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}, "GPTQ of 4 bits"),
    "gptq whose columns keep their order": (
        gptq_without_order,
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        "GPTQ of 4 bits",
    ),
    "gptq without settings": (gptq, None, "GPTQ"),
    "awq of another version": (
        gptq_without_order,
        {"quant_method": "awq", "bits": 4, "version": "gemv"},
        "AWQ gemv of 4 bits",
    ),
    "awq of 3 bits": (gptq_without_order, {"quant_method": "awq", "bits": 3}, "AWQ gemm of 3 bits"),
    "int4": (packed, INT4, "compressed-tensors int4"),
    "int8": (packed, compressed("pack-quantized", num_bits=8), "compressed-tensors int8"),
    "int4 without settings": (packed, None, "compressed-tensors"),
    "fp8": (per_channel, compressed("float-quantized", num_bits=8), "compressed-tensors float-quantized"),
    "nvfp4": (nvfp4_packed, compressed("nvfp4-pack-quantized", num_bits=4), "nvfp4-pack-quantized"),
    "ModelOpt": (modelopt, NVFP4, "ModelOpt NVFP4"),
    "ModelOpt fp8": (per_channel, {"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt FP8"),
    "ModelOpt without settings": (modelopt, None, "ModelOpt NVFP4"),
    "bitsandbytes": (four_bits, NF4, "bitsandbytes of 4 bits"),
    "bitsandbytes without settings": (four_bits, None, "bitsandbytes"),
    "fp8 per tensor": (per_channel, FP8, "fp8 (e4m3)"),
    "fp8 in blocks of another size than is said": (
        lambda name, array: blocks(name, array, 32),
        IN_BLOCKS,
        "fp8 (e4m3) in blocks of 128x128",
    ),
    "fp8 without settings": (per_channel, None, "fp8 (e4m3)"),
    "what nobody knows": (packed, {"quant_method": "hqq"}, "hqq"),
    "a list of methods": (packed, {"quant_method": ["fp8"]}, "of an unknown quantization"),
    "settings that are a list": (packed, ["fp8"], "of an unknown quantization"),
    "settings that are a text": (packed, "fp8", "of an unknown quantization"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_format_is_refused_by_its_name_before_weights_are_read(
    case: str, llama: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert, settings, name = REFUSED[case]
    config = llama | SMALL | ({"quantization_config": settings} if settings else {})
    folder = write(tmp_path / "model", config, each_projection(convert, released(llama | SMALL)))
    (folder / "model.safetensors").touch()
    monkeypatch.setattr(weights, "read_weights", lambda *_: pytest.fail("weights were read"))
    said = set()
    for read in (profile, lambda at: profile_message(str(at)), check, lambda at: needed(at, 0, 1)):
        with pytest.raises(ModelError) as caught:
            read(folder)
        said.add((caught.value.reason, caught.value.message, caught.value.hint))
    ((reason, message, hint),) = said
    assert reason == "MODEL_FORMAT_UNSUPPORTED"
    assert name in message
    assert _parses(hint)


def _parses(hint: str) -> bool:
    """Whether mlx-lm's converter takes the options of a hint."""
    mlx_lm_import.import_whole()
    from mlx_lm.convert import configure_parser

    options = hint.partition("mlx_lm.convert ")[2].partition(";")[0]
    found = configure_parser().parse_args(shlex.split(options))
    return bool(found.quantize and found.hf_path)


@pytest.mark.parametrize("settings", [None, FP8, IN_BLOCKS])
def test_8_bit_floats_without_scales_are_refused(
    settings: dict[str, Any] | None, llama: dict[str, Any], tmp_path: Path
) -> None:
    """MLX reads them as bytes. They were served, as numbers of 0 to 255."""

    def bare(name: str, array: mx.array) -> Tensors:
        return {f"{name}.weight": ("F8_E4M3", mx.to_fp8(array.astype(mx.float32)))}

    config = llama | SMALL | ({"quantization_config": settings} if settings else {})
    folder = write(tmp_path / "model", config, each_projection(bare, released(llama | SMALL)))
    with pytest.raises(ModelError, match="has no scale") as caught:
        profile(folder)
    assert caught.value.reason == "MODEL_FORMAT_UNSUPPORTED"


def test_settings_of_modelopt_beside_the_configuration(llama: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "model", llama | SMALL, each_projection(modelopt, released(llama | SMALL)))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="ModelOpt NVFP4"):
        profile(folder)


def _like_transformers(tensors: Tensors, name: str) -> mx.array:
    """Each weight times its block's scale, in float32, rounded to bfloat16: one weight at a time."""
    weight, scales = mx.from_fp8(tensors[name][1], dtype=mx.float32), tensors[f"{name}_scale_inv"][1]
    rows, columns = (mx.arange(length) // 128 for length in weight.shape)
    return (weight * scales[rows][:, columns]).astype(mx.bfloat16)


def test_blocks_of_8_bit_floats_are_their_products_rounded_once(
    llama: dict[str, Any], tmp_path: Path
) -> None:
    config = llama | SMALL | {"quantization_config": IN_BLOCKS}
    tensors = each_projection(blocks, released(llama | SMALL))
    folder = write(tmp_path / "model", config, tensors)
    model, _ = weights.load_lazily(folder)
    loaded = dict(tree_flatten(model.parameters()))
    checked = [name for name in loaded if f"{name}_scale_inv" in tensors]
    assert len(checked) == 7 * llama["num_hidden_layers"]
    for name in checked:
        assert loaded[name].dtype == mx.bfloat16
        assert mx.array_equal(loaded[name], _like_transformers(tensors, name)).item()
    assert check(folder, stages=3).right
    assert profile(folder)["card"]["precision"] == "bfloat16"


@pytest.mark.parametrize("key", ["qwen3_moe", "deepseek_v3"])
def test_blocks_of_mixtures_and_of_classes_that_read_them_themselves(
    key: str, archs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """mlx-lm's deepseek_v3 has the arithmetic itself: what it makes of a folder is what comes out here."""
    config = archs[key] | {"quantization_config": IN_BLOCKS}
    tensors = each_projection(blocks, released(archs[key]))
    folder = write(tmp_path / "model", config, tensors)
    if key == "deepseek_v3":
        whole, _ = mlx_lm_import.import_utils().load_model(folder, lazy=True)
        expected = dict(tree_flatten(whole.parameters()))
    else:
        expected = {}
        for name, (_, array) in tensors.items():
            in_blocks = f"{name}_scale_inv" in tensors
            expected[name] = _like_transformers(tensors, name) if in_blocks else array
    stage = weights.load_stage(folder, 1, 3)
    kept = {id(array) for array in stage.kept}
    found = {name: array for name, array in tree_flatten(stage.model.parameters()) if id(array) in kept}
    if key == "qwen3_moe":
        found = experts_apart(found, "switch_mlp", "experts")
    assert found
    assert all(mx.array_equal(array, expected[name]).item() for name, array in found.items())


def test_scales_that_do_not_fit_are_no_blocks() -> None:
    with pytest.raises(ValueError, match="scales"):
        from_blocks(mx.zeros((130, 64), mx.uint8), mx.ones((1, 1)), (128, 128))


def test_a_block_is_as_large_as_its_weights_at_most() -> None:
    """Padded, these had 2 GiB, and as many as their settings say."""
    found = from_blocks(mx.full((3, 5), 0x38, mx.uint8), mx.array([[2.0]]), (1 << 15, 1 << 14))
    assert mx.array_equal(found, mx.full((3, 5), 2.0, mx.bfloat16)).item()
    found = from_blocks(mx.full((3, 5), 0x38, mx.uint8), mx.array([[2.0]]), (1 << 80, 2**600))
    assert found.shape == (3, 5)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=200),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)
_KNOWN = ("awq", "bitsandbytes", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8")
_FIELDS = ("bits", "version", "format", "fmt", "scale_fmt", "weight_block_size", "load_in_8bit", "quant_algo")
_SETTINGS = st.builds(
    lambda method, fields: {"quant_method": method} | fields,
    st.sampled_from(_KNOWN) | _JSON,
    st.dictionaries(st.sampled_from((*_FIELDS, "config_groups", "quantization")), _JSON, max_size=4),
)


@given(_SETTINGS | _JSON)
def test_any_settings_are_another_tools_or_none(settings: Any) -> None:
    config = {"quantization_config": settings}
    form = foreign(NOWHERE, config, {})
    assert (form is None) == (not settings)
    block_of(NOWHERE, config)
    if form is not None:
        said = form.refused("model", "llama")
        assert len(str(said)) < 500
        assert str(said).isprintable()
