"""Folders of drafters that read hidden states: told by their configuration, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hiddendrafters import CONFIGS, TAPPED, save_drafter, save_model, target_of

from bench.drafters import BLOCK, LAYERS, drafter
from bench.models import Shape, printable, random_model
from sealring.mesh.errors import ModelError
from sealring.node.engine import RowParameters, load_stage, ranges
from sealring.node.engine.drafter_folder import drafter_message, load_drafter
from sealring.node.engine.drafts import HiddenDrafter, kind_of
from sealring.node.engine.guessing import load_sources
from sealring.node.engine.sampling import Sampler
from sealring.node.models import kept, manifest, partial_model
from sealring.v1 import control_pb2 as control
from sealring.v1 import engine_pb2 as engine
from sealring.v1 import model_pb2


def saved(folder: Path, kind: str, **changes: Any) -> tuple[Path, Path]:
    model, drafter = folder / "model", folder / "drafter"
    save_model(model, target_of(kind) | changes)
    save_drafter(drafter, kind, model)
    return model, drafter


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_profile_has_what_a_tail_holds(kind: str, tmp_path: Path) -> None:
    model, drafter = saved(tmp_path, kind)
    assert kind_of(CONFIGS[kind]) == kind.partition(":")[0]
    made = drafter_message(model, drafter)
    (held,) = made.residents
    assert (held.name, held.at, held.guesses) == ("drafter", model_pb2.RING_END_TAIL, True)
    assert tuple(made.taps) == TAPPED
    assert held.bytes > sum(file.stat().st_size for file in drafter.glob("*.safetensors")) // 2
    assert (held.bytes_per_token > 0) == (kind != "DFlash for Laguna")  # which has windows alone


def test_each_stage_of_a_ring_is_loaded_for_a_drafter(tmp_path: Path) -> None:
    model, drafter = saved(tmp_path, "DFlash")
    digest = drafter_message(model, drafter).digest
    command = engine.LoadStage(path=str(model), context=512, taps=TAPPED)
    for lo, hi in ((0, 2), (2, 4)):
        stage, asked = load_stage(model, lo, hi), engine.LoadStage()
        asked.CopyFrom(command)
        if hi == 4:
            asked.draft.path, asked.draft.digest = str(drafter), digest
        found = load_sources(model, asked, stage, 300, lambda: None)
        assert found.ahead == control.DRAFT_SOURCE_HIDDEN
        assert isinstance(found.tail, HiddenDrafter) == (hi == 4)
        facts = {one.source: one for one in found.facts}.get(control.DRAFT_SOURCE_HIDDEN)
        assert (facts.block, facts.taps, facts.rows) == (7, True, 1) if facts else hi == 2
        assert (found.memory > 0) == (hi == 4)
        assert stage([mx.zeros((1, 1), mx.uint32) if lo == 0 else mx.zeros((1, 1, 64))], stage.make_cache())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 128}, "hidden size"),
        ({"vocab_size": 310}, "vocabulary"),
        ({"num_hidden_layers": 5}, "number of layers"),
        ({"model_type": "gemma3_text"}, "families"),
    ],
)
def test_a_drafter_of_another_model_is_refused_by_name(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    model, drafter = saved(tmp_path, "DFlash")
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says) as refused:
        drafter_message(model, drafter)
    assert refused.value.reason == "DRAFT_NOT_ALIKE"
    assert refused.value.hint


def test_a_drafter_of_layers_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    model, drafter = saved(tmp_path, "DFlash")
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 1, 3]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        drafter_message(model, drafter)
    assert refused.value.reason == "DRAFT_TAPS_UNKNOWN"


def test_a_tail_of_parts_has_the_embedding_that_a_drafter_reads_or_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output head of such a model is another matrix. A member fetches the first layer with both."""
    for module in (manifest, partial_model, kept):
        monkeypatch.setattr(module, "PART", 4096)
    model, drafter = saved(tmp_path, "DFlash")
    tail, first = ranges.needed(model, 2, 4), ranges.needed(model, 0, 1)
    wanted = [tail, sorted({*tail, *first})]
    (without, _), (having, _) = partial_model.split(model, tmp_path / "parts", wanted, lambda told: None)
    stage = load_stage(having, 2, 4, parts=True)
    assert load_drafter(drafter, having, stage).facts.kind == "DFlash"
    with pytest.raises(ModelError) as refused:
        load_drafter(drafter, without, stage)
    assert refused.value.reason == "MODEL_PART_MISSING"


@pytest.mark.parametrize("kind", LAYERS)
def test_drafters_of_benchmarks_guess_the_tokens_of_a_models_cycle(kind: str, tmp_path: Path) -> None:
    """Hidden states and temperatures do not matter, so guesses are right as often as a benchmark asks."""
    shape = Shape(layers=6, hidden=128, intermediate=64, heads=2, kv_heads=2, says=200)
    model = random_model(shape, tmp_path)
    found = load_drafter(drafter(model, shape, kind, 40.0), model, load_stage(model, 0, shape.layers))
    assert found.facts.block == (0 if kind == "EAGLE-3" else BLOCK)
    right = 1 if kind == "DFlash" else BLOCK
    cycle, cache = printable(shape.says), found.make_cache()
    for place in range(12):
        hidden = mx.random.normal((1, 1, found.width), key=mx.random.key(place))
        sampler = Sampler([RowParameters(temperature=2.0 * (place % 2), seed=place)], [place])
        guessed = found.guess(mx.array([[cycle[place]]], mx.uint32), hidden, cache, BLOCK, sampler)
        assert guessed.tolist()[:right] == cycle[place + 1 : place + 1 + right]
