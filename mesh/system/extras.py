"""Extras of the installation, by what they install."""

from __future__ import annotations

import importlib.util

_VISION = ("mlx_vlm", "PIL")


def vision_installed() -> bool:
    """Whether `sealring[vision]` is installed, which heads need for images. Imports nothing of it."""
    return all(map(importlib.util.find_spec, _VISION))
