"""The packages whose code computes stages: MLX, and the classes of models. What is kept from one start to the
next is of their versions."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

CUDA = ("mlx-cuda-12", "mlx-cuda-13")
"""MLX's builds for NVIDIA's GPUs: one of them stands in place of mlx-cpu."""

COMPUTING = ("mlx", "mlx-metal", "mlx-cpu", *CUDA, "mlx-lm", "mlx-vlm")


def versions() -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in COMPUTING:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
