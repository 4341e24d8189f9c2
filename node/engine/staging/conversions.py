"""What mlx-lm's classes leave out of published configurations, and when they convert published weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx

_TEXT = "language_model."


def kimi_vl(model: Any) -> Any:
    """mlx-lm's class, with DeepSeek-V3's conversion for its text model: that splits a projection in two, and
    the class's own does not, though its layers are DeepSeek-V3's."""

    class Whole(model):  # type: ignore[misc]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            from mlx_lm.models import deepseek_v3

            given = super().sanitize(weights)
            text = {name.removeprefix(_TEXT): value for name, value in given.items()}
            made = deepseek_v3.Model.sanitize(SimpleNamespace(args=self.args.text_config), text)
            return {_TEXT + name: value for name, value in made.items()}

    return Whole


CONVERSIONS = {"kimi_vl": kimi_vl}
"""By model type: a class for mlx-lm's."""

_TIED = "tie_word_embeddings"
TIED_OUTSIDE = ("qwen3_vl", "qwen3_vl_moe")
"""Types whose text part has to say whether head and embedding are one matrix. Qwen3-VL as published says it
beside that part, from 8B on there alone."""


def tied_outside(arguments: Any) -> Any:
    """mlx-lm's class of arguments, which finds that in either place."""

    class Arguments(arguments):  # type: ignore[misc]
        @classmethod
        def from_dict(cls, params: dict[str, Any]) -> Any:
            if isinstance(text := params.get("text_config"), dict):
                params = {**params, "text_config": {_TIED: params.get(_TIED, False), **text}}
            return super().from_dict(params)

    return Arguments
