"""Extras of the installation, by what they install."""

from __future__ import annotations

import importlib.util

INSTALL_VISION = (
    "pipx inject sealring mlx-vlm pillow; with uv: uv tool install, --with mlx-vlm --with pillow; with pip, "
    "or in a checkout: pip install mlx-vlm pillow"
)
"""How to install what heads need for images: not by sealring's name, which no package index has."""

_VISION = ("mlx_vlm", "PIL")


def vision_installed() -> bool:
    """Whether `sealring[vision]` is installed, which heads need for images. Imports nothing of it."""
    return all(map(importlib.util.find_spec, _VISION))
