"""Rows that begin with what was kept of others generate what they would have generated alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import check_prefixes
from stagering import combinations

PREFIX_FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "mamba2", "qwen3:4"]


@pytest.mark.parametrize(
    ("family", "size"),
    combinations(
        PREFIX_FAMILIES,
        [1, 2, 3],
        always=[*((each, 1) for each in PREFIX_FAMILIES), ("llama", 3), ("gemma3_text", 3)],
    ),
)
def test_kept_prefixes_are_reused(family: str, size: int) -> None:
    tails = [(0, 3), (0, 2), (1, 4), (0, 1), (2, 1), (0, 6), (1, 2), (0, 2)]
    reused = check_prefixes(family, tails, random.Random(7), size)
    assert reused >= 10


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in ("llama", "gemma3_text") else pytest.mark.sweep)
        for each in PREFIX_FAMILIES
    ],
)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    tails=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=4, max_size=8),
    choices=st.randoms(use_true_random=False),
    size=st.integers(1, 3),
)
def test_a_row_that_begins_with_a_kept_prefix_gives_the_same_tokens(
    family: str, tails: list[tuple[int, int]], choices: random.Random, size: int
) -> None:
    check_prefixes(family, tails, choices, size)
