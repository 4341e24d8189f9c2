from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny
from stagering import combinations

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine.check import check, ranges_of

ARCHS = Path(__file__).parents[2] / "data" / "archs.json"
CONFIGS: dict[str, dict[str, Any]] = json.loads(ARCHS.read_bytes())
CONFIGS["talkie"] = {
    "model_type": "talkie",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
}

FAMILIES = (
    "llama",
    "llama:tied",
    "llama:sliding",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "gpt_oss",
    "mixtral",
    "deepseek_v3",
)
APART = (
    *(
        "afm7",
        "gemma3n",
        "gemma4_text",
        "gemma4:moe",
        "gpt_bigcode",
        "hunyuan",
        "nanochat",
        "rwkv7",
        "talkie",
    ),
    *("gpt2", "jamba", "lfm2", "llama4", "mamba2", "qwen3_next", "recurrent_gemma"),
)
"""Those with adapters of their own, and those whose caches, masks or layers are of several kinds."""
NOT_STAGEABLE = {"iquestloopcoder": "runs through its layers twice"}


@pytest.mark.parametrize(
    ("family", "stages"),
    combinations(FAMILIES, [1, 2, 3], always=[("llama", 1), *product(("llama:tied", "llama:sliding"), [3])]),
)
def test_families_are_exact(family: str, stages: int) -> None:
    """The others' stages make the whole model's tokens in the rings of `test_epoch_tokens.py`."""
    report = check(tiny(CONFIGS[family], family), stages=stages, rows=3)
    assert report.exact
    assert report.max_abs_diff == 0
    assert report.tokens_equal
    assert report.alone_tokens_equal
    assert len(report.stages) == stages


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=() if key in APART else pytest.mark.sweep)
        for key in CONFIGS
        if key not in (*FAMILIES, *NOT_STAGEABLE)
    ],
)
def test_architectures_are_exact(key: str) -> None:
    report = check(tiny(CONFIGS[key], key), stages=3, rows=3, seed=1)
    assert (report.exact, report.tokens_equal) == (True, True)
    assert report.alone_max_abs_diff is not None
    assert report.alone_max_abs_diff < 1e-3


@pytest.mark.parametrize("key", NOT_STAGEABLE)
def test_architectures_that_do_not_split_run_whole_only(key: str) -> None:
    with pytest.raises(ModelError) as caught:
        check(tiny(CONFIGS[key], key), stages=2)
    assert caught.value.reason == "ARCHITECTURE_NOT_STAGEABLE"
    report = check(tiny(CONFIGS[key], key), stages=1)
    assert report.exact
    assert report.alone_tokens_equal


@settings(max_examples=6)
@given(data=st.data())
def test_any_split_of_llama_is_exact(data: st.DataObject) -> None:
    layers = 6
    cuts = data.draw(st.sets(st.integers(1, layers - 1)))
    ends = [*sorted(cuts), layers]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": layers,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50,
        "tie_word_embeddings": data.draw(st.booleans()),
        "sliding_window": 4,
        "layer_types": [
            "full_attention",
            *data.draw(
                st.lists(
                    st.sampled_from(["full_attention", "sliding_attention"]),
                    min_size=layers - 1,
                    max_size=layers - 1,
                )
            ),
        ],
    }
    report = check(
        config, splits=sizes, rows=data.draw(st.integers(1, 4)), seed=data.draw(st.integers(0, 99))
    )
    assert report.exact
    assert report.tokens_equal


def test_real_weights(llama: dict[str, Any], model_folder: Callable[..., Path]) -> None:
    report = check(model_folder(llama), stages=3)
    assert report.weights == "real"
    assert report.exact


def test_configuration_by_key() -> None:
    report = check(f"{ARCHS}#mixtral", splits=[1, 5], rows=1)
    assert report.stages == [[0, 1], [1, 6]]
    assert report.exact


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"splits": [1, 2]}, InvalidInput),
        ({"splits": [0, 5]}, InvalidInput),
        ({"splits": [2, 3], "stages": 3}, InvalidInput),
        ({"stages": 0}, InvalidInput),
        ({"stages": 6}, InvalidInput),
        ({"rows": 0}, InvalidInput),
        ({"rows": 1000}, InvalidInput),
    ],
)
def test_impossible_requests(
    llama: dict[str, Any], arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        check(llama, **arguments)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_unusable_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError) as caught:
        check(tmp_path / "config.json")
    assert caught.value.reason == "BAD_MODEL_CONFIG"


def test_missing_files(tmp_path: Path) -> None:
    for name in ("nowhere", f"{ARCHS}#nothing"):
        with pytest.raises(ModelError) as caught:
            check(name)
        assert caught.value.reason == "MODEL_NOT_FOUND"


@given(layers=st.integers(1, 100), stages=st.integers(1, 100))
def test_ranges_cover_the_layers(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(InvalidInput):
            ranges_of(layers, stages=stages)
        return
    ranges = ranges_of(layers, stages=stages)
    assert [index for lo, hi in ranges for index in range(lo, hi)] == list(range(layers))
    assert max(hi - lo for lo, hi in ranges) - min(hi - lo for lo, hi in ranges) <= 1
