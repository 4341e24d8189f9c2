"""Keeps processes from what nobody here needs: what structlog imports, and much collecting of garbage.

structlog imports rich, where it is installed, for tracebacks on terminals. Our logs have none, and it takes
4 MiB of an engine and as much of a carrier, and a fifth of the time in which a daemon imports what it needs.
It also imports asyncio, for coroutines, of which engine and carrier have none: a tenth of what an engine
imports.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import sys
from typing import Any


def defer_asyncio() -> None:
    """From now on `import asyncio` runs none of it until somebody asks for a name in it (PEP 562)."""
    spec = importlib.util.find_spec("asyncio")
    if "asyncio" in sys.modules or spec is None:
        return
    package: Any = importlib.util.module_from_spec(spec)

    def whole(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if vars(package).pop("__getattr__", None) is not None:
            package.__spec__.loader.exec_module(package)
        return getattr(package, name)

    package.__getattr__ = whole
    sys.modules["asyncio"] = package


def collect_seldom() -> None:
    """Has a process look for garbage after 50,000 new objects, not 700, and not as it ends.

    Of what imports make hardly anything is garbage: to look for it is about a fifth of the processor time of
    a command like `sealring status`.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


def hide_rich() -> None:
    """From now on whoever imports rich is told that it is not installed, unless somebody has it already."""
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]


def show_rich() -> None:
    """Before rich is imported by who needs it. Does nothing where it is not hidden."""
    if sys.modules.get("rich", ...) is None:
        del sys.modules["rich"]
