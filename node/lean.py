"""Imported first by the processes that a node starts, so that they take less memory.

structlog imports rich, where it is installed, for tracebacks on terminals: 4 MiB in a process that has none.
"""

from __future__ import annotations

import sys

_CHILDREN = ("node.engine.main", "node.carrier.main")


def is_child(main: object) -> bool:
    """Whether a `__main__` module is that of an engine or a carrier."""
    return getattr(getattr(main, "__spec__", None), "name", None) in _CHILDREN


if is_child(sys.modules["__main__"]):
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
