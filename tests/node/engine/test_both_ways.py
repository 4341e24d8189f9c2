"""Masks in which an image's tokens see each other, in chunks as in a whole prompt."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.base import create_causal_mask

from sealring.node.engine.staging.both_ways import BothWays
from sealring.node.engine.staging.grid import Grid
from sealring.node.engine.staging.mrope import Positions

TOKENS = 16
GRIDS = [Grid(2, 1, 1, 4), Grid(8, 1, 1, 3)]


def whole(window: int | None) -> mx.array:
    """A prompt's mask, bool [TOKENS, TOKENS]."""
    seen = np.array(create_causal_mask(TOKENS, window_size=window))
    for grid in GRIDS:
        seen[grid.begin : grid.end, grid.begin : grid.end] = True
    return mx.array(seen)


@given(
    start=st.sampled_from([0, 1, 2, 6, 7, 8]),
    end=st.sampled_from([11, 13, TOKENS]),
    window=st.sampled_from([None, 2, 5]),
)
def test_a_chunk_sees_what_the_whole_prompt_does(start: int, end: int, window: int | None) -> None:
    images = Positions.of(GRIDS).images(start, end - start)
    assert images is not None
    masks = BothWays(images, start)
    own = create_causal_mask(end - start, start, window_size=window)
    wanted = whole(window)[start:end, :end]
    assert mx.array_equal(masks.mask(own), wanted)
    assert masks.mask(own) is masks.mask(own)
    held = min(start, 3)  # of a cache that has let go of the first tokens
    assert mx.array_equal(masks.mask(own[:, start - held :]), wanted[:, start - held :])
    if window is None:
        assert mx.array_equal(masks.mask("causal"), wanted)


def test_text_and_what_is_generated_has_no_images() -> None:
    positions = Positions.of(GRIDS)
    assert positions.images(0, 2) is None
    assert positions.images(11, 5) is None
    both = Positions.together([positions, None])
    assert both is not None
    assert both.images(2, 4) is None
