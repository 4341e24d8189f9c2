"""Standing between a model and its modules while its own code runs.

A module is intercepted by giving the instance a subclass of its class, so that attributes, `isinstance`,
parameter paths and everything else about it stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Call = Callable[..., Any]


def intercept_call(module: nn.Module, call: Call) -> Callable[[], None]:
    """Makes `module(...)` run `call(original, ...)`, where `original` is the module's own bound call.

    Returns a function that takes the interception away.
    """
    own = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return call(own.__call__.__get__(self), *args, **kwargs)

    module.__class__ = type(own.__name__, (own,), {"__call__": __call__, "__module__": own.__module__})

    def restore() -> None:
        module.__class__ = own

    return restore


def intercept_reads(module: nn.Module, read: Callable[[str], None]) -> Callable[[], None]:
    """Calls `read(key)` whenever one of the module's own arrays, or a container of arrays, is looked up."""
    own = type(module)
    values: dict[str, Any] = dict.copy(module)
    keys = {key for key, value in values.items() if not isinstance(value, nn.Module)}

    def note(key: str) -> None:
        if key in keys:
            read(key)

    class Watched(own):  # type: ignore[misc, valid-type]
        def __getattr__(self, key: str) -> Any:
            note(key)
            return super().__getattr__(key)

        def __getitem__(self, key: str) -> Any:
            note(key)
            return super().__getitem__(key)

        def get(self, key: str, default: Any = None) -> Any:
            note(key)
            return super().get(key, default)

    Watched.__name__, Watched.__module__ = own.__name__, own.__module__
    module.__class__ = Watched

    def restore() -> None:
        module.__class__ = own

    return restore


def own_arrays(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's own parameters: keys whose values are arrays, or containers of arrays without modules."""
    for key, value in list(dict.items(module)):
        if not key.startswith("_") and any(isinstance(leaf, mx.array) for leaf in leaves(value)):
            yield key, value


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and plain dicts; a module is a leaf."""
    if isinstance(value, dict) and not isinstance(value, nn.Module):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value
