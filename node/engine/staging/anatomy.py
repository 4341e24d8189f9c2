"""Learns how a model uses its layers, its caches and its other parameters, by watching it run.

The model's own code is run on lazy arrays which nobody evaluates, so it costs neither memory nor compute and
works on weights that are not loaded. What is learnt replaces knowledge of names: which list holds the layers
is the only thing that a model has to tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mesh.errors import ModelError

from .adapters import Adapter, adapter_for
from .interception import Call, intercept_call, intercept_reads, leaves, own_arrays

_PROBES = ((2, 3), (5, 7))
"""Two batches, rows x tokens: an axis whose length changes with the first number is that of the rows."""


@dataclass(frozen=True)
class Layout:
    """Where rows and tokens stand in a tensor of the stage state, and its dtype and other dimensions."""

    name: str
    dtype: str
    rows: int
    tokens: int
    tail: tuple[int, ...]

    def to_wire(self, array: mx.array) -> mx.array:
        """The array as [rows, tokens, *tail]."""
        return mx.moveaxis(mx.moveaxis(array, self.rows, 0), self._tokens_behind_rows, 1)

    def from_wire(self, array: mx.array) -> mx.array:
        """The array as the model has it."""
        return mx.moveaxis(mx.moveaxis(array, 1, self._tokens_behind_rows), 0, self.rows)

    @property
    def _tokens_behind_rows(self) -> int:
        """The tokens' axis after the rows' axis was moved to the front."""
        return self.tokens + 1 if self.tokens < self.rows else self.tokens


@dataclass(frozen=True)
class Anatomy:
    """What a stage has to know of a model."""

    model_type: str
    layers: list[nn.Module]
    adapter: Adapter
    owners: tuple[tuple[int, ...], ...]
    """For each of the model's caches, the layers that are given it."""
    boundaries: tuple[tuple[Layout, ...], ...]
    """For each layer, the layout of the state that it is given."""
    logits: Layout
    uses: dict[tuple[int, str], frozenset[float]] = field(repr=False)
    """For each parameter outside the layers, by module id and key, when it is read: i between the layers
    i - 1 and i, i + 0.5 within layer i."""


def dissect(model: nn.Module, model_type: str) -> Anatomy:
    """Learns a model's anatomy. Nothing is evaluated.

    Raises ModelError (reason ARCHITECTURE_NOT_STAGEABLE) where the model is not a chain of layers that can be cut.
    """
    layers = _layers_of(model, model_type)
    adapter = adapter_for(type(layers[0]).__module__)
    layers = adapter.layers(model)
    if adapter.refused:
        raise not_stageable(model_type, adapter.refused)
    probes = [_Probe(model, layers, rows, tokens) for rows, tokens in _PROBES]
    for probe in probes:
        if probe.order != list(range(len(layers))):
            raise not_stageable(model_type, "its layers are not called once each, in order")
    first, second = probes
    boundaries = []
    for index in range(len(layers)):
        named = [
            (f"state{number}" if number else "hidden", where) for number, where in enumerate(adapter.state)
        ]
        boundaries.append(
            tuple(
                _layout(model_type, name, first.argument(index, where), second.argument(index, where))
                for name, where in named
            )
        )
    logits = _layout(model_type, "logits", first.result, second.result)
    return Anatomy(model_type, layers, adapter, first.owners(), tuple(boundaries), logits, first.uses)


def not_stageable(model_type: str, why: str) -> ModelError:
    """The error for an architecture that does not split."""
    return ModelError(
        f"architecture {model_type} cannot be split into stages: {why}",
        reason="ARCHITECTURE_NOT_STAGEABLE",
        hint="serve it on a ring of one node, or choose another model",
        model_type=model_type,
    )


def _layers_of(model: nn.Module, model_type: str) -> list[Any]:
    layers = getattr(model, "layers", None)
    if (
        not isinstance(layers, (list, tuple))
        or not layers
        or not all(isinstance(i, nn.Module) for i in layers)
    ):
        raise not_stageable(model_type, "it has no list of layers")
    return list(layers)


def full_cache(model: nn.Module) -> list[Any]:
    """The model's own caches for one sequence, one entry per cache that its `__call__` expects."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def outer_modules(model: nn.Module, layers: list[Any]) -> list[nn.Module]:
    """The modules that belong to none of the layers."""
    inner = {id(module) for layer in layers for module in layer.modules()}
    seen: dict[int, nn.Module] = {}
    for module in model.modules():
        if id(module) not in inner:
            seen.setdefault(id(module), module)
    return list(seen.values())


class _Probe:
    """One lazy run of the whole model, watched."""

    def __init__(self, model: nn.Module, layers: list[Any], rows: int, tokens: int) -> None:
        self.order: list[int] = []
        self.calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        reads: dict[tuple[int, str], set[float]] = {}
        self._cache = full_cache(model)
        self._now = 0.0
        restores: list[Callable[[], None]] = []
        try:
            for module in outer_modules(model, layers):
                restores.append(intercept_reads(module, self._reader(id(module), reads)))
            for index, layer in enumerate(layers):
                restores.append(intercept_call(layer, self._watcher(index)))
            self.result = model(mx.zeros((rows, tokens), mx.uint32), cache=self._cache)
        finally:
            for restore in reversed(restores):
                restore()
        self.uses = {key: frozenset(times) for key, times in reads.items()}

    def _reader(self, module: int, reads: dict[tuple[int, str], set[float]]) -> Callable[[str], None]:
        return lambda key: reads.setdefault((module, key), set()).add(self._now)

    def _watcher(self, index: int) -> Call:
        def call(original: Call, *args: Any, **kwargs: Any) -> Any:
            self.order.append(index)
            self.calls[index] = (args, kwargs)
            self._now = index + 0.5
            result = original(*args, **kwargs)
            self._now = index + 1.0
            return result

        return call

    def argument(self, layer: int, where: int | str) -> Any:
        args, kwargs = self.calls[layer]
        if isinstance(where, str):
            return kwargs.get(where)
        return args[where] if where < len(args) else next(iter(kwargs.values()), None)

    def owners(self) -> tuple[tuple[int, ...], ...]:
        """For each cache, the layers to which it, or a part of it, was passed."""
        given = {
            layer: {id(value) for value in leaves([args, kwargs])}
            for layer, (args, kwargs) in self.calls.items()
        }
        owners = []
        for cache in self._cache:
            ids = {id(cache), *(id(part) for part in getattr(cache, "caches", ()))}
            owners.append(tuple(sorted(layer for layer, passed in given.items() if ids & passed)))
        return tuple(owners)


def _layout(model_type: str, name: str, first: Any, second: Any) -> Layout:
    """Finds the axes of rows and tokens by what changed between the two probes."""
    if not isinstance(first, mx.array) or not isinstance(second, mx.array) or first.ndim != second.ndim:
        raise not_stageable(model_type, f"its {name} is not one array")
    lengths = list(zip(first.shape, second.shape, strict=True))
    changed = [axis for axis, (one, two) in enumerate(lengths) if one != two]
    try:
        rows, tokens = (lengths.index((_PROBES[0][i], _PROBES[1][i])) for i in (0, 1))
    except ValueError:
        raise not_stageable(model_type, f"its {name} has no axis of rows and tokens") from None
    if sorted((rows, tokens)) != changed:
        raise not_stageable(model_type, f"its {name} has a shape that depends on the batch in other ways")
    tail = tuple(one for axis, (one, _) in enumerate(lengths) if axis not in (rows, tokens))
    return Layout(name, str(first.dtype).removeprefix("mlx.core."), rows, tokens, tail)


__all__ = ["Anatomy", "Layout", "dissect", "full_cache", "not_stageable", "outer_modules", "own_arrays"]
