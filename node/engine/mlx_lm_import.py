"""Imports mlx-lm's model code without its text side.

`import mlx_lm` imports transformers for tokenizers that an engine never uses: a second of a processor and 36
MiB, and three engines may start at once on two cores. Its modules do without the package's own `__init__`, so
`install` registers the package without running that. `mlx_lm.utils` asks for two names that it needs for
tokenizers and downloads only; `import_utils` has stand-ins for them while it is imported.

Call `install` before the first import of mlx_lm. Where mlx_lm was imported already it does nothing.
`node/engine/vision/mlx_vlm_import.py` registers mlx-vlm in the same way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

_UTILS, _TEXT_SIDE, _HUB = "mlx_lm.utils", "mlx_lm.tokenizer_utils", "huggingface_hub"


def install() -> None:
    """Makes `import mlx_lm.models...` light. Idempotent. Raises ImportError where mlx-lm is not installed."""
    if register("mlx_lm"):
        vars(sys.modules["mlx_lm"])["__getattr__"] = _of_whole


def register(name: str) -> bool:
    """Makes the modules of a package importable without its `__init__`; whether that was still to be done.

    Raises ImportError where it is not installed.
    """
    if name in sys.modules:
        return False
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(f"{name} is not installed", name=name)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    return True


def _of_whole(name: str) -> Any:
    """A name of the whole package, for other code in this process: `from mlx_lm import load` (PEP 562)."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_whole(), name)


def import_utils() -> ModuleType:
    """`mlx_lm.utils`, whose `load_model`, `load_config` and `_get_classes` the engine uses.

    Where it asks the stand-ins for what they lack, as another release may, it gets the real modules.
    """
    install()
    if _UTILS not in sys.modules:
        with contextlib.suppress(ImportError), _stand_ins():
            return _import(_UTILS)
    return _import(_UTILS)


def import_whole() -> ModuleType:
    """The whole package, its `__init__` and text side included, for who needs that."""
    install()
    package: Any = sys.modules["mlx_lm"]
    if vars(package).pop("__getattr__", None) is _of_whole:
        sys.modules.pop(_UTILS, None)
        with _own_limits():
            package.__spec__.loader.exec_module(package)
    return sys.modules["mlx_lm"]


def _import(name: str) -> ModuleType:
    with _own_limits():
        return importlib.import_module(name)


@contextlib.contextmanager
def _own_limits() -> Iterator[None]:
    """mlx_lm sets the limits on open files to 2048 and 4096 when it is imported. That lowers, for good, what
    this process was given, and fails where the hard limit is lower still."""
    real, resource.setrlimit = resource.setrlimit, lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = real


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Within the block, in the place of modules that are not imported yet."""
    tokenizers, hub = ModuleType(_TEXT_SIDE), ModuleType(_HUB)
    tokenizers.TokenizerWrapper = object  # type: ignore[attr-defined]
    tokenizers.load = hub.snapshot_download = _no_text_side  # type: ignore[attr-defined]
    stand_ins = {
        name: one for name, one in ((_TEXT_SIDE, tokenizers), (_HUB, hub)) if name not in sys.modules
    }
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _no_text_side(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("the engine loads neither tokenizers nor remote files through mlx_lm")
