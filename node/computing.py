"""The packages whose code computes stages: MLX, and the classes of models. What is kept from one start to the
next is of their versions."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

COMPUTING = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "mlx-vlm")


def versions() -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in COMPUTING:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
