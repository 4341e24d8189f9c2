"""Names that a test forbids: each has to exist, or the test forbids nothing once what it names has moved."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def modules(*names: str) -> frozenset[str]:
    """The names of modules, all of which could be imported. Raises ModuleNotFoundError for any other."""
    for name in names:
        found = importlib.util.find_spec(name)
        # in the working folder each folder of ours is a package, whose name no module of ours has
        ours = found is not None and Path(found.origin or "/").parent.parent == _ROOT
        if found is None or (ours and name != "sealring"):
            raise ModuleNotFoundError(f"a test forbids {name}, which does not exist", name=name)
    return frozenset(names)
