"""The places and sizes of a prompt's images, for stages that compute images otherwise than text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sealring.mesh.ring.limits import MAX_CONTEXT
from sealring.mesh.ring.unbroken import MAX_UNBROKEN

CHUNKED = frozenset(["glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl"])
INTERLEAVED = frozenset(
    ["prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe"]
)
"""Model types whose positions have three dimensions, by how frequencies are divided among these: one
dimension's behind another's, or by turns."""

_DEFAULTS = {"gemma4_unified": "vision"}
"""The direction of attention where a configuration leaves it out, by model type."""


def has_three(model_type: str) -> bool:
    """Whether the positions of models of this type have three dimensions."""
    return model_type in CHUNKED | INTERLEAVED


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether, by its configuration, the tokens of an image attend to each other in both directions."""
    text = config.get("text_config")
    name, default = "use_bidirectional_attention", _DEFAULTS.get(str(config.get("model_type")))
    return isinstance(text, Mapping) and text.get(name, default) == "vision"


def needs_grids(config: Mapping[str, Any]) -> bool:
    """Whether all stages of a model need the grids of a prompt's images."""
    return has_three(str(config.get("model_type"))) or attends_both_ways(config)


class Grid(NamedTuple):
    """An image of a prompt: the index of its first token, and its size in tokens."""

    begin: int
    frames: int
    height: int
    width: int

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.begin + self.tokens


def possible(grids: Sequence[Grid]) -> bool:
    """Whether these can be the images of one prompt."""
    return (
        len(grids) <= MAX_UNBROKEN
        and all(min(grid[1:]) > 0 and max(grid) <= MAX_CONTEXT and grid.end <= MAX_CONTEXT for grid in grids)
        and all(one.end <= two.begin for one, two in pairwise(grids))
    )
