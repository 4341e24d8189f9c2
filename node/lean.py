"""Imported first by the processes that a node starts, so that they take less memory and start sooner.

structlog imports rich, where it is installed, for tracebacks on terminals, and asyncio for loggers that are
awaited: 4 and 3 MiB in a process that has neither a terminal nor an event loop.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

_CHILDREN = ("sealring.node.engine.main", "sealring.node.carrier.main")


class LatePackage(ModuleType):
    """A package whose `__init__` runs when somebody first asks for one of its names or modules.

    Raises ImportError where it is not installed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ImportError(f"{name} is not installed", name=name)
        self.__spec__ = spec
        self.__file__ = spec.origin
        self.__package__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__path__ = list(self.__spec__.submodule_search_locations or [])
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def is_child(main: object) -> bool:
    """Whether a `__main__` module is that of an engine or a carrier."""
    return getattr(getattr(main, "__spec__", None), "name", None) in _CHILDREN


if is_child(sys.modules["__main__"]):
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    if "asyncio" not in sys.modules:
        sys.modules["asyncio"] = LatePackage("asyncio")
