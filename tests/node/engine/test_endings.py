"""Answers that may not end yet: by the logits, in any company, with drafts and after a fault."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from sealring.node.engine.params import RowParameters, from_sampling
from sealring.node.engine.sampling import Sampler
from sealring.v1 import inference_pb2 as inference

END, STOP, OTHER = 2, 5, 7
VOCABULARY = 9


def logits(rows: int = 1, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The end is the likeliest, then the stop, then another."""
    row = np.zeros(VOCABULARY, np.float32)
    row[[END, STOP, OTHER]] = 9, 8, 7
    return mx.array(np.tile(row, (rows, 1))).astype(dtype)


def asked(answered: int = 0, **fields: object) -> RowParameters:
    sampling = inference.Sampling(**fields)  # type: ignore[arg-type]
    return from_sampling(sampling, answered=[OTHER] * answered, ends=[END])


def answer(row: RowParameters, tokens: int) -> list[int]:
    sampler = Sampler([row], [row.position])
    return [int(sampler(logits()).item()) for _ in range(tokens)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [END] * 4),
        ({"min_tokens": 2}, [STOP, STOP, END, END]),
        ({"min_tokens": 2, "stop_token_ids": [STOP]}, [OTHER, OTHER, END, END]),
        ({"ignore_eos": True}, [STOP] * 4),
        ({"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [STOP]}, [OTHER, OTHER, OTHER, STOP]),
        ({"min_tokens": 2, "logit_bias": {END: 100.0}}, [STOP, STOP, END, END]),
        ({"min_tokens": 1, "presence_penalty": 0.5}, [STOP, END, END, END]),
    ],
)
def test_an_end_is_not_sampled_before_its_time(fields: dict[str, object], expected: list[int]) -> None:
    assert answer(asked(**fields), 4) == expected
    assert answer(asked(**fields, temperature=0.05, seed=3), 4) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rows_come_and_go_and_each_has_its_own_time(dtype: mx.Dtype) -> None:
    late, soon, free = asked(min_tokens=4), asked(min_tokens=1), asked()
    sampler = Sampler([late, free], [0, 0])
    told = [sampler(logits(2, dtype)).tolist()]
    sampler.extend(Sampler([soon], [0]))
    told += [sampler(logits(3, dtype)).tolist() for _ in range(2)]
    sampler.filter([2, 0])
    told += [sampler(logits(2, dtype)).tolist() for _ in range(2)]
    assert told == [[STOP, END], [STOP, END, STOP], [STOP, END, END], [END, STOP], [END, END]]


def test_an_answer_that_goes_on_after_a_fault_is_masked_as_before() -> None:
    assert answer(asked(2, min_tokens=3), 2) == [STOP, END]
    assert answer(asked(3, min_tokens=3), 2) == [END, END]


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_drafts_are_masked_by_their_own_places(accepted: int) -> None:
    sampler = Sampler([asked(min_tokens=2)], [0])
    tokens, _, _ = sampler.run(logits(3))
    assert tokens.tolist() == [STOP, STOP, END]
    sampler.settle(accepted)
    assert int(sampler(logits()).item()) == (STOP if accepted < 2 else END)
