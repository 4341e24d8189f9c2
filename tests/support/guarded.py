"""Names that a test forbids: each has to exist, or the test forbids nothing once what it names has moved."""

from __future__ import annotations

import importlib.util


def modules(*names: str) -> frozenset[str]:
    """The names of modules, all of which could be imported. Raises ModuleNotFoundError for any other."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"a test forbids {name}, which does not exist", name=name)
    return frozenset(names)
