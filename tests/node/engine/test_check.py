from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import tiny

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine import check_runs, ranges_of
from sealring.node.engine.check import check

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

ALWAYS = (
    *("gemma3n", "gemma4_text", "hunyuan", "rwkv7", "talkie"),
    *("gpt2", "jamba", "llama:sliding", "qwen3_next", "recurrent_gemma"),
)
"""Those that every run has: architectures with adapters of their own, and those whose caches, masks or layers
are of several kinds. `test_architectures.py` has the adapters that batch what mlx-lm does not, and those of
which several states cross; rings (`test_epoch_tokens.py`) have the plain chains."""
SHARING = ("gemma3n", "gemma4_text")
"""Those whose keys and values cross boundaries, in four stages so that some only pass them on."""
NOT_STAGEABLE = {"iquestloopcoder": "runs through its layers twice"}


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=() if key in ALWAYS else pytest.mark.sweep)
        for key in CONFIGS
        if key not in NOT_STAGEABLE
    ],
)
def test_stages_compute_what_the_whole_model_does(key: str) -> None:
    report = check(tiny(CONFIGS[key], key), stages=4 if key in SHARING else 3, rows=3, seed=1)
    assert (report.exact, report.max_abs_diff, report.tokens_equal) == (True, 0, True)
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


@settings(max_examples=4)
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


def test_configuration_by_key() -> None:
    report = check(f"{ARCHS}#mixtral", splits=[1, 5], rows=1)
    assert report.stages == [[0, 1], [1, 6]]
    assert report.exact


@pytest.mark.parametrize(("off", "on_gpu"), [(1e-6, True), (0.5, False), (float("nan"), False)])
def test_rounding_is_right_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, off: float, on_gpu: bool) -> None:
    """A stage's logits are `off` by a little; the default device is only asked for."""
    own = check_runs.Staged.__call__
    monkeypatch.setattr(check_runs.Staged, "__call__", lambda *given: own(*given) + off)
    for device in (mx.cpu, mx.gpu):
        monkeypatch.setattr(check_runs.mx, "default_device", lambda device=device: device)
        report = check(f"{ARCHS}#mixtral", splits=[1, 5], rows=1)
        assert not report.exact
        assert report.right == (on_gpu and device == mx.gpu)


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
