"""Imports mlx-lm's model code without its text side.

`import mlx_lm` imports transformers (1.5 s on one core, 0.2 GiB) for tokenizers that an engine never
uses, and three engines may start at once on two cores. `install` puts a package of the same name and path
in `sys.modules` whose `__init__` has not run, so `mlx_lm.models.*` and `mlx_lm.utils.load_model` come from
the installed sources unchanged. Whoever asks that package for a name of its real `__init__` (`mlx_lm.load`,
`mlx_lm.generate`) gets the real one: the stand-ins are dropped and the real `__init__` runs.

Call `install` before the first import of mlx_lm. Where mlx_lm was imported already it does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from sealring.node.lean import LatePackage

_TEXT_SIDE = "mlx_lm.tokenizer_utils"
_AFTER_TEXT_SIDE = ("mlx_lm.utils",)
_HUB = "huggingface_hub"


class _LightPackage(LatePackage):
    """mlx_lm before its `__init__` has run, which its modules do without."""

    def __init__(self) -> None:
        super().__init__("mlx_lm")
        assert self.__spec__ is not None
        self.__path__ = list(self.__spec__.submodule_search_locations or [])

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for module in (_TEXT_SIDE, *_AFTER_TEXT_SIDE):
                sys.modules.pop(module, None)
                self.__dict__.pop(module.rpartition(".")[2], None)
        with _own_limits():
            return super().__getattr__(name)


def install() -> None:
    """Makes `import mlx_lm.models...` and `import mlx_lm.utils` light. Idempotent.

    Raises ImportError where mlx-lm is not installed.
    """
    if "mlx_lm" in sys.modules:
        return
    sys.modules["mlx_lm"] = _LightPackage()


def import_utils() -> ModuleType:
    """`mlx_lm.utils`, whose `load_model` and `_get_classes` the engine uses.

    Its imports of transformers (through tokenizer_utils) and huggingface_hub are answered with stand-ins
    while it is imported into a light package. Where it asks them for what they lack, as another release may,
    the whole package is imported.
    """
    install()
    package = sys.modules["mlx_lm"]
    if "mlx_lm.utils" in sys.modules or not isinstance(package, _LightPackage):
        with _own_limits():
            return importlib.import_module("mlx_lm.utils")
    with contextlib.suppress(ImportError):
        return _import_light()
    with _own_limits():
        package.load  # noqa: B018  # drops the stand-ins and runs the package's own `__init__`
        return importlib.import_module("mlx_lm.utils")


def _import_light() -> ModuleType:
    stand_ins = _stand_ins()
    real_hub = sys.modules.get(_HUB)
    sys.modules[_TEXT_SIDE] = stand_ins[_TEXT_SIDE]
    sys.modules[_HUB] = real_hub or stand_ins[_HUB]
    try:
        with _own_limits():
            return importlib.import_module("mlx_lm.utils")
    finally:
        if real_hub is None:
            del sys.modules[_HUB]


@contextlib.contextmanager
def _own_limits() -> Iterator[None]:
    """mlx_lm sets the limits on open files to 2048 and 4096 when it is imported. That lowers, for good, what
    this process was given, and fails where the hard limit is lower still."""
    real, resource.setrlimit = resource.setrlimit, lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = real


def _stand_ins() -> dict[str, ModuleType]:
    tokenizers, hub = ModuleType(_TEXT_SIDE), ModuleType(_HUB)
    tokenizers.TokenizerWrapper = object  # type: ignore[attr-defined]
    tokenizers.load = _no_text_side  # type: ignore[attr-defined]
    hub.snapshot_download = _no_text_side  # type: ignore[attr-defined]
    return {_TEXT_SIDE: tokenizers, _HUB: hub}


def _no_text_side(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("the engine loads neither tokenizers nor remote files through mlx_lm")
