"""Public names of a package that are imported when they are asked for (PEP 562).

A package that imported them itself would cost each process that needs one module all the others: gRPC for
`sealring --help`, keys for an engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def face(package: str, **made_in: str) -> tuple[list[str], Callable[[str], Any]]:
    """A package's `__all__` and `__getattr__`. `made_in` gives each module's public names, spaces between.

    Type checkers see Any. Product code, which they check, imports from the modules.
    """
    modules = {name: module for module, names in made_in.items() for name in names.split()}

    def of_module(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return list(modules), of_module
