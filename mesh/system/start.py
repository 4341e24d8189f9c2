"""What a process does before anything else: it forbids core files, and saves imports and garbage collection.

Nothing but the standard library is imported here, because every process begins with it.

structlog imports rich, if it is installed, for tracebacks on terminals. Our logs have none. rich takes 4 MiB
of each engine and carrier, and a fifth of a daemon's import time.

structlog also imports asyncio for coroutines, which engine and carrier do not have: a tenth of an engine's
imports.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import resource
import sys
from pathlib import Path
from typing import Any

_FILTER = Path("/proc/self/coredump_filter")


def forbid_core_files() -> None:
    """Keeps memory, and so prompts and keys, out of core files, and out of the dump that Linux pipes to a
    program instead.

    Children inherit both settings. Linux heeds the limit only where cores are files (core(5)). Raises
    OSError.

    A debugger of the same account or of root can still read all memory. Linux could refuse the account's own
    (PR_SET_DUMPABLE). This would also hide the process's open files, connections and memory use from its
    owner. macOS could refuse both while System Integrity Protection is on (PT_DENY_ATTACH), which Python
    reaches by ctypes alone.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _FILTER.write_text("0")


def defer_asyncio() -> None:
    """Defers the execution of `import asyncio` until a name of it is read (PEP 562).

    From Python 3.12 a log record reads one: the name of its task. Records have none then, as on 3.11.
    """
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
    if sys.version_info >= (3, 12):
        import logging

        logging.logAsyncioTasks = False


def collect_seldom() -> None:
    """Collects garbage after 50,000 new objects instead of 700, and not at exit.

    Imports make hardly any garbage, and looking for it is about a fifth of the processor time of a command
    like `sealring status`.
    """
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)


def hide_rich() -> None:
    """Makes `import rich` fail from now on, as if it were not installed, unless it was imported already."""
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # None has Python refuse the import


def show_rich() -> None:
    """Undoes `hide_rich`, before code that needs rich imports it. Has no effect if it is not hidden."""
    if sys.modules.get("rich", ...) is None:
        del sys.modules["rich"]
