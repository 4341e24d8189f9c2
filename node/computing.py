"""The packages whose code computes stages. What is kept from one start to the next is of their versions."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

COMPUTING = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "mlx-vlm")
"""MLX, and the classes of models. Not all are installed everywhere."""


def versions() -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in COMPUTING:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
