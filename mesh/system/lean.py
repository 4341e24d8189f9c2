"""Savings in the start of processes: imports of structlog that they do not need, and garbage collection.

structlog imports rich, if it is installed, for tracebacks on terminals. Our logs have none. rich takes 4 MiB
of each engine and carrier, and a fifth of a daemon's import time.

structlog also imports asyncio for coroutines, which engine and carrier do not have: a tenth of an engine's
imports.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import sys
from typing import Any


def defer_asyncio() -> None:
    """Defers the execution of `import asyncio` until a name of it is read (PEP 562)."""
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
    """Collects garbage after 50,000 new objects instead of 700, and not at exit.

    Imports make hardly any garbage, and looking for it is about a fifth of the processor time of a command
    like `sealring status`.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


def hide_rich() -> None:
    """Makes `import rich` fail from now on, as if it were not installed, unless it was imported already."""
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]


def show_rich() -> None:
    """Undoes `hide_rich`, before code that needs rich imports it. Has no effect if it is not hidden."""
    if sys.modules.get("rich", ...) is None:
        del sys.modules["rich"]
