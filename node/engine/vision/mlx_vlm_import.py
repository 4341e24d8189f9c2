"""Imports mlx-vlm's model classes without the rest of it.

`import mlx_vlm` imports servers, downloads and audio, of which most is not installed here. Its models do
without, so its packages are registered without their own `__init__`, as `mlx_lm_import` does for mlx-lm.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from sealring.mesh.prompt.images import vision_not_installed
from sealring.node.engine import mlx_lm_import
from sealring.node.engine.staging.pictured import pictured

_PACKAGES = ("mlx_vlm", "mlx_vlm.speculative")
"""Each `__init__` imports what needs packages that are not installed."""

ROW_TOKENS = (
    "image_token_index",
    "image_token_id",
    "media_placeholder_token_id",
    "img_context_token_id",
)
"""What configurations call the token whose embeddings an image's rows replace. mlx-vlm goes by the first that
a configuration has."""


def knows(model_type: str) -> bool:
    """Whether mlx-vlm is installed and has this model type. Imports nothing."""
    name = pictured(model_type).known_as or model_type
    found = importlib.util.find_spec("mlx_vlm")
    places = found.submodule_search_locations or () if found is not None else ()
    return name.isidentifier() and any(Path(place, "models", name).is_dir() for place in places)


def family(model_type: str) -> ModuleType | None:
    """mlx-vlm's package of a model type, such as `gemma3`: `Model`, `ModelConfig`, `VisionModel` and others.

    None if mlx-vlm has none. Raises FailedPrecondition (VISION_NOT_INSTALLED).
    """
    try:
        for name in _PACKAGES:
            mlx_lm_import.register(name)
        name = pictured(model_type).known_as or model_type
        return importlib.import_module(f"mlx_vlm.models.{name}") if knows(model_type) else None
    except ImportError as error:
        raise vision_not_installed() from error
