"""A class of caches that nobody has named is served slowly and right: whatever it says of itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import random
import re
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, CacheList, KVCache, RotatingKVCache
from patience import PATIENCE_SECONDS
from schedules import make_steps
from stagering import SEED, compute_thread, config_of, made_stages, prompt_of, run_on

from sealring.node.engine import RowParameters, caches, support
from sealring.node.engine.blocks import layout_of
from sealring.node.engine.caches.kind import UNKNOWN
from sealring.node.engine.caches.known import KINDS, kind_of, kinds
from sealring.node.engine.caches.undo import can_go_back
from sealring.node.engine.staging import Stage, random_model
from sealring.v1 import control_pb2 as control

SEEN, LAYERS = 6, 5

NO_ROWS = {
    "_BaseCache": "the base of all",
    "CacheList": "a list of caches, each of its own kind",
    "BatchKVCache": "of several rows",
    "BatchRotatingKVCache": "of several rows",
    "ConcatenateKVCache": "made and dropped within a call",
    "QuantizedKVCache": "QuantizedRowCache takes its place",
    "LRUPromptCache": "of whole prompts",
    "TokenBuffer": "of tokens",
}
"""Classes of mlx-lm's that hold no row of ours, and why."""

METHODS = {"update_and_fetch", "is_trimmable"}
CACHES = re.compile(rf"class\s+\w*Cache\b|def\s+({'|'.join(METHODS)})\b")
"""Only files with such words are parsed."""


class Several(CacheList):  # type: ignore[misc]
    """A list with a mind of its own."""


class Recent(KVCache):  # type: ignore[misc]
    """What another release may bring: the last tokens alone, by a bound of another name.

    While it is empty it says that it can be cut, as mlx-lm's window does, and what it inherits merges rows as
    if it held all their tokens.
    """

    def __init__(self, seen: int = SEEN) -> None:
        super().__init__()
        self.seen = seen

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.offset += keys.shape[2]
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys[..., -self.seen :, :], values[..., -self.seen :, :]
        return keys, values

    def make_mask(self, N: int, **_: Any) -> mx.array:
        mask: mx.array = create_causal_mask(N, min(self.offset, self.seen), window_size=self.seen)
        return mask

    def is_trimmable(self) -> bool:
        return bool(self.offset < self.seen)

    @classmethod
    def merge(cls, rows: list[Self]) -> BatchKVCache:
        return BatchKVCache.merge(rows)


def classes_of(package: str) -> set[tuple[str, str]]:
    """The module and name of each class of caches in a package's models, by its source."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    found = set()
    for file in (folder / "models").rglob("*.py"):
        module = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
        text = file.read_text("utf-8")
        for node in ast.walk(ast.parse(text)) if CACHES.search(text) else ():
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                if node.name.endswith("Cache") or methods & METHODS:
                    found.add((module, node.name))
    return found


def test_every_class_of_mlx_lm_is_named_or_known_to_hold_no_row() -> None:
    """A class that another release brings is listed here first, and then gets a module, if it holds rows."""
    theirs = {one for one in KINDS if one[0].startswith("mlx_lm.")}
    assert theirs | {("mlx_lm.models.cache", name) for name in NO_ROWS} == classes_of("mlx_lm")
    assert not {name for _, name in theirs} & set(NO_ROWS)
    for module, name in KINDS:
        assert getattr(importlib.import_module(module), name).__module__ == module


def test_no_class_of_mlx_vlm_is_taken_for_one_of_mlx_lm() -> None:
    """It has classes of the same names, which hold something else."""
    theirs = classes_of("mlx_vlm")
    assert {name for _, name in theirs} & {name for _, name in KINDS}
    assert not theirs & set(KINDS)


def test_what_derives_from_a_class_and_an_unusual_use_of_it_are_unknown() -> None:
    window = kind_of(RotatingKVCache(SEEN))
    assert window is not UNKNOWN
    assert [kind_of(one) for one in (Recent(), RotatingKVCache(SEEN, keep=2))] == [UNKNOWN] * 2
    assert [kind for _, kind in kinds([CacheList(KVCache(), Recent()), Several(KVCache())])] == [
        kind_of(KVCache()),
        UNKNOWN,
        UNKNOWN,
    ]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    monkeypatch.setattr(
        llama.Model, "make_cache", lambda model: [Recent() for _ in model.layers], raising=False
    )
    return made_stages(config_of("llama"), LAYERS, 2)


def test_rows_of_an_unknown_class_are_never_cut_nor_drafted_for_nor_stored(stages: list[Stage]) -> None:
    def abilities(stage: Stage) -> list[object]:
        empty = stage.make_cache()
        together = isinstance(caches.merge([stage.make_cache(), stage.make_cache()]), caches.RowByRow)
        can = [caches.trimmable(empty), caches.cuts_together(empty), can_go_back(empty), layout_of(stage, "")]
        return [support(empty), stage.draft_runs(2), together, *can]

    none = [control.PREFIX_SUPPORT_EXACT, 0, True, False, False, False, None]
    for rank, stage in enumerate(stages):
        assert compute_thread(rank).submit(abilities, stage).result(PATIENCE_SECONDS) == none


def test_rows_of_an_unknown_class_get_the_tokens_of_mlx_lm(stages: list[Stage]) -> None:
    """In lanes of several rows, longer than what the caches hold."""
    model = random_model(config_of("llama"), seed=SEED)

    def alone(prompt: list[int], tokens: int) -> list[int]:
        given, cache, answer = prompt, model.make_cache(), list[int]()
        while len(answer) < tokens:
            answer.append(int(mx.argmax(model(mx.array([given]), cache=cache)[0, -1]).item()))  # type: ignore[arg-type]
            given = answer[-1:]
        return answer

    lengths = dict(enumerate([(3, 9), (20, 6), (1, 6), (11, 4)], start=1))
    rows = {row: (prompt_of("llama", row, length), RowParameters()) for row, (length, _) in lengths.items()}
    answers = run_on(stages, make_steps(random.Random(3), lengths, 1), rows).answers
    for row, (_, tokens) in lengths.items():
        assert answers[row][:tokens] == alone(rows[row][0], tokens), row
