from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from sealring.node.engine import RowParameters, device, sampling_kinds
from sealring.node.engine.ranks import MOST
from sealring.node.engine.staging import random_stage

WHICH_TOKENS = {"seed", "position", "answered", "scored", "grammar", "stored", "prompt", "receipt", "grids"}
"""Parameters that change what is drawn or kept, and no operation by which it is drawn."""


def test_every_parameter_that_adds_an_operation_is_warmed() -> None:
    plain = RowParameters()
    left = {
        field.name
        for field in dataclasses.fields(RowParameters)
        if all(getattr(kind, field.name) == getattr(plain, field.name) for kind in sampling_kinds.KINDS)
    }
    assert left == WHICH_TOKENS


def test_every_kind_samples_alone_and_in_company() -> None:
    for tokens, *report in sampling_kinds.samples(mx.zeros((1, 64 * MOST + 1))):
        mx.eval(tokens, report)
        assert 1 <= tokens.size <= 3


def test_a_tail_is_warmed_on_a_gpu_and_other_stages_are_not(
    llama: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def samples(logits: mx.array) -> Iterator[list[mx.array]]:
        seen.append(logits.shape)
        yield [logits]

    monkeypatch.setattr(sampling_kinds, "samples", samples)
    middle, tail = random_stage(llama, 1, 3, seed=0), random_stage(llama, 3, 5, seed=0)
    monkeypatch.setattr(device, "rows_in_turn", lambda: True)
    sampling_kinds.warm_up(tail)
    assert seen == [], "a CPU builds no kernels"
    monkeypatch.setattr(device, "rows_in_turn", lambda: False)
    sampling_kinds.warm_up(middle)
    sampling_kinds.warm_up(tail)
    assert seen == [(1, llama["vocab_size"])]
