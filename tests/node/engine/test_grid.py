"""Places and sizes of images, from what processors report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sealring.mesh.ring import MAX_CONTEXT, MAX_UNBROKEN
from sealring.node.engine.staging.grid import Grid, needs_grids, possible
from sealring.node.engine.text import Picture, grids_of


def shown(begin: int, *patches: int, merge: int) -> Picture:
    """An image between two special tokens."""
    end = begin + int(np.prod(patches)) // merge**2
    arrays = {"image_grid_thw": np.array([patches])} if patches else {}
    return Picture.of(begin - 1, end + 1, np.arange(begin, end), b"", arrays)


@pytest.mark.parametrize("merge", [1, 2, 3])
def test_sizes_are_in_tokens(merge: int) -> None:
    pictures = [shown(4, 1, 4 * merge, 6 * merge, merge=merge), shown(30, 2, merge, 3 * merge, merge=merge)]
    assert grids_of(pictures) == (Grid(4, 1, 4, 6), Grid(30, 2, 1, 3))
    assert grids_of(pictures)[0].end == 28


def test_without_patches_an_image_is_a_line_of_tokens() -> None:
    assert grids_of([Picture.of(1, 6, np.arange(2, 5), b"", {})]) == (Grid(2, 1, 1, 3),)


@pytest.mark.parametrize(
    ("config", "needs"),
    [
        ({"model_type": "qwen3_vl"}, True),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}, True),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": None}}, False),
        ({"model_type": "gemma4_unified", "text_config": {}}, True),
        ({"model_type": "gemma4_unified", "text_config": {"use_bidirectional_attention": None}}, False),
        ({"model_type": "minimax_m3_vl", "text_config": {}}, False),
    ],
)
def test_stages_need_grids_for_three_dimensions_and_for_both_directions(
    config: dict[str, Any], needs: bool
) -> None:
    assert needs_grids(config) == needs


def test_only_images_of_one_prompt_are_possible() -> None:
    assert possible([Grid(0, 1, 2, 3), Grid(6, 1, 1, 1)])
    assert not possible([Grid(0, 1, 2, 3), Grid(5, 1, 1, 1)])
    assert not possible([Grid(0, 1, 0, 3)])
    assert not possible([Grid(1, 1, 1, MAX_CONTEXT)])
    assert not possible([Grid(at, 1, 1, 1) for at in range(MAX_UNBROKEN + 1)])
