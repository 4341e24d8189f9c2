"""A head's embeddings with an image's rows in the place of those of some tokens.

Each function changes a model once: `splice(embedded)` gets the embeddings of a call's tokens, [rows, tokens,
width], as large as an image's rows are (some models multiply embeddings by a constant, and rows are not
multiplied), and returns what the layers start with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError

from .interception import Call, intercept_call

Splice = Callable[[mx.array], mx.array]

_EMBEDDINGS = ("embed_tokens", "embeddings", "word_embeddings", "wte", "tok_embeddings")


def embedding_of(model: nn.Module) -> nn.Module:
    """The module that embeds a model's tokens. Raises ModelError (VISION_UNSUPPORTED)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _EMBEDDINGS and hasattr(module, "as_linear"):
            found: nn.Module = module
            return found
    raise ModelError(
        "the model's embedding of tokens was not found",
        hint="send no images",
        reason="VISION_UNSUPPORTED",
    )


def behind_embedding(model: nn.Module, splice: Splice) -> None:
    """Most models: rows stand beside what the embedding returns."""
    intercept_call(embedding_of(model), lambda original, tokens: splice(original(tokens)))


def gemma3n(model: nn.Module, splice: Splice) -> None:
    """Embeddings are multiplied, rows are not. mlx-lm's model takes both together from outside."""
    text = model.model.language_model

    def call(original: Call, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> Any:
        scaled = text.embed_tokens(inputs) * (text.hidden_size**0.5)
        return original(inputs, cache=cache, input_embeddings=splice(scaled))

    intercept_call(text, call)


def gemma4(model: nn.Module, splice: Splice) -> None:
    """Embeddings are multiplied, rows are not: here the embedding multiplies, and the model by one."""
    text = getattr(model, "language_model", model).model
    scale, text.embed_scale = text.embed_scale, 1.0
    intercept_call(text.embed_tokens, lambda original, tokens: splice(original(tokens) * scale))


def before_layers(model: nn.Module, splice: Splice) -> None:
    """Embeddings are normalized by a function behind the embedding; rows are the first layer's input."""

    def call(original: Call, embedded: mx.array, *args: Any, **kwargs: Any) -> Any:
        return original(splice(embedded), *args, **kwargs)

    intercept_call(model.layers[0], call)


def embedded(model: nn.Module) -> tuple[int, mx.Dtype]:
    """The width and the type of a model's embeddings. Evaluates nothing. Raises as `embedding_of`."""
    made: mx.array = embedding_of(model)(mx.zeros((1, 1), mx.uint32))
    return made.shape[-1], made.dtype
