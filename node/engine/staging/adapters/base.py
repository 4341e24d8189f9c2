"""What an adapter may say about an architecture. The defaults fit most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn


@dataclass(frozen=True)
class Adapter:
    """How a model differs from a chain of layers `state = layer(state, mask, cache)`."""

    state: tuple[int | str, ...] = (0,)
    """The layer arguments that are handed from stage to stage: positions or keywords."""

    tokens: bool = False
    """Whether every stage needs the token ids, not only the head."""

    everywhere: tuple[str, ...] = ()
    """Names of parameters outside the layers which every stage keeps (suffixes of their paths)."""

    refused: str = ""
    """Why the architecture cannot be split, if it cannot."""

    def layers(self, model: nn.Module) -> list[Any]:
        """The model's layers in the order in which they run."""
        return list(model.layers)
