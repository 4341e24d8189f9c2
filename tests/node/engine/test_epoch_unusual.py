"""Rings of three over models that are no plain chain of layers: tokens are those of mlx-lm all the same."""

from __future__ import annotations

import random

import pytest
from schedules import check_prefixes, make_steps
from stagering import UNUSUAL, combinations, expected, prompt_of, run

from sealring.node.engine import RowParameters


@pytest.mark.parametrize(
    ("family", "size"),
    combinations(UNUSUAL, [1, 2, 3], always=[("gemma4", 3), ("afm7", 3), ("deepseek_v41", 3)]),
)
def test_rows_together_with_long_prompts_get_the_tokens_of_mlx_lm(family: str, size: int) -> None:
    lengths = dict(enumerate([(3, 9), (30, 6), (1, 6), (17, 4)], start=1))
    rows = {row: (prompt_of(family, row, length), RowParameters()) for row, (length, _) in lengths.items()}
    answers = run(family, size, make_steps(random.Random(3), lengths, 2), rows).answers
    for row, (_, tokens) in lengths.items():
        assert answers[row][:tokens] == expected(family, tuple(rows[row][0]))[:tokens], row


@pytest.mark.parametrize(
    ("family", "size"), combinations(UNUSUAL, [1, 2, 3], always=[("minimax_m3_vl", 3), ("deepseek_v41", 3)])
)
def test_rows_begin_with_kept_prefixes(family: str, size: int) -> None:
    tails = [(0, 3), (0, 2), (1, 4), (0, 6), (1, 2)]
    assert check_prefixes(family, tails, random.Random(7), size) > 0
