"""The places and sizes of a prompt's images, for stages that compute images otherwise than text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from sealring.mesh.ring.limits import MAX_CONTEXT
from sealring.mesh.ring.unbroken import MAX_UNBROKEN

from .pictured import pictured


def has_three(model_type: str) -> bool:
    """Whether the positions of models of this type have three dimensions."""
    return bool(pictured(model_type).rope)


def attends_both_ways(config: Mapping[str, Any]) -> bool:
    """Whether, by its configuration, the tokens of an image attend to each other in both directions."""
    text = config.get("text_config")
    name, default = "use_bidirectional_attention", pictured(config.get("model_type")).both_ways
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
