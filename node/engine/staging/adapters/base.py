"""What an adapter may say about an architecture. The defaults fit most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from ..layout import Arguments, Place, get_argument


@dataclass(frozen=True)
class Followed:
    """What a skipped layer's cache gave when the keys and values that arrived for it were put in."""

    fetched: tuple[Any, Any]
    """All keys and values so far, as the cache's `update_and_fetch` returns them."""
    offset: Any
    """The cache's offset before."""


@dataclass(frozen=True)
class Adapter:
    """How a model differs from a chain of layers `state = layer(state, mask, cache)`."""

    state: tuple[Place, ...] = ((0,),)
    """The layer arguments that are handed from stage to stage; those that are None at a layer are not."""

    every_layer: tuple[Place, ...] = ()
    """Those of `state` that the head makes once and every layer is given."""

    per_layer: Place | None = None
    """A layer argument that the head makes from the tokens for each layer, handed on for all later layers."""

    batches: bool = False
    """Whether mlx-lm computes the same for a row in a batch as for a row alone, as `check` has shown."""

    def donors(self, model: nn.Module) -> dict[int, int]:
        """For each layer that reads keys and values from another layer's cache, that other layer."""
        return {}

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        """What a skipped layer returns for these arguments."""
        return get_argument(arguments, self.state[0])
