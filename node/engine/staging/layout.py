"""The stage state: its tensors, their places in a layer's arguments, and the order of their axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx


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
    [rows, tokens, vocabulary]. `taps` are what the layers before and behind either side return that a drafter
    at the tail reads, [rows, tokens, layers, width]: at most one tensor each, none where it reads no layer.
    """

    model_type: str
    layers: int
    lo: int
    hi: int
    receives: tuple[TensorSpec, ...]
    hands_on: tuple[TensorSpec, ...]
    taps: tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]] = ((), ())

    def receiving(self, taps: bool) -> tuple[TensorSpec, ...]:
        """What comes with a step, which brings hidden states with `taps`."""
        return (*self.receives, *self.taps[0]) if taps else self.receives

    def handing_on(self, taps: bool) -> tuple[TensorSpec, ...]:
        """Likewise what goes on."""
        return (*self.hands_on, *self.taps[1]) if taps else self.hands_on

    @property
    def is_head(self) -> bool:
        return self.lo == 0

    @property
    def is_tail(self) -> bool:
        return self.hi == self.layers

    @property
    def makes_logits(self) -> bool:
        """Whether a call returns logits; the tail samples from them."""
        return self.is_tail


TOKENS = TensorSpec("tokens", "uint32", ())

PROBES = ((2, 3), (5, 7))
"""Two batches, rows x tokens: an axis whose length goes from 2 to 5 between them is that of the rows."""

Place = tuple[int | str, ...]
"""A layer argument by its position or keyword, then a part of it: (3, 1) is `args[3][1]`, ("shared", "keys")
is `kwargs["shared"].get("keys")`, or `kwargs["shared"].keys` of what is no dict."""

Arguments = tuple[list[Any], dict[str, Any]]


def _key(arguments: Arguments, first: int | str) -> tuple[Any, Any]:
    """The container and the key of an argument; positions go on into the keywords, in order of the call."""
    args, kwargs = arguments
    if isinstance(first, str):
        return kwargs, first
    if first < len(args):
        return args, first
    names = list(kwargs)
    return kwargs, names[first - len(args)] if first - len(args) < len(names) else None


def get_argument(arguments: Arguments, place: Place) -> Any:
    """The argument at the place, None if it is missing."""
    container, key = _key(arguments, place[0])
    value = container[key] if isinstance(container, list) else container.get(key)
    for part in place[1:]:
        if value is None:
            break
        if isinstance(part, int):
            value = value[part]
        else:
            value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def set_argument(arguments: Arguments, place: Place, value: mx.array) -> None:
    """Puts an array at the place, at most one element deep: `(3, 1)` makes `args[3]` a tuple."""
    container, key = _key(arguments, place[0])
    if len(place) == 1:
        container[key] = value
        return
    index = int(place[1])
    elements = list((container[key] if isinstance(container, list) else container.get(key)) or ())
    elements.extend([None] * (index + 1 - len(elements)))
    elements[index] = value
    container[key] = tuple(elements)


@dataclass(frozen=True)
class Layout:
    """The axes of rows and tokens in a tensor of the stage state, its dtype and its other dimensions."""

    name: str
    dtype: str
    rows: int
    tokens: int
    tail: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor as it is handed on."""
        return TensorSpec(self.name, self.dtype, self.tail)

    def to_wire(self, array: mx.array) -> mx.array:
        """The array as [rows, tokens, *tail]."""
        return array.transpose(*self._order)

    def from_wire(self, array: mx.array) -> mx.array:
        """The array as the model has it."""
        order = self._order
        return array.transpose(*(order.index(axis) for axis in range(len(order))))

    @property
    def _order(self) -> list[int]:
        rest = [axis for axis in range(len(self.tail) + 2) if axis not in (self.rows, self.tokens)]
        return [self.rows, self.tokens, *rest]


class Unsuitable(Exception):  # noqa: N818  not an error of the user's
    """A tensor or a model is not of the form that the generic way needs."""


def find_layout(name: str, first: Any, second: Any, more: int = 0) -> Layout:
    """Finds the axes of rows and tokens by what changed between the two probes, which had `more` tokens than
    PROBES says. Raises Unsuitable."""
    if not isinstance(first, mx.array) or not isinstance(second, mx.array) or first.ndim != second.ndim:
        raise Unsuitable(f"its {name} is not one array")
    lengths = list(zip(first.shape, second.shape, strict=True))
    changed = [axis for axis, (one, two) in enumerate(lengths) if one != two]
    try:
        rows, tokens = (
            lengths.index((PROBES[0][i] + add, PROBES[1][i] + add)) for i, add in ((0, 0), (1, more))
        )
    except ValueError:
        raise Unsuitable(f"its {name} has no axis of rows and one of tokens") from None
    if sorted((rows, tokens)) != changed:
        raise Unsuitable(f"its {name} has a shape that depends on the batch in other ways")
    tail = tuple(one for axis, (one, _) in enumerate(lengths) if axis not in (rows, tokens))
    return Layout(name, str(first.dtype).removeprefix("mlx.core."), rows, tokens, tail)
