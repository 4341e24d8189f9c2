"""`check` finds models that are right for short prompts only, and compares cuts of each kind."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from sealring.mesh.errors import ModelError
from sealring.node.engine.check import check
from sealring.node.engine.check_report import about, cuts_of
from sealring.node.engine.staging import build_skeleton
from sealring.node.engine.staging.adapters import ADAPTERS, Adapter
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.bounds import reach_of

MORE = json.loads((Path(__file__).parents[2] / "data" / "archs-more.json").read_bytes())
CONFIG = {"model_type": "shares", "hidden_size": 16, "layers_of": 6, "index_topk": 40, "vocab_size": 50}


@dataclass
class Arguments:
    model_type: str
    hidden_size: int
    layers_of: int
    index_topk: int
    vocab_size: int
    by_arguments: bool = False

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Arguments:
        return cls(**given)


class Layer(nn.Module):  # type: ignore[misc]
    """Every third layer chooses something of a long prompt, which the two behind it take as well."""

    def __init__(self, args: Arguments, index: int, book: SimpleNamespace) -> None:
        super().__init__()
        self.full = index % 3 == 0
        self.own = nn.Linear(args.hidden_size, args.hidden_size)
        self._args, self._book = args, book

    def __call__(self, x: mx.array, cache: Any, chosen: mx.array | None) -> mx.array:
        keys, _ = cache.update_and_fetch(x[:, None], x[:, None])
        if self.full:
            self._book.chosen = mx.sin(self.own(x)) if keys.shape[2] > self._args.index_topk else None
        found = chosen if self._args.by_arguments else self._book.chosen
        x = x + mx.tanh(self.own(x)) + keys.mean(axis=2)
        return x if found is None else x + found


class Model(nn.Module):  # type: ignore[misc]
    """As GLM-5.2 and Hy4: what is chosen crosses layers, of prompts of more than `index_topk` tokens."""

    def __init__(self, args: Arguments) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self._book = SimpleNamespace(chosen=None)
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args, index, self._book) for index in range(args.layers_of)]
        self.head = nn.Linear(args.hidden_size, args.vocab_size)

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        x = self.embed(inputs)
        self._book.chosen = None
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, own, self._book.chosen if self.args.by_arguments else None)
        return self.head(x)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("mlx_lm.models.shares")
    module.Model, module.ModelArgs = Model, Arguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Layer, "__module__", module.__name__)
    return


def test_a_cut_that_is_wrong_beyond_what_is_chosen_is_found_by_a_long_prompt() -> None:
    short = check(CONFIG)
    assert short.right
    assert short.longest < CONFIG["index_topk"] == short.reach
    long = check(CONFIG, seconds=1e9)
    assert long.longest > long.reach
    assert not long.right
    assert long.max_abs_diff
    cuts = [lo for lo, _ in long.stages[1:]]
    assert {cut % 3 for cut in cuts} == {0, 1, 2}
    assert long.wrong_cuts == tuple(cut for cut in cuts if cut % 3)
    assert check(CONFIG, splits=[3, 3], seconds=1e9).right


class Forgetful(Adapter):
    """Hands on what layers have chosen, if the lazy runs showed it: not of prompts that are short."""

    def passed(self, arguments: Any, followed: Any) -> Any:
        return arguments[0][0], arguments[0][3]


@pytest.mark.sweep
def test_the_wrong_cuts_of_hy4_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its full layers choose keys for the shared ones behind them."""
    config = MORE["hy_v4"] | {"index_topk": 40}
    right = check(config, seconds=1e9)
    assert (right.right, right.wrong_cuts) == (True, ())
    forgetful = Forgetful(state=((0,), (3,)), batches=False)
    monkeypatch.setitem(ADAPTERS, "mlx_vlm.hy_v4", forgetful)
    assert check(config).right
    wrong = check(config, seconds=1e9)
    assert not wrong.right
    shared = [
        index
        for index, layer in enumerate(build_skeleton(config).layers)
        if getattr(layer.self_attn, "skip_topk", False)
    ]
    cuts = [lo for lo, _ in wrong.stages[1:]]
    assert wrong.wrong_cuts == tuple(cut for cut in cuts if cut in shared)
    assert 0 < len(wrong.wrong_cuts) < len(cuts)


def test_a_state_that_layers_are_given_of_long_prompts_only_is_refused_before_anything_is_computed() -> None:
    config = CONFIG | {"by_arguments": True}
    with pytest.raises(ModelError) as caught:
        check(config, stages=2)
    assert caught.value.reason == "ARCHITECTURE_NOT_STAGEABLE"
    assert "chosen per token" in caught.value.message
    assert about(Path("nowhere"), config)["indivisible"]


def test_a_check_ends_in_time_and_says_how_long_a_prompt_it_compared() -> None:
    config = CONFIG | {"index_topk": 900}
    report = check(config, splits=[3, 3], seconds=1e-9)
    assert 100 < report.longest < report.reach == 900
    assert report.right


@pytest.mark.parametrize(
    ("key", "reach"),
    [
        ("llama", 0),
        ("llama:sliding", 8),
        ("deepseek_v32", 2048),
        ("gemma3_text", 1024),
    ],
)
def test_how_far_models_look_follows_from_their_arguments(
    key: str, reach: int, archs: dict[str, dict[str, Any]]
) -> None:
    assert reach_of(build_skeleton(archs[key])) == reach


def test_keys_are_chosen_as_often_as_a_pool_holds_tokens() -> None:
    model = SimpleNamespace(
        args=SimpleNamespace(index_topk=512, text=SimpleNamespace(compress_ratios=[4, 0]))
    )
    assert reach_of(model) == 2048  # type: ignore[arg-type]
    model.args.sliding_window, model.args.num_experts, model.args.vision_window = 4096, 1 << 16, 1 << 14
    assert reach_of(model) == 4096  # type: ignore[arg-type]


def test_one_cut_of_each_kind(archs: dict[str, dict[str, Any]]) -> None:
    plain = dissect(build_skeleton(archs["llama"]), "llama")
    assert cuts_of(plain) == [1]
    windows = archs["llama:sliding"]
    kinds = windows["layer_types"]
    met: dict[tuple[str, str], int] = {}
    for index in range(1, len(kinds)):
        met.setdefault((kinds[index - 1], kinds[index]), index)
    assert cuts_of(dissect(build_skeleton(windows), "llama")) == sorted(met.values())
