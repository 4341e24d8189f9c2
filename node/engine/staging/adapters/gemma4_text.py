"""Gemma 4: an input per layer made from the tokens; the last layers get earlier ones' keys and values."""

from typing import Any

import mlx.nn as nn

from ..layout import Arguments
from .base import Adapter, Followed


class Gemma4(Adapter):
    def donors(self, model: nn.Module) -> dict[int, int]:
        text = getattr(model, "language_model", model).model
        return {layer: donor for layer, donor in enumerate(text.previous_kvs) if layer != donor}

    def passed(self, arguments: Arguments, followed: Followed | None) -> Any:
        hidden = arguments[0][0]
        return (hidden, followed.fetched, followed.offset) if followed else (hidden, None, None)


ADAPTER = Gemma4(per_layer=("per_layer_input",), batches=True)
