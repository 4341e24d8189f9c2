"""A stage: the model's own code, run on the layers [lo, hi) only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mesh.errors import InvalidInput

from .anatomy import Anatomy, Layout, full_cache, outer_modules
from .caches import Cache, Slots
from .interception import Call, intercept_call, leaves, own_arrays
from .spec import TOKENS, StageSpec, TensorSpec


class _HandedOn(BaseException):
    """Ends a model's call at the first layer that belongs to the next stage. Carries that layer's arguments.

    A BaseException, so that no handler in a model's code takes it for an error.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.state = (args, kwargs)


class Stage:
    """The layers [lo, hi) of a model, run by the model's own `__call__`.

    Layers before `lo` are skipped, layer `lo` is given what the upstream stage handed on, and the call ends
    where layer `hi` would start. What the model computes before its layers (an embedding, its scale,
    positions) is not evaluated on a stage that is not the head, for nothing depends on it; parameters that the
    stage has no use for are replaced by NaN without storage, so that a mistake about that shows at once.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, lo: int, hi: int) -> None:
        count = len(anatomy.layers)
        if not 0 <= lo < hi <= count:
            raise InvalidInput(
                f"no stage can hold the layers [{lo}, {hi}) of {count}",
                hint="layer ranges are not empty and lie within the model",
                param="layers",
            )
        self._model = model
        self._anatomy = anatomy
        self._arrived: list[mx.array] = []
        self._slots = Slots(full_cache(model), anatomy.owners, lo, hi)
        self.spec = _spec(anatomy, lo, hi)
        self.kept = _drop_the_rest(model, anatomy, lo, hi)
        for index, layer in enumerate(anatomy.layers):
            if index < lo:
                intercept_call(layer, _skip(anatomy.adapter.state))
            elif index == lo and lo > 0:
                intercept_call(layer, self._take_over)
            if index == hi:
                intercept_call(layer, _hand_on)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the parameters that the stage keeps."""
        return sum(array.nbytes for array in self.kept)

    @property
    def model(self) -> nn.Module:
        """The mlx-lm model, absent layers included."""
        return self._model

    def make_cache(self) -> Cache:
        """Empty caches for one row. Merge, extend, filter and extract them with `staging.caches`."""
        return self._slots.select(full_cache(self._model))

    def __call__(self, inputs: list[mx.array], cache: Cache) -> list[mx.array]:
        """Runs the layers on arrays as `spec.receives` says and returns arrays as `spec.hands_on` says.

        All arrays are [rows, tokens, ...] and lazy; the cache is updated in place.
        """
        rows, tokens = inputs[0].shape[:2]
        outputs = self._run(inputs, self._slots.spread(cache), rows, tokens)
        self._slots.count(cache, rows, tokens)
        return outputs

    def _run(self, inputs: list[mx.array], caches: Cache, rows: int, tokens: int) -> list[mx.array]:
        sees_tokens = self.spec.is_head or self._anatomy.adapter.tokens
        token_ids = inputs[-1] if sees_tokens else mx.zeros((rows, tokens), mx.uint32)
        self._arrived = [] if self.spec.is_head else inputs
        try:
            return [self._model(token_ids, cache=caches)]
        except _HandedOn as handed:
            layouts = self._anatomy.boundaries[self.spec.hi]
            outputs = [
                layout.to_wire(_argument(*handed.state, where))
                for layout, where in zip(layouts, self._anatomy.adapter.state, strict=True)
            ]
            return [*outputs, token_ids] if self._anatomy.adapter.tokens else outputs
        finally:
            self._arrived = []

    def _take_over(self, original: Call, *args: Any, **kwargs: Any) -> Any:
        """Calls the stage's first layer with the state that arrived instead of the skipped layers'."""
        arguments = list(args)
        for layout, where, array in zip(
            self._anatomy.boundaries[self.spec.lo], self._anatomy.adapter.state, self._arrived, strict=False
        ):
            _replace(arguments, kwargs, where, layout.from_wire(array))
        return original(*arguments, **kwargs)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: int | str) -> Any:
    if isinstance(where, str):
        return kwargs[where]
    return args[where] if where < len(args) else next(iter(kwargs.values()))


def _replace(args: list[Any], kwargs: dict[str, Any], where: int | str, value: mx.array) -> None:
    if isinstance(where, str):
        kwargs[where] = value
    elif where < len(args):
        args[where] = value
    else:
        kwargs[next(iter(kwargs))] = value


def _hand_on(_: Call, *args: Any, **kwargs: Any) -> Any:
    raise _HandedOn(args, kwargs)


def _skip(state: tuple[int | str, ...]) -> Call:
    """A layer that passes its state through."""

    def call(_: Call, *args: Any, **kwargs: Any) -> Any:
        passed = tuple(_argument(args, kwargs, where) for where in state)
        return passed[0] if len(passed) == 1 else passed

    return call


def _spec(anatomy: Anatomy, lo: int, hi: int) -> StageSpec:
    count = len(anatomy.layers)

    def boundary(index: int) -> tuple[TensorSpec, ...]:
        specs = tuple(_tensor(layout) for layout in anatomy.boundaries[index])
        return (*specs, TOKENS) if anatomy.adapter.tokens else specs

    receives = boundary(lo) if lo else (TOKENS,)
    hands_on = boundary(hi) if hi < count else (_tensor(anatomy.logits),)
    return StageSpec(anatomy.model_type, count, lo, hi, receives, hands_on)


def _tensor(layout: Layout) -> TensorSpec:
    return TensorSpec(layout.name, layout.dtype, layout.tail)


def _drop_the_rest(model: nn.Module, anatomy: Anatomy, lo: int, hi: int) -> list[mx.array]:
    """Replaces every parameter that the stage does not need by NaN without storage; returns those kept."""
    kept: dict[int, mx.array] = {}
    for index, layer in enumerate(anatomy.layers):
        for module in layer.modules():
            for key, value in own_arrays(module):
                _keep_or_drop(module, key, value, lo <= index < hi, kept)
    for module in outer_modules(model, anatomy.layers):
        for key, value in own_arrays(module):
            times = anatomy.uses.get((id(module), key), frozenset())
            needed = any(lo < time <= hi or (time == 0 and lo == 0) for time in times)
            _keep_or_drop(module, key, value, needed, kept)
    return list(kept.values())


def _keep_or_drop(module: nn.Module, key: str, value: Any, needed: bool, kept: dict[int, mx.array]) -> None:
    if needed:
        kept.update((id(leaf), leaf) for leaf in leaves(value) if isinstance(leaf, mx.array))
    else:
        module[key] = _absent(value)


def _absent(value: Any) -> Any:
    """The same containers and shapes with nothing behind them."""
    if isinstance(value, dict):
        return {key: _absent(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_absent(item) for item in value)
    if not isinstance(value, mx.array):
        return value
    nothing = float("nan") if mx.issubdtype(value.dtype, mx.floating) else 0
    return mx.broadcast_to(mx.array(nothing, value.dtype), value.shape)
