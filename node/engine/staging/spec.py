"""What a stage receives and what it hands on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the stage state: an array of shape [rows, tokens, *tail]."""

    name: str
    dtype: str
    """The dtype's name in mlx: `float32`, `bfloat16`, `uint32`, ..."""
    tail: tuple[int, ...]


@dataclass(frozen=True)
class StageSpec:
    """The layers [lo, hi) of a model of `layers` layers, and the tensors on either side.

    The head (lo == 0) receives `tokens`, uint32 [rows, tokens]. The tail (hi == layers) hands on `logits`,
    [rows, tokens, vocabulary].
    """

    model_type: str
    layers: int
    lo: int
    hi: int
    receives: tuple[TensorSpec, ...]
    hands_on: tuple[TensorSpec, ...]

    @property
    def is_head(self) -> bool:
        return self.lo == 0

    @property
    def is_tail(self) -> bool:
        return self.hi == self.layers


TOKENS = TensorSpec("tokens", "uint32", ())
