"""Positions in three dimensions against those of mlx-vlm's language models."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import ModelError
from sealring.node.engine.staging.grid import Grid
from sealring.node.engine.staging.mrope import MRope, Positions, mrope_of
from sealring.node.engine.vision import mlx_vlm_import

MERGE, SHOWN, IMAGE, WORD = 2, 6, 7, 1
"""Patches of a token, each way; the tokens before an image and of one; another token."""

layouts = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4)
"""Words before an image, and its height and width, in tokens."""


def vlm(family: str) -> Any:
    """mlx-vlm's module of a language model."""
    assert mlx_vlm_import.family(family) is not None
    return importlib.import_module(f"mlx_vlm.models.{family}.language")


def laid_out(layout: list[tuple[int, int, int]], after: int) -> tuple[list[int], list[Grid]]:
    """Tokens of a prompt, and its images."""
    tokens: list[int] = []
    grids = []
    for words, height, width in layout:
        tokens += [WORD] * words + [SHOWN]
        grids.append(Grid(len(tokens), 1, height, width))
        tokens += [IMAGE] * height * width
    return tokens + [WORD] * after, grids


def expected(family: str, tokens: list[int], grids: list[Grid]) -> tuple[mx.array, int]:
    """mlx-vlm's positions, [3, 1, tokens], and the difference for tokens behind them."""
    config = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=MERGE),
        image_token_id=IMAGE,
        video_token_id=8,
        vision_start_token_id=SHOWN,
    )
    patches = mx.array([[grid.frames, MERGE * grid.height, MERGE * grid.width] for grid in grids])
    language = SimpleNamespace(config=config)
    positions, delta = vlm(family).LanguageModel.get_rope_index(language, mx.array([tokens]), patches)
    return positions, int(delta.item())


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
@given(layout=layouts, after=st.integers(1, 5), data=st.data())
def test_positions_are_mlx_vlms_wherever_a_chunk_begins(
    family: str, layout: list[tuple[int, int, int]], after: int, data: st.DataObject
) -> None:
    tokens, grids = laid_out(layout, after)
    positions, delta = expected(family, tokens, grids)
    start = data.draw(st.integers(0, len(tokens) - 1))
    end = data.draw(st.integers(start + 1, len(tokens)))
    own = Positions.of(grids)
    assert mx.array_equal(own.at(start, end - start), positions[..., start:end])
    generated = own.at(mx.array([len(tokens)]), 3)
    assert generated.tolist() == [[[len(tokens) + delta + more for more in range(3)]]] * 3


def test_rows_that_decode_together_have_each_its_own() -> None:
    one, other = Positions.of([Grid(2, 1, 4, 3)]), Positions.of([Grid(0, 1, 1, 9), Grid(9, 1, 2, 2)])
    assert Positions.together([None, None]) is None
    assert Positions.together([one]) is one
    both = Positions.together([one, None, other])
    assert both is not None
    assert both.at(mx.array([20, 30, 40]), 2)[0].tolist() == [[12, 13], [30, 31], [38, 39]]
    assert both.seen is not None
    assert both.seen.tolist() == [True, False, True]
    assert both.row(1) is None
    assert [own.at(50, 1).tolist() for own in (both.row(0), both.row(2)) if own] == [
        own.at(50, 1).tolist() for own in (one, other)
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("width", [32, 48])
@pytest.mark.parametrize(
    ("style", "sections"),
    [
        ("chunked", [4, 6, 6]),
        ("interleaved", [6, 5, 5]),
        ("interleaved", [8, 4, 4]),
        ("sectioned_half_split", [4, 6, 6]),
        ("sectioned_even_odd", [4, 6, 6]),
    ],
)
def test_queries_and_keys_are_turned_as_mlx_vlm_does_it(
    style: str, sections: list[int], width: int, dtype: mx.Dtype
) -> None:
    vlm("qwen3_vl")
    ropes = importlib.import_module("mlx_vlm.models.rope_utils")
    theirs = ropes.MRoPERotaryEmbedding(32, base=1000.0, mrope_section=sections, style=style)
    tokens, grids = laid_out([(3, 4, 2), (0, 2, 5)], 6)
    positions = Positions.of(grids).at(0, len(tokens))
    queries, keys = (mx.random.normal((1, heads, len(tokens), width)).astype(dtype) for heads in (4, 2))
    wanted = ropes.apply_multimodal_rotary_pos_emb(
        queries, keys, *theirs(keys, positions), style=style, mrope_section=sections
    )
    rope = nn.RoPE(32, traditional=style == "sectioned_even_odd", base=1000.0)
    own = MRope(rope, sections, interleaved=style == "interleaved")
    angles = own.angles(positions, dtype)
    assert all(
        mx.array_equal(own(array, angles), other)
        for array, other in zip((queries, keys), wanted, strict=True)
    )


@pytest.mark.parametrize(
    ("model_type", "text", "rope"),
    [
        ("llama", {"rope_scaling": {"mrope_section": [4, 6, 6]}}, nn.RoPE(32)),
        ("qwen2_vl", {"rope_scaling": None}, nn.RoPE(32)),
        ("qwen3_vl", {"rope_scaling": {"mrope_section": [4, 6]}}, nn.RoPE(32)),
        ("qwen3_vl", {"rope_scaling": {"mrope_section": [4, 6, 6]}}, nn.Identity()),
        ("qwen3_vl", {"rope_scaling": {"mrope_section": [4, 6, 6]}}, nn.RoPE(32, scale=0.5)),
    ],
    ids=["one dimension", "no sections", "two sections", "another embedding", "a scaled one"],
)
def test_a_model_whose_positions_are_not_known_sees_nothing(
    model_type: str, text: dict[str, Any], rope: nn.Module
) -> None:
    model = SimpleNamespace(args=SimpleNamespace(text_config=text))
    with pytest.raises(ModelError) as caught:
        mrope_of(model, model_type, rope)
    assert caught.value.reason == "VISION_UNSUPPORTED"
