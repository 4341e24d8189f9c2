"""Vectors of rings: those of mlx-lm's whole model, whatever the number of stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from patience import PATIENCE_SECONDS
from stagering import Prompts, Ring, compute_thread, config_of, free

from sealring.mesh.errors import ModelError
from sealring.node.engine import Asking, RowParameters, load_lazily, load_stage, params
from sealring.node.engine.logprobs import pooled
from sealring.node.engine.profile import profile
from sealring.node.engine.staging import random_model
from sealring.node.engine.staging.pooling import pooling_of
from sealring.node.engine.warm_up import warm_up
from sealring.v1 import control_pb2 as control

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [11])
MODULES = ("Transformer", "Pooling", "Normalize")


def listed(*names: str) -> str:
    """A `modules.json` as sentence-transformers writes it; the whole model's path is empty."""
    return json.dumps(
        [
            {"type": f"sentence_transformers.models.{name}", "path": f"{at}_{name}" * bool(at)}
            for at, name in enumerate(names)
        ]
    )


YES, NO = 17, 5


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    yield
    free()


def folder_of(path: Path, *, scores: bool, tied: bool = True, bare: bool = False) -> Any:
    """Writes a model of embeddings or scores; returns mlx-lm's whole model."""
    config = config_of("qwen3") | {"tie_word_embeddings": tied, "architectures": ["Qwen3ForCausalLM"]}
    model = random_model(config, seed=1)
    weights = dict(tree_flatten(model.parameters()))
    if bare:  # as Qwen3-Embedding's own files
        weights = {name.removeprefix("model."): it for name, it in weights.items() if "lm_head" not in name}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    if scores:
        config["classifier_from_token"] = ["no", "yes"]
        vocabulary = {"model": {"vocab": {"no": NO, "yes": YES}}}
        (path / "tokenizer.json").write_text(json.dumps(vocabulary))
    else:
        (path / "modules.json").write_text(listed(*MODULES))
    (path / "config.json").write_text(json.dumps(config))
    return model


class Vectors(Prompts):
    width = 0

    def asking(self, rows: Any, *, first: bool) -> Asking:
        return pooled(len(rows), self.width)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tied", "bare", "scores"])
def test_vectors_are_those_of_the_whole_model(tmp_path: Path, size: int, kind: str) -> None:
    whole = folder_of(tmp_path, scores=kind == "scores", tied=kind == "tied", bare=kind == "bare")
    layers = profile(tmp_path)["layers"]
    edges = [layers * rank // size for rank in range(size + 1)]

    def made(rank: int) -> Any:
        stage = load_stage(tmp_path, *edges[rank : rank + 2])
        warm_up(stage, 512)
        return stage

    stages = [compute_thread(rank).submit(made, rank).result(PATIENCE_SECONDS) for rank in range(size)]
    prompts = Vectors({row: (list(ids), RowParameters()) for row, ids in enumerate(PROMPTS, 1)})
    prompts.width = 2 if kind == "scores" else config_of("qwen3")["hidden_size"]
    ring = Ring(stages, prompts)
    number, starts = 0, dict.fromkeys(range(1, 4), 0)
    while starts:  # the prompts in chunks of up to five tokens, side by side
        number += 1
        chunks = []
        for row, start in list(starts.items()):
            prompt = PROMPTS[row - 1]
            end = min(start + 5, len(prompt))
            size_of = len(params.encode(RowParameters())) if not start else 0
            chunks.append(
                control.Chunk(row=row, start=start, end=end, prompt_tokens=len(prompt), params_bytes=size_of)
            )
            starts[row] = end
            if end == len(prompt):
                del starts[row]
        ring.announce(control.Step(number=number, prefill=control.Prefill(chunks=chunks)))
    ring.wait_for(number)
    for row, ids in enumerate(PROMPTS, 1):
        (found,) = prompts.logprobs[row]
        expected = expected_of(whole, ids, scores=kind == "scores")
        assert np.array_equal(np.array(found.vector, np.float32), expected)
        assert prompts.answers[row] == [0]
    ring.announce(control.Step(number=number + 1, changes=[control.Change(admit=control.Admit(row=1))]))
    ring.announce(control.Step(number=number + 2, decode=control.Decode()))
    ring.wait_for_fault()
    ring.close()


def expected_of(whole: Any, ids: list[int], *, scores: bool) -> Any:
    """In the same chunks: products of other lengths round differently."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(whole)
    for start in range(0, len(ids), 5):
        part = mx.array([ids[start : start + 5]])
        states = whole.model(part, cache)[:, -1] if not scores else whole(part, cache)[:, -1, [NO, YES]]
    return np.array(states[0].astype(mx.float32))


WRONG: list[dict[str, Any]] = [
    *(
        {f"pooling_mode_{one}": True}
        for one in ("mean_tokens", "cls_token", "max_tokens", "weightedmean_tokens")
    ),
    {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},  # both, one behind the other
    *({"pooling_mode": one} for one in ("mean", "cls", ["lasttoken", "mean"])),
    {"pooling_mode_lasttoken": False},
]


@pytest.mark.parametrize(
    "names",
    [
        ("Transformer", "Pooling", "Dense", "Normalize"),
        ("Transformer", "Normalize", "Pooling"),
        ("Transformer", "SpladePooling"),
        ("Transformer",),
        ("StaticEmbedding",),
    ],
)
def test_modules_that_nothing_computes_are_refused_by_name(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The model does not chat, and a module that is left out would change vectors in silence."""
    folder_of(tmp_path, scores=False)
    for content in (
        listed(*names),
        listed(*MODULES).replace("sentence_transformers.models.P", "custom_st.P"),
    ):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ModelError, match=r"its modules\.json lists") as caught:
            load_lazily(tmp_path)
        assert caught.value.reason == "POOLING_UNSUPPORTED"


def test_vectors_are_made_unit_length_if_the_folder_says_so(tmp_path: Path) -> None:
    folder_of(tmp_path, scores=False)
    assert load_lazily(tmp_path)[0].pooling.normalized
    (tmp_path / "modules.json").write_text(listed(*MODULES[:2]))
    assert not load_lazily(tmp_path)[0].pooling.normalized


@pytest.mark.parametrize("model_type", ["bert", "xlm_roberta", "modernbert", "nomic_bert", "gemma3_text"])
def test_an_encoder_is_refused_as_a_model_of_embeddings(tmp_path: Path, model_type: str) -> None:
    """And never as a model type that a newer library may know."""
    folder_of(tmp_path, scores=False)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    for says_so in (True, False):
        if not says_so:
            (tmp_path / "modules.json").unlink()
        if not says_so and model_type == "gemma3_text":
            break  # it chats
        with pytest.raises(ModelError, match=f"embeddings or scores, and vectors of {model_type}") as caught:
            load_lazily(tmp_path)
        assert caught.value.reason == "POOLING_UNSUPPORTED"
        assert "docs/embeddings.md" in caught.value.hint


def test_nothing_that_chats_is_taken_for_an_encoder(archs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert not [key for key, config in archs.items() if pooling_of(tmp_path, config) is not None]


@pytest.mark.parametrize("said", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_decoder_whose_tokens_look_ahead_is_refused(tmp_path: Path, said: dict[str, bool]) -> None:
    for scores in (False, True):
        folder_of(tmp_path, scores=scores)
        config = json.loads((tmp_path / "config.json").read_bytes())
        (tmp_path / "config.json").write_text(json.dumps(config | said))
        with pytest.raises(ModelError, match="look at those behind them"):
            load_lazily(tmp_path)


def test_another_pooling_and_another_architecture_are_refused_by_name(tmp_path: Path) -> None:
    folder_of(tmp_path, scores=False)
    settings = tmp_path / "1_Pooling" / "config.json"
    settings.parent.mkdir()
    for wrong in WRONG:
        settings.write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match="not the last token's") as caught:
            load_lazily(tmp_path)
        assert caught.value.reason == "POOLING_UNSUPPORTED"
    for right in (
        {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False},
        {"pooling_mode": "lasttoken"},
    ):
        settings.write_text(json.dumps(right))
        assert load_lazily(tmp_path)[0].pooling.normalized
    settings.unlink()
    load_lazily(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"architectures": ["Qwen3Model"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="lacks 1_Pooling/config"):
        load_lazily(tmp_path)
    config = json.loads((tmp_path / "config.json").read_bytes()) | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="llama") as caught:
        load_lazily(tmp_path)
    assert caught.value.reason == "POOLING_UNSUPPORTED"


def test_a_score_of_unnamed_tokens_is_refused_by_name(tmp_path: Path) -> None:
    folder_of(tmp_path, scores=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["no", "perhaps"]}))
    with pytest.raises(ModelError, match="which two tokens"):
        load_lazily(tmp_path)
    del config["classifier_from_token"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    kinds = "base.modules.Transformer", "cross_encoder.modules.LogitScore"
    modules = [
        {"type": f"sentence_transformers.{kind}", "path": "1_LogitScore" * at}
        for at, kind in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match="which two tokens"):
        load_lazily(tmp_path)
    (tmp_path / "1_LogitScore").mkdir()
    for beyond, known in ((config["vocab_size"], False), (config["vocab_size"] - 1, True)):
        ids = {"false_token_id": 0, "true_token_id": beyond}
        (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
        with nullcontext() if known else pytest.raises(ModelError, match="which two tokens"):
            load_lazily(tmp_path)


@pytest.mark.parametrize("content", ["[1]", '{"a": 1}', '[{"type": 3, "path": []}]', "[", "null"])
def test_a_list_of_modules_that_makes_no_sense_is_no_list(tmp_path: Path, content: str) -> None:
    folder_of(tmp_path, scores=False)
    (tmp_path / "modules.json").write_text(content)
    assert not hasattr(load_lazily(tmp_path)[0], "pooling")


@pytest.mark.parametrize("content", ["[1]", '{"model": 1}', '{"model": {"vocab": [["no", 0.1]]}}'])
def test_a_tokenizer_without_the_words_of_a_score_is_refused_by_name(tmp_path: Path, content: str) -> None:
    folder_of(tmp_path, scores=True)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="which two tokens"):
        load_lazily(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_the_profile_counts_vectors_in_place_of_logits_and_no_output_head(tmp_path: Path, tied: bool) -> None:
    folder_of(tmp_path, scores=False, tied=tied)
    found = profile(tmp_path)
    assert found["vocab_size"] == config_of("qwen3")["hidden_size"]
    assert found["head_bytes"] < 1 << 12
    assert not found["tied"]
