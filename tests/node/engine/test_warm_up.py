"""Which stages are found to evaluate arrays while they are called, and that no way to do so is missed."""

from __future__ import annotations

import gc
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from stagering import SMALL, config_of
from structlog.testing import capture_logs

from sealring.node.engine import device
from sealring.node.engine.caches import OneRow
from sealring.node.engine.staging import Shard, Stage, random_model, random_stage
from sealring.node.engine.staging.interception import intercept_call
from sealring.node.engine.transfer import SharedReceiveBuffer
from sealring.node.engine.warm_up import SECONDS, batches, cuts, patience, timed, warm_up
from sealring.v1 import control_pb2 as control

Archs = dict[str, dict[str, Any]]

NO = ["gpt_oss", "mixtral", "deepseek_v3", "mamba2", "gemma3n", "nanochat"]

Look = Callable[[mx.array], object]
LOOKS: dict[str, Look] = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "bool": lambda x: bool(mx.any(x > 0)),
    "numpy": lambda x: np.array(x.astype(mx.float32)),
    "eval": lambda x: mx.eval(x * 1),
    "async_eval": lambda x: mx.async_eval(x[..., :1]),  # type: ignore[no-untyped-call]
    "the input itself": lambda x: mx.eval(x),
    "a little of it": lambda x: x[0, 0, :1].tolist(),
}


def awaits_input(stage: Stage) -> bool:
    warm_up(stage, 512)
    return stage.awaits_input


def stage_of(config: dict[str, Any], lo: int = 0, hi: int | None = None, **options: Any) -> Stage:
    layers = config.get("num_hidden_layers") or config["n_layers"]
    return random_stage(config, lo, layers if hi is None else hi, seed=3, **options)


@pytest.fixture
def looking(llama: dict[str, Any]) -> Callable[..., Stage]:
    """Makes a stage of a llama whose layers do something with their input first."""

    def make(
        look: Callable[[mx.array, Any], object], lo: int, hi: int, dtype: mx.Dtype = mx.float32
    ) -> Stage:
        stage = stage_of(llama, lo, hi, dtype=dtype)

        def call(own: Callable[..., mx.array], x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            look(x, cache)
            return own(x, mask, cache)

        intercept_call(stage.model.layers[hi - 1], call)
        return stage

    return make


@pytest.mark.parametrize("name", NO)
def test_models_that_only_put_a_graph_together_do_not_wait(archs: Archs, name: str) -> None:
    config = config_of(name) if name in SMALL else archs[name]
    if name == "nanochat":
        config = config | {"hidden_size": 80, "num_hidden_layers": 4, "vocab_size": 120}
    layers = config["num_hidden_layers"]
    middle = layers // 2 or 1
    for lo, hi in ((0, layers),) if name == "nanochat" else ((0, middle), (middle, layers)):
        stage = stage_of(config, lo, hi)
        assert stage.awaits_input  # until it is tried
        with capture_logs() as logs:
            assert not awaits_input(stage)
        assert not logs


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows together take hardly longer than one."""
    monkeypatch.setattr(device, "rows_in_turn", lambda: False)


@pytest.fixture
def few_lengths() -> Iterator[None]:
    """A device that pads chunks to one of a few lengths."""

    class Padding(device.Accelerator):
        lengths = (16, 32, 64, 128)

        def computed_as(self, tokens: int) -> int:
            return -(-tokens // 16) * 16

    device.register(Padding())
    yield
    device.register(device.Accelerator())


def test_no_chunk_is_tried_that_is_longer_than_prompts_can_have(
    looking: Callable[..., Stage], few_lengths: None
) -> None:
    seen = []
    stage = looking(lambda x, cache: seen.append(x.shape[1]), 0, 1)
    stage.computed_as = lambda tokens: -(-tokens // 16) * 16
    for longest, positions, tried in ((20, 1 << 40, [16, 32]), (512, 64, [16, 32, 64])):
        stage.positions = positions
        seen.clear()
        warm_up(stage, longest)
        assert seen[: len(tried)] == tried
        assert max(seen) == tried[-1]


def test_quantized_caches_do_not_wait(llama: dict[str, Any]) -> None:
    assert not awaits_input(stage_of(llama | {"head_dim": 32}, kv_bits=8))


@pytest.mark.parametrize("bounds", [(0, 1), (0, 2), (1, 2)])
def test_a_model_that_routes_by_values_waits(bounds: tuple[int, int]) -> None:
    stage = stage_of(config_of("dbrx"), *bounds)
    with capture_logs() as logs:
        assert awaits_input(stage)
    (event,) = logs
    assert event == {"event": "stage_awaits_input", "log_level": "info", "model_type": "dbrx"}


@pytest.mark.parametrize(("bounds", "dtype"), [((0, 2), mx.float32), ((2, 5), mx.bfloat16)], ids=str)
@pytest.mark.parametrize("look", LOOKS)
def test_whatever_evaluates_is_found(
    looking: Callable[..., Stage], look: str, bounds: tuple[int, int], dtype: mx.Dtype
) -> None:
    stage = looking(lambda x, cache: LOOKS[look](x), *bounds, dtype)
    assert awaits_input(stage)


@pytest.mark.parametrize("shape", [(1, 2), (1, 1), (2, 1)])
def test_steps_of_each_kind_are_tried(looking: Callable[..., Stage], shape: tuple[int, int]) -> None:
    """A chunk, one row, and rows that joined: it may evaluate in some only."""
    seen = []

    def look(x: mx.array, cache: Any) -> None:
        seen.append(x.shape[:2])
        if x.shape[:2] == shape:
            mx.eval(x)

    stage = looking(look, 1, 3)
    assert awaits_input(stage)
    assert shape in seen


def test_what_does_not_depend_on_the_input_may_be_evaluated(looking: Callable[..., Stage]) -> None:
    """As positions, and keys of the steps before, whose input is there."""
    seen = []

    def look(x: mx.array, cache: Any) -> None:
        mx.arange(x.shape[1]).tolist()
        if getattr(cache, "keys", None) is not None:
            seen.append(x.shape[:2])
            mx.eval(cache.keys)

    assert not awaits_input(looking(look, 0, 2))
    assert set(seen) == {(1, 1), (2, 1)}


@pytest.mark.parametrize("always", [True, False])
def test_where_receive_buffers_show_nothing_every_stage_waits(
    llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """As with an MLX that keeps what was evaluated in its graphs, or draws them otherwise."""
    monkeypatch.setattr(SharedReceiveBuffer, "evaluated", property(lambda self: always))
    assert awaits_input(stage_of(llama))


def test_a_trial_leaves_nothing_in_memory(llama: dict[str, Any]) -> None:
    stage = stage_of(llama)
    mx.eval(stage.kept)
    awaits_input(stage)
    gc.collect()
    before = mx.get_active_memory()
    assert not awaits_input(stage)
    gc.collect()
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() == 0


@pytest.mark.parametrize("left", [(0.0, math.inf), (math.inf, 0.0)], ids=str)
def test_steps_that_would_take_long_are_not_timed(left: tuple[float, float]) -> None:
    stage = stage_of(config_of("llama"))
    warm_up(stage, 512)
    found = [(each.rows, each.tokens, each.context) for each in timed(stage, 512, 16, *left)]
    assert found == [(1, 1, 0), (2, 1, 0), (1, 4, 0)]


@pytest.fixture
def edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mac's."""
    monkeypatch.setattr(device, "metal", lambda: True)


@pytest.mark.parametrize(
    ("rows", "longest", "expected"),
    [
        (1, 1, [(1, 1, 0)]),
        (
            7,
            40,
            [*[(rows, 1, 0) for rows in (1, 2, 4, 6, 7)], *[(1, size, 0) for size in (4, 6, 8, 16, 32, 40)]],
        ),
        (
            8,
            64,
            [
                *[(rows, 1, 0) for rows in (1, 2, 4, 6, 8)],
                *[(1, size, 0) for size in (4, 6, 8, 16, 32, 64)],
                (1, 1, 64),
                (8, 1, 64),
            ],
        ),
    ],
)
def test_steps_are_timed_up_to_the_most_rows_and_the_longest_chunk(
    edges: None, rows: int, longest: int, expected: list[tuple[int, int, int]]
) -> None:
    stage = stage_of(config_of("llama"))
    warm_up(stage, longest)
    found = timed(stage, longest, rows, math.inf, math.inf)
    assert [(each.rows, each.tokens, each.context) for each in found] == expected
    assert all(each.microseconds for each in found)


class SlowStage:
    """A stage whose steps take a time by rows and tokens, and the clock that shows it."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self.now, self.steps = 0.0, 0
        self._seconds = seconds
        self.stage = stage_of(config_of("llama"))
        intercept_call(self.stage.model.layers[0], self._call)

    def _call(
        self, own: Callable[..., mx.array], x: mx.array, mask: Any = None, cache: Any = None
    ) -> mx.array:
        self.now += self._seconds(*x.shape[:2])
        self.steps += 1
        return own(x, mask, cache)

    def timed(self, longest: int, rows: int) -> dict[tuple[int, int], float]:
        """Seconds by rows and tokens."""
        found = timed(self.stage, longest, rows, clock=lambda: self.now)
        return {(each.rows, each.tokens): each.microseconds / 1e6 for each in found if not each.context}


def test_a_large_models_stairs_are_all_timed(edges: None, on_a_gpu: None) -> None:
    """A 4-bit 70B on two M4 Max: one row takes 43 ms, and the last size twice as long as the line says."""
    stairs = ((2, 1.0), (4, 1.28), (6, 2.04), (8, 2.5), (9, 3.14), (32, 3.95), (64, 7.8))
    slow = SlowStage(lambda rows, _: 0.043 * next(times for most, times in stairs if rows <= most))
    rows = [rows for rows, tokens in slow.timed(1, 64) if tokens == 1]
    assert {1, 2, 4, 8, 10, 16, 32, 64} <= set(rows)
    assert slow.now < 2 * SECONDS


def test_a_slow_moment_is_timed_again_and_tiles_that_are_faster_stay(edges: None, on_a_gpu: None) -> None:
    """Steps of four rows, and of the most, are slow whenever they are tried at first, as if another stage had
    the device; 13 rows and more are computed in another way."""
    tried: Counter[int] = Counter()

    def seconds(rows: int, _: int) -> float:
        tried[rows] += 1
        slow = rows in (4, 16) and tried[rows] <= 2
        return 0.2 if slow else 0.06 if rows < 13 else 0.03

    found = SlowStage(seconds).timed(1, 16)
    assert found[4, 1] == pytest.approx(0.06)
    assert found[8, 1] == pytest.approx(0.06)
    assert found[16, 1] == pytest.approx(0.03)


def test_no_chunk_is_timed_beyond_a_models_positions() -> None:
    stage = stage_of(config_of("llama"))
    stage.positions = 20
    warm_up(stage, 512)
    assert max(each.tokens for each in timed(stage, 512, 1, math.inf, math.inf)) == 20


@pytest.mark.parametrize("name", ["dbrx", "mamba2", "gemma3n"])
def test_other_architectures_are_timed_in_the_same_way(archs: Archs, name: str) -> None:
    """A model that waits, one with states, and one whose layers share caches."""
    stage = stage_of(config_of(name) if name in SMALL else archs[name])
    warm_up(stage, 64)
    found = {(each.rows, each.tokens, each.context) for each in timed(stage, 64, 8, math.inf, math.inf)}
    assert {(1, 1, 0), (8, 1, 0), (1, 64, 0), (8, 1, 64)} <= found


def test_how_long_a_gpu_may_take_follows_from_its_longest_chunk(on_a_gpu: None) -> None:
    quick, slow = (
        [control.StepTime(rows=1, tokens=tokens, microseconds=each * tokens) for tokens in (32, 128)]
        + [control.StepTime(rows=rows, tokens=1, microseconds=10**8, context=rows) for rows in (16, 1)]
        for each in (10, 2000)
    )
    assert patience(quick, 512) == 4
    assert patience(slow, 512) == pytest.approx(20 * 512 * 0.002)
    assert patience([], 512) == 4
    reads_weights = [control.StepTime(rows=1, tokens=tokens, microseconds=260_000) for tokens in (1, 4)]
    assert patience(reads_weights, 512) == pytest.approx(20 * 0.26 * 512 / 4), "512 tokens are no 4"


def test_a_cpu_always_answers() -> None:
    assert patience([control.StepTime(rows=1, tokens=32, microseconds=10**7)], 512) == math.inf


def tokens_of(count: int, drawn: int) -> list[mx.array]:
    return [mx.random.randint(0, 64, (1, count), key=mx.random.key(drawn)).astype(mx.uint32)]


@pytest.mark.parametrize("name", ["llama", "gemma3n", "mamba2"])
def test_the_last_logits_are_the_same_without_the_others(archs: Archs, name: str) -> None:
    config = config_of(name) if name in SMALL else archs[name]
    stage = stage_of(config)
    assert cuts(stage)
    assert not stage.cuts  # found, and not taken where it is found
    whole, cut = stage.make_cache(), stage.make_cache()
    for count in (7, 1, 12):
        expected = stage(tokens_of(count, count), whole)[0]
        stage.cuts = True
        found = stage.last_logits(tokens_of(count, count), cut)
        stage.cuts = False
        assert mx.allclose(found, expected[:, -1, :], rtol=1e-4, atol=1e-5)


def test_no_product_is_made_that_nobody_needs(llama: dict[str, Any]) -> None:
    stage = stage_of(llama)
    made: list[int] = []
    stage.cuts = True
    intercept_call(stage.model.model.norm, lambda own, x: made.append(x.shape[1]) or own(x))
    stage.last_logits(tokens_of(9, 1), stage.make_cache())
    stage(tokens_of(9, 1), stage.make_cache())
    assert made == [1, 9]


@pytest.mark.parametrize("error", [False, True])
def test_where_the_other_tokens_matter_all_logits_are_made(
    llama: dict[str, Any], on_a_gpu: None, error: bool
) -> None:
    """Behind the layers, where a model's code may do anything."""
    stage = stage_of(llama)

    def looks(own: Callable[..., mx.array], x: mx.array) -> mx.array:
        if error and x.shape[1] == 1:
            raise ValueError("one token")
        return own(x) + own(x).mean(axis=1, keepdims=True)

    restore = intercept_call(stage.model.model.norm, looks)
    assert not cuts(stage)
    restore()
    warm_up(stage, 16)
    assert stage.cuts


def test_ranks_and_stages_without_logits_cut_nothing(llama: dict[str, Any]) -> None:
    assert not cuts(stage_of(llama, 0, 1))
    assert not cuts(Shard(random_model(llama, seed=3), 1, 2, "llama"))


def test_a_cpu_makes_one_pass_more(llama: dict[str, Any]) -> None:
    stage = stage_of(llama)
    warm_up(stage, 16)
    assert not stage.cuts


@pytest.mark.parametrize("name", ["mamba2", "kimi_linear", "rwkv7"])
def test_rows_in_a_batch_get_what_they_get_alone(archs: Archs, name: str) -> None:
    stage = stage_of(config_of(name) if name in SMALL else archs[name])
    assert stage.gpu_code
    assert batches(stage)
    layers = stage.spec.layers
    assert all(batches(stage_of(archs[name], *edges)) for edges in ((0, 1), (1, layers)) if layers > 1)


def test_code_that_mixes_up_rows_on_a_gpu_computes_them_in_turn(
    archs: Archs, monkeypatch: pytest.MonkeyPatch, on_a_gpu: None
) -> None:
    """A kernel that reads the state of another row gives every row something, and nobody an error."""
    stage = stage_of(archs["mamba2"])
    module = importlib.import_module(type(stage.model).__module__)
    own = module.ssm_update

    def mixed(hidden: mx.array, *rest: Any, **more: Any) -> Any:
        found, state = own(hidden, *rest, **more)
        return found[::-1], state

    warm_up(stage, 16)
    assert stage.batches
    monkeypatch.setattr(module, "ssm_update", mixed)
    assert not batches(stage)
    with capture_logs() as logs:
        warm_up(stage, 16)
    assert "rows_differ_in_batches" in [entry["event"] for entry in logs]
    assert isinstance(stage.make_cache(), OneRow)
    assert batches(stage)
