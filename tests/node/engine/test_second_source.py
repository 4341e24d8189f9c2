"""Text models that mlx-vlm has and mlx-lm has not: the same stages, of classes from another library."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache
from small_models import write_model

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.mesh.system.extras import INSTALL_VISION
from sealring.node.engine import check_runs, mlx_lm_import
from sealring.node.engine.caches.known import parts_of
from sealring.node.engine.folder import load
from sealring.node.engine.profile import _caches as cache_sizes
from sealring.node.engine.staging import build_skeleton, random_model, random_stage
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.denied import DENIED
from sealring.node.engine.staging.pictured import WRAPPED, pictured
from sealring.node.engine.staging.quantization import BITS, CacheQuantization, cache_quantization
from sealring.node.engine.staging.second_source import MODEL_TYPES
from sealring.node.engine.staging.second_source import _family as family_of
from sealring.node.engine.staging.skeleton import TEXT_ALONE
from sealring.v1 import engine_pb2 as engine

DATA = Path(__file__).parents[2] / "data"
CONFIGS: dict[str, dict[str, Any]] = {
    key: config
    for key, config in json.loads((DATA / "archs-more.json").read_bytes()).items()
    if config["model_type"] in MODEL_TYPES and key != "glm_moe_dsa"  # of which mlx-lm has all layers
}
TOKENS = 300
ROUNDING = 1e-4

QUICK = {"deepseek_v4": 3, "flint": 2, "glm5_next": 3, "hy_v4": 2}
"""By configuration: the layer in front of which each run of the tests cuts it."""


SIZES = (64, 37, 5, 1, 90)
"""Tokens of the chunks, which begin anew behind the last."""

SEED = 5


def prompt_of(tokens: int, vocabulary: int = 100, seed: int = SEED) -> mx.array:
    """Random tokens, uint32 [1, tokens]."""
    return mx.random.randint(0, vocabulary, (1, tokens), key=mx.random.key(seed)).astype(mx.uint32)


def follow(
    machine: check_runs.Whole | check_runs.Staged,
    prompt: mx.array,
    sizes: Sequence[int] = SIZES,
    steps: int = 4,
) -> list[mx.array]:
    """The logits of each token of a prompt in chunks and of greedy `steps`, [1, tokens, vocabulary] each."""
    cache, found, place = machine.new_cache(), [], 0
    for size in cycle(sizes):
        if place >= prompt.shape[1]:
            break
        found.append(_called(machine, prompt[:, place : place + size], cache))
        place += size
    for _ in range(steps):
        found.append(_called(machine, mx.argmax(found[-1][:, -1:], axis=-1).astype(mx.uint32), cache))
    return found


def _called(machine: check_runs.Whole | check_runs.Staged, tokens: mx.array, cache: list[Any]) -> mx.array:
    logits = machine(tokens, cache)
    mx.eval(logits)
    return logits


def whole_of(config: dict[str, Any]) -> check_runs.Whole:
    """The whole model of a configuration."""
    model = random_model(config, seed=SEED)
    return check_runs.Whole(model, dissect(model, config["model_type"]).adapter)


def staged(config: dict[str, Any], cuts: Sequence[int]) -> check_runs.Staged:
    """Stages of the same model, cut in front of these layers."""
    layers = len(dissect(random_model(config, seed=SEED), config["model_type"]).layers)
    ends = pairwise((0, *cuts, layers))
    return check_runs.Staged([random_stage(config, lo, hi, seed=SEED) for lo, hi in ends])


def test_a_pass_of_a_few_tokens_drops_no_more_of_a_window_than_is_noted() -> None:
    """DeepSeek V4's windows took the tokens one by one, so that drafts ended the epoch."""
    slid = 0
    for config in CONFIGS.values():
        whole = whole_of(config)
        (cache,) = held = whole.new_cache()
        _called(whole, prompt_of(20), held)
        _called(whole, prompt_of(1), held)
        windows = [one for part in cache for one in parts_of(part) if isinstance(one, RotatingKVCache)]
        _called(whole, prompt_of(4), held)
        assert all(one.keys.shape[2] == one.max_size + 3 for one in windows)
        slid += len(windows)
    assert slid > 0


def test_each_family_has_a_configuration() -> None:
    shown = {MODEL_TYPES[config["model_type"]] for config in CONFIGS.values()}
    assert shown == set(MODEL_TYPES.values())


@pytest.mark.parametrize(("key", "cut"), QUICK.items())
def test_a_long_prompt_is_exact_in_two_stages(key: str, cut: int) -> None:
    prompt = prompt_of(TOKENS // 2)
    expected = follow(whole_of(CONFIGS[key]), prompt)
    got = follow(staged(CONFIGS[key], [cut]), prompt)
    assert check_runs.largest_difference(expected, got) == 0.0


@pytest.mark.parametrize("key", sorted(CONFIGS))
@pytest.mark.sweep
def test_long_prompts_are_exact_wherever_the_model_is_cut(key: str) -> None:
    config = CONFIGS[key]
    prompt, whole = prompt_of(TOKENS), whole_of(config)
    expected = follow(whole, prompt)
    at_once = follow(whole, prompt, [TOKENS], steps=0)
    largest = float(mx.max(mx.abs(at_once[0])).item())  # type: ignore[arg-type]
    in_chunks = [mx.concatenate(expected, axis=1)[:, :TOKENS]]
    assert (check_runs.largest_difference(in_chunks, at_once) or 0) <= ROUNDING * largest
    anatomy = dissect(build_skeleton(config), config["model_type"])
    first, layers = max(1, anatomy.head_layers), len(anatomy.layers)
    for cuts in [*([cut] for cut in range(first, layers)), [first, layers - 1]]:
        assert check_runs.largest_difference(expected, follow(staged(config, cuts), prompt)) == 0.0, cuts


def every_run(*names: str) -> list[Any]:
    """All configurations; those that not every run has are marked as a sweep."""
    return [pytest.param(key, marks=[pytest.mark.sweep] * (key not in names)) for key in CONFIGS]


@pytest.mark.parametrize("key", ["hy_v4", "moondream3"])
def test_weights_in_four_bits_are_exact_in_three_stages(key: str) -> None:
    """Rings of every family are in the sweep (`tests/integration/test_four_bits.py`)."""
    config = CONFIGS[key] | {"quantization": {"group_size": 32, "bits": 4}}
    prompt = prompt_of(TOKENS // 4)
    assert (
        check_runs.largest_difference(
            follow(whole_of(config), prompt), follow(staged(config, [1, 3]), prompt)
        )
        == 0.0
    )


ROWS = (1, 50, 23, 7, 130)
"""Tokens of prompts whose rows share steps, join and leave."""


@pytest.mark.parametrize("key", every_run("ernie4_5_moe_vl"))
def test_rows_of_any_lengths_are_as_alone(key: str) -> None:
    """Longer than the windows and pools, unlike those of `check`: in the same steps or in turn."""
    config = CONFIGS[key]
    model = random_model(config, seed=SEED)
    whole = check_runs.Whole(model, dissect(model, config["model_type"]).adapter)
    prompts = [prompt_of(tokens, seed=tokens) for tokens in ROWS]
    together = check_runs.follow_schedule(prompts, whole)
    alone = check_runs.follow_alone(prompts, whole, [len(together.tokens[row]) for row in range(len(ROWS))])
    assert together.tokens == alone.tokens
    difference = check_runs.largest_difference(*check_runs.comparable(together, alone))
    assert difference is not None
    assert difference <= check_runs.rounding(alone)
    first = max(1, dissect(build_skeleton(config), config["model_type"]).head_layers)
    staged_rows = check_runs.follow_schedule(prompts, staged(config, [first]))
    assert check_runs.largest_difference(together.logits, staged_rows.logits) == 0.0


QUANTIZABLE = [
    "cohere2_moe",
    "ernie4_5_moe_vl",
    "hunyuan_vl",
    "jina_vlm",
    "k2_horizon",
    "kolibri1",
    "molmo",
    "molmo2",
]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("key", every_run("ernie4_5_moe_vl", "inkling_mm_model"))
def test_caches_in_few_bits_are_those_of_the_whole_model_or_refused(key: str, bits: int) -> None:
    config = CONFIGS[key]
    model, layers = random_model(config, seed=SEED), len(build_skeleton(config).layers)
    if key not in QUANTIZABLE:
        with pytest.raises(ModelError, match="cannot be quantized"):
            cache_quantization(model, key, bits)
        return
    how, prompt = cache_quantization(model, key, bits), prompt_of(30)
    stages = [random_stage(config, *part, seed=SEED, kv_bits=bits) for part in ((0, 2), (2, layers))]
    whole = Quantized(model, how)
    assert (
        check_runs.largest_difference(follow(whole, prompt), follow(check_runs.Staged(stages), prompt)) == 0.0
    )


class Quantized(check_runs.Whole):
    """A whole model whose caches have few bits."""

    def __init__(self, model: Any, how: CacheQuantization) -> None:
        super().__init__(model, dissect(model, "").adapter)
        self._how = how

    def new_cache(self) -> list[Any]:
        (cache,) = super().new_cache()
        return [[self._how.new_cache(one) for one in cache]]


def test_the_first_layers_stay_together_where_they_read_tokens() -> None:
    config = CONFIGS["deepseek_v4"] | {"num_hash_layers": 2}
    assert dissect(build_skeleton(config), "deepseek_v4").head_layers == 2
    for lo, hi in ((0, 1), (1, 6)):
        with pytest.raises(InvalidInput, match="the first 2"):
            random_stage(config, lo, hi, seed=SEED)


def test_a_step_that_goes_past_the_layers_is_refused() -> None:
    """As the decode of one token does in mlx-vlm's Qwen4, where nothing stops it."""
    stage = random_stage(CONFIGS["qwen4_exp"], 0, 3, seed=SEED)
    delattr(stage.model.language_model, "_supports_batch_invariant_decode")
    cache = stage.make_cache()
    stage([prompt_of(9)], cache)
    with pytest.raises(ModelError) as caught:
        stage([prompt_of(1)], cache)
    assert caught.value.reason == "ARCHITECTURE_NOT_STAGEABLE"


def test_hy4_chooses_keys_of_rows_of_any_length(tmp_path: Path) -> None:
    """Compiled for all shapes, a choice went by the first row's length: wrong keys of a longer one, and reads
    behind the end of a shorter one, which ended the load below."""
    mx.enable_compile()  # as in an engine
    whole = whole_of(CONFIGS["hy_v4"])
    for tokens in (60, 200, 9):
        at_once, by_one = (follow(whole, prompt_of(tokens), [size], steps=0) for size in (tokens, 1))
        difference = check_runs.largest_difference(at_once, [mx.concatenate(by_one, axis=1)])
        assert difference is not None
        assert difference < ROUNDING
    folder = write_model(tmp_path / "model", CONFIGS["hy_v4"])
    load(engine.LoadStage(path=str(folder), lo=1, hi=6, context=512, prefill_chunk=512), lambda event: None)


def test_qwen4_writes_nothing_in_front_of_a_row_of_two_tokens() -> None:
    build_skeleton(CONFIGS["qwen4_exp"])
    language = importlib.import_module("mlx_vlm.models.qwen4_exp.language")
    row, blocks = mx.zeros((1, 3), mx.bool_), mx.array([[-4, -1]])
    marked = language.mx.put_along_axis(row, blocks, mx.array(True), axis=-1)
    assert marked.tolist() == [[True, False, False]]


def test_glm_5_3_keeps_latents_and_no_keys_of_all_heads() -> None:
    """Bytes a token in float32, in a model of the published size."""
    model = build_skeleton({"model_type": "glm5_next", "text_config": {}})
    anatomy = dissect(model, "glm5_next")
    assert sum(cache_sizes(model, anatomy)["kv_bytes_per_token"]) == 22_891


def test_nothing_is_launched_while_a_graph_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> None:
        raise AssertionError

    wholes = [whole_of(config) for config in CONFIGS.values()]
    monkeypatch.setattr(mx, "async_eval", launch)
    monkeypatch.setattr(mx, "eval", launch)
    for whole in wholes:
        whole(prompt_of(5), whole.new_cache())


def test_the_caches_of_each_family_have_sizes_for_a_plan() -> None:
    for config in CONFIGS.values():
        model = build_skeleton(config)
        measured = cache_sizes(model, dissect(model, config["model_type"]))
        assert sum(measured["kv_bytes_per_token"]) + sum(measured["state_bytes"]) > 0


def folders() -> set[str]:
    """mlx-vlm's model types, by their folders."""
    (place,) = importlib.util.find_spec("mlx_vlm").submodule_search_locations  # type: ignore[union-attr]
    return {folder.name for folder in Path(place, "models").iterdir() if (folder / "__init__.py").is_file()}


def test_each_model_type_that_mlx_vlm_alone_has_is_served_or_denied_by_name() -> None:
    utils = mlx_lm_import.import_utils()
    files = {file.stem.replace("-", "_").lower() for file in Path(utils.__file__).parent.glob("models/*.py")}
    of_mlx_lm = files | {*utils.MODEL_REMAPPING}
    wrapped = {pictured(one).known_as or one for one in WRAPPED}
    served = {*MODEL_TYPES.values(), *TEXT_ALONE}
    assert folders() - of_mlx_lm - wrapped == (served - of_mlx_lm) | DENIED.keys()
    assert not served & DENIED.keys()
    assert served <= folders()


@pytest.mark.parametrize("model_type", ["sam3", "paligemma"])
def test_a_denied_model_type_is_refused_with_its_own_reason(model_type: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_skeleton({"model_type": model_type})
    assert caught.value.reason == "MODEL_TYPE_UNKNOWN"
    assert DENIED[model_type] in caught.value.message


FACTS: dict[str, Callable[[Any], bool]] = {
    "cohere_compass": lambda family: hasattr(getattr(family, "TextConfig", None), "score_shift_a"),
    "limite": lambda family: "ve_rows, positions, cache[index]" in inspect.getsource(family.language),
    "mllama": lambda family: "mx.split(query, 2, axis=1)" in inspect.getsource(family.language),
    "molmo_point": lambda family: hasattr(inspect.getmodule(family.Model), "PointPredictor"),
    "zaya1_vl": lambda family: "return hidden_states, residual, prev_" in inspect.getsource(family.language),
}
"""What stands against model types that write from left to right, in their code."""


@pytest.mark.parametrize("name", FACTS)
def test_what_stands_against_a_model_type_is_in_its_code_and_in_no_other(name: str) -> None:
    assert name in DENIED
    holding = {one for one in {*FACTS, *MODEL_TYPES.values()} if FACTS[name](family_of(one, one))}
    assert holding == {name}


PUBLISHED = {
    "jina_vlm": ("language_model.layers.0.attn.qkv.weight", "lm_head.weight"),
    "molmo": ("model.transformer.blocks.0.ff_out.weight", "model.transformer.ff_out.weight"),
    "molmo2": ("model.transformer.blocks.0.self_attn.att_proj.weight", "lm_head.weight"),
    "moondream2": ("model.text.blocks.0.attn.qkv.weight", "model.text.wte", "model.text.lm_head.bias"),
    "moondream3": ("model.text.blocks.1.mlp.fc1.weight", "model.text.wte", "model.text.lm_head.bias"),
}
"""Names of tensors in published folders."""


@pytest.mark.parametrize("key", PUBLISHED)
def test_published_names_become_those_of_parameters(key: str) -> None:
    model, tower = build_skeleton(CONFIGS[key]), "model.vision.proj_mlp.fc1.weight"
    made = model.sanitize({name: mx.zeros(1) for name in (*PUBLISHED[key], tower)})
    assert len(made) == len(PUBLISHED[key])
    assert made.keys() <= dict(tree_flatten(model.parameters())).keys()


def test_without_mlx_vlm_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = mlx_lm_import.register

    def register(name: str) -> bool:
        if name == "mlx_vlm":
            raise ImportError(f"{name} is not installed")
        return own(name)

    monkeypatch.setattr(mlx_lm_import, "register", register)
    with pytest.raises(ModelError) as caught:
        build_skeleton(CONFIGS["flint"])
    assert caught.value.reason == "MODEL_NEEDS_PACKAGE"
    assert "mlx-vlm" in caught.value.message
    assert caught.value.hint == INSTALL_VISION
