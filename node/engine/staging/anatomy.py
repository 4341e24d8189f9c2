"""Learns how a model uses its layers, its caches and its other parameters, by watching it run.

The model's own code is run on lazy arrays that are never evaluated, so it costs neither memory nor compute
and works on weights that are not loaded. What is learnt replaces knowledge of names: the order of the layers
is the only thing that a model has to tell.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.mesh.errors import ModelError
from sealring.node.engine.caches import parts_of

from .adapters import Adapter, adapter_for
from .bounds import reach_of
from .interception import Call, intercept_call, intercept_reads, leaves, own_arrays
from .layout import PROBES, Arguments, Layout, Place, TensorSpec, Unsuitable, find_layout, get_argument

_LONGEST = 1 << 13
"""Tokens of a run that nothing is evaluated of; its graph may have nodes for each token."""


@dataclass(frozen=True)
class Boundary:
    """The state that crosses to a stage that starts at one layer, in this order."""

    state: tuple[tuple[Place, Layout], ...]
    donors: tuple[tuple[int, Layout, Layout], ...]
    """Upstream layers whose new keys and values later layers read, and the layouts of those two."""
    per_layer: Layout | None
    """An argument of each of the layers from here on, stacked in front of its tail."""

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        layouts = [layout for _, layout in self.state]
        layouts += [layout for _, keys, values in self.donors for layout in (keys, values)]
        return tuple(layout.spec for layout in (*layouts, *filter(None, (self.per_layer,))))


@dataclass(frozen=True)
class Anatomy:
    """The facts of a model that a stage needs."""

    model_type: str
    layers: list[nn.Module]
    adapter: Adapter
    donors: dict[int, int]
    """The donor of each layer that reads another layer's cache."""
    owners: tuple[tuple[int, ...], ...]
    """For each of the model's caches, the layers that use it; none for one that is used before the layers."""
    idle: frozenset[int]
    """Caches that the model makes and no layer fills."""
    boundaries: tuple[Boundary, ...]
    """The state of a stage that starts at each layer (not meaningful for layer 0)."""
    logits: Layout
    uses: dict[tuple[int, str], frozenset[float]] = field(repr=False)
    """The times at which each parameter outside the layers is read, by module id and key: i between the
    layers i - 1 and i, i + 0.5 within layer i."""
    head_layers: int = 0
    """The first layers, which the head has to hold all of, because they read tokens."""
    indivisible: str = ""
    """The reason why the model cannot be cut; empty if it can."""

    def cache_of(self, layer: int) -> int:
        """The index of a layer's cache."""
        return next(index for index, owners in enumerate(self.owners) if layer in owners)


def dissect(model: nn.Module, model_type: str) -> Anatomy:
    """Learns a model's anatomy. Nothing is evaluated.

    Where the model is no chain of layers the anatomy says so (`indivisible`), and one stage can hold it all.
    Raises ModelError (reason ARCHITECTURE_NOT_STAGEABLE) where there are no layers or logits to be found.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, (list, tuple)) or not all(isinstance(layer, nn.Module) for layer in layers):
        raise not_stageable(model_type, "it has no list of layers")
    adapter = adapter_for(type(layers[0]).__module__)
    if lacking := adapter.lacking(model):
        adapter = Adapter(batches=False)
    layers = list(layers)
    donors = adapter.donors(model)
    outer = outer_modules(model, layers)
    try:
        first, second = (
            _Probe(model, layers, outer, adapter, donors, rows, tokens) for rows, tokens in PROBES
        )
    except Exception as error:  # a model's own code may need a device, or more than tokens
        raise not_runnable(model_type, error) from error
    try:
        logits = find_layout("logits", first.result, second.result)
    except Unsuitable as reason:
        raise not_stageable(model_type, str(reason)) from None
    if first.embedded is not None and first.embedded < logits.tail[0]:  # MLX looks behind the last, unasked
        raise ModelError(
            f"the model answers with {logits.tail[0]} tokens and has embeddings of {first.embedded}",
            reason="BAD_MODEL_CONFIG",
            hint="its config.json is wrong: convert the model again",
            model_type=model_type,
        )
    try:
        if lacking:
            raise Unsuitable(f"this mlx-lm has no {lacking[0]} in {type(layers[0]).__module__}")
        boundaries = _boundaries(adapter, donors, first, second, layers)
        if type(adapter) is Adapter and (more := min(reach_of(model), _LONGEST)):
            one, two = (
                _Probe(model, layers, outer, adapter, donors, rows, tokens + more) for rows, tokens in PROBES
            )
            _check_chain(adapter, layers, one, two, more)
    except Unsuitable as reason:
        owners: tuple[tuple[int, ...], ...] = tuple((0,) for _ in first.owners())
        return Anatomy(
            model_type,
            layers,
            adapter,
            {},
            owners,
            first.idle,
            (),
            logits,
            first.uses,
            indivisible=str(reason),
        )
    owners = tuple(
        tuple(sorted({*users, *(reader for reader, donor in donors.items() if donor in users)}))
        for users in first.owners()
    )
    reading = [index + 1 for index, layer in enumerate(layers) if adapter.reads_tokens(layer)]
    return Anatomy(
        model_type,
        layers,
        adapter,
        donors,
        owners,
        first.idle,
        boundaries,
        logits,
        first.uses,
        head_layers=max(reading, default=0),
    )


def not_runnable(model_type: str, error: Exception) -> ModelError:
    """The error for what mlx cannot compute on this machine, in mlx's words: it has seen no prompt."""
    return ModelError(
        f"mlx-lm's code for {model_type} does not run here ({type(error).__name__}: {error})"[:300],
        reason="MODEL_NOT_RUNNABLE",
        hint="see whether mlx_lm.generate runs this model on this machine",
    )


def not_stageable(model_type: str, why: str) -> ModelError:
    """The error for an architecture that does not split."""
    return ModelError(
        f"architecture {model_type} cannot be split into stages: {why}",
        reason="ARCHITECTURE_NOT_STAGEABLE",
        hint="serve it on a ring of one node, or choose another model",
        model_type=model_type,
    )


def full_cache(model: nn.Module) -> list[Any]:
    """The model's own caches for one sequence, one entry per cache that its `__call__` expects."""
    from mlx_lm.models.cache import make_prompt_cache

    return list(make_prompt_cache(model))


def outer_modules(model: nn.Module, layers: list[Any]) -> list[nn.Module]:
    """The modules that belong to none of the layers."""
    inner = {id(module) for layer in layers for module in layer.modules()}
    outer = {id(module): module for module in model.modules() if id(module) not in inner}
    return list(outer.values())


class _Probe:
    """One lazy run of the whole model, watched."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[Any],
        outer: Sequence[nn.Module],
        adapter: Adapter,
        donors: dict[int, int],
        rows: int,
        tokens: int,
    ) -> None:
        self.order: list[int] = []
        self.no_chain = ""
        """Why the layers are no chain in which each hands one array to the next, if they are not."""
        self.arguments: dict[int, Arguments] = {}
        self.handed_on: dict[int, list[Any]] = {}
        self.keys_values: dict[int, tuple[mx.array, mx.array]] = {}
        self._reads: dict[tuple[int, str], set[float]] = {}
        self._model = model
        self._adapter = adapter
        self._cache = full_cache(model)
        self._now = 0.0
        self._donors = set(donors.values())
        self._tokens = mx.zeros((rows, tokens), mx.uint32)
        self.embedded: int | None = None
        """How many tokens the model has embeddings of; None if it is not seen to look them up."""
        restores: list[Callable[[], None]] = []
        try:
            for module in outer:
                restores.append(intercept_reads(module, self._reader(id(module))))
                restores.append(intercept_call(module, self._embedder(module)))
            for index, layer in enumerate(layers):
                restores.append(intercept_call(layer, self._watcher(index)))
            self.result = model(self._tokens, cache=self._cache)
        finally:
            for restore in reversed(restores):
                restore()

    @property
    def uses(self) -> dict[tuple[int, str], frozenset[float]]:
        return {key: frozenset(times) for key, times in self._reads.items()}

    def _reader(self, module: int) -> Callable[[str], None]:
        return lambda key: self._reads.setdefault((module, key), set()).add(self._now)

    def _embedder(self, module: nn.Module) -> Call:
        tables = {} if module.children() else dict(own_arrays(module))

        def call(original: Call, *args: Any, **kwargs: Any) -> Any:
            if tables and args and args[0] is self._tokens:
                rows = [tables["weight"]] if "weight" in tables else leaves(tables)
                self.embedded = max(sum(map(len, rows)), self.embedded or 0)
            return original(*args, **kwargs)

        return call

    def _watcher(self, index: int) -> Call:
        def call(original: Call, *args: Any, **kwargs: Any) -> Any:
            self.order.append(index)
            arguments = self.arguments[index] = (list(args), kwargs)
            self.handed_on[index] = self._adapter.handed_on(self._model, index, arguments)
            self._now = index + 0.5
            given = self._changeable(original, args, kwargs)
            with recorded_updates(self._cache_of(args, kwargs), index in self._donors) as updates:
                result = original(*args, **kwargs)
            if updates:
                self.keys_values[index] = updates[0]
            self._now = index + 1.0
            changed = [name for name, (value, held) in given.items() if _ids(value) != held]
            if changed and not self.no_chain:
                self.no_chain = (
                    f"layer {index} changes its argument {changed[0]}, which later layers may read"
                )
            if not isinstance(result, mx.array) and not self.no_chain:
                self.no_chain = f"layer {index} returns {_described(result)}, not one array"
            return result

        return call

    def _changeable(
        self, layer: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, tuple[Any, set[int]]]:
        """The arguments besides arrays and caches that a layer can change, and what they hold now."""
        caches = {id(part) for cache in self._cache for part in (cache, *parts_of(cache))}
        return {
            name: (value, _ids(value))
            for name, value in _named(layer, args, kwargs)
            if (isinstance(value, (list, dict)) or hasattr(value, "__dict__"))
            and not isinstance(value, nn.Module)
            and id(value) not in caches
        }

    def _cache_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passed = {id(value) for value in leaves([args, kwargs])}
        return next((cache for cache in self._cache if id(cache) in passed), None)

    @property
    def idle(self) -> frozenset[int]:
        return frozenset(index for index, cache in enumerate(self._cache) if not _is_filled(cache))

    def owners(self) -> list[tuple[int, ...]]:
        """The layers to which each cache, or a part of it, was passed."""
        given = {
            layer: {id(value) for value in leaves([args, kwargs])}
            for layer, (args, kwargs) in self.arguments.items()
        }
        owners = []
        for cache in self._cache:
            ids = {id(cache), *map(id, parts_of(cache))}
            owners.append(tuple(layer for layer, passed in given.items() if ids & passed))
        return owners


def _named(call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """A layer's arguments by their names."""
    names = [name for name in inspect.signature(call).parameters if name not in kwargs]
    return [*zip(names, args, strict=False), *kwargs.items()]


def _ids(value: Any) -> set[int]:
    """The contents of a container or an object."""
    return {id(leaf) for leaf in leaves(vars(value) if hasattr(value, "__dict__") else value)}


def _described(result: Any) -> str:
    if isinstance(result, (list, tuple)):
        return f"{len(result)} values ({', '.join(type(one).__name__ for one in result)})"
    return f"a {type(result).__name__}"


def _boundaries(
    adapter: Adapter, donors: dict[int, int], first: _Probe, second: _Probe, layers: list[Any]
) -> tuple[Boundary, ...]:
    """The state that crosses in front of each layer. Raises Unsuitable."""
    count = len(layers)
    for place, layer in enumerate(first.order):
        if place >= count or layer != place:
            again = "again " if layer in first.order[:place] else ""
            raise Unsuitable(f"layer {layer} is called {again}after layer {first.order[place - 1]}")
    if len(first.order) != count:
        raise Unsuitable(f"layer {len(first.order)} is never called")
    if type(adapter) is Adapter:
        _check_chain(adapter, layers, first, second)
    return tuple(_boundary(adapter, donors, first, second, index) for index in range(count))


def _check_chain(adapter: Adapter, layers: list[Any], first: _Probe, second: _Probe, more: int = 0) -> None:
    """Refuses layers that are no chain for prompts of `more` tokens than PROBES says."""
    if first.no_chain:
        raise Unsuitable(first.no_chain)
    if adapter.state == Adapter.state:
        for index, layer in enumerate(layers):
            _check_one_state(index, layer, first.arguments[index], second.arguments[index], more)


def _check_one_state(index: int, layer: nn.Module, first: Arguments, second: Arguments, more: int) -> None:
    """Refuses layers that are given anything per token besides their state, such as token ids."""
    found = []
    for (name, one), (_, two) in zip(
        _named(layer.__call__, *first), _named(layer.__call__, *second), strict=True
    ):
        for left, right in zip(leaves(one), leaves(two), strict=True):
            if isinstance(left, mx.array) and left.dtype != mx.bool_:
                with contextlib.suppress(Unsuitable):
                    find_layout(name, left, right, more)
                    found.append(name)
    if len(found) != 1:
        given = f"{' and '.join(found)} per token" if found else "nothing per token"
        raise Unsuitable(f"layer {index} is given {given}, where sealring knows one array to hand on")


def _boundary(
    adapter: Adapter, donors: dict[int, int], first: _Probe, second: _Probe, index: int
) -> Boundary:
    names = ["hidden", *(f"state_{number}" for number in range(1, len(adapter.state)))]
    handed_on = zip(names, adapter.state, first.handed_on[index], second.handed_on[index], strict=True)
    state = [
        (place, None if one is None else find_layout(name, one, two)) for name, place, one, two in handed_on
    ]
    shared = []
    for donor in sorted({donor for reader, donor in donors.items() if donor < index <= reader}):
        one, two = first.keys_values[donor], second.keys_values[donor]
        keys, values = (
            find_layout(f"{name}_{donor}", one[part], two[part])
            for part, name in enumerate(("keys", "values"))
        )
        shared.append((donor, keys, values))
    each = None
    if adapter.per_layer is not None:
        one, two = (get_argument(probe.arguments[index], adapter.per_layer) for probe in (first, second))
        each = None if one is None else find_layout("per_layer", one, two)
    if each is not None:
        each = Layout(each.name, each.dtype, 0, 1, (len(first.order) - index, *each.tail))
    present = tuple((place, found) for place, found in state if found is not None)
    return Boundary(present, tuple(shared), each)


class recorded_updates:  # noqa: N801  a context manager, used like a function
    """Records the keys and values that are put into a cache meanwhile."""

    def __init__(self, cache: Any, wanted: bool = True) -> None:
        self._cache = cache if wanted else None
        self._updates: list[tuple[mx.array, mx.array]] = []

    def __enter__(self) -> list[tuple[mx.array, mx.array]]:
        if self._cache is not None:
            own = self._cache.update_and_fetch

            def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
                self._updates.append((keys, values))
                return own(keys, values)

            self._cache.update_and_fetch = update_and_fetch
        return self._updates

    def __exit__(self, *_: object) -> None:
        if self._cache is not None:
            del self._cache.update_and_fetch


def _is_filled(cache: Any) -> bool:
    """Whether anything was ever put into a cache of one row."""
    held = (leaves(list(vars(part).values())) for part in parts_of(cache))
    return any(isinstance(leaf, mx.array) for found in held for leaf in found)
