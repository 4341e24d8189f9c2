"""The Hugging Face hub from this machine: models found by words, and fetched into a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sealring.mesh.errors import InvalidInput, SealringError
from sealring.node.models.fetch import fetch, refusal
from sealring.node.models.folders import HUB_ID

BITS = (2, 3, 4, 5, 6, 8)
"""Widths of a weight that MLX quantizes to."""

_WORKING = ".fetched"
"""Folder for models as they are published, below the folder that gets them converted."""


def check_bits(bits: int) -> None:
    """Raises InvalidInput (BAD_BITS) for a width that MLX does not quantize to."""
    if bits not in BITS:
        raise InvalidInput(
            f"--bits is {bits}", hint=f"one of {', '.join(map(str, BITS))}", reason="BAD_BITS", param="bits"
        )


def find_models(words: str, *, limit: int, mlx_only: bool) -> list[dict[str, Any]]:
    """Models of the hub whose names have these words, most fetched first.

    Raises Unavailable (HUB_OFFLINE, HUB_UNREACHABLE), ModelError (BAD_HUB_ANSWER).
    """
    from sealring.node.models.hub import search

    try:
        return search(words, limit, mlx_only=mlx_only)
    except SealringError:
        raise
    except Exception as error:
        raise refusal(error, words) from error


def fetch_here(model: str, into: Path, tell: Callable[[int, int], None]) -> Path:
    """The folder of a model of the hub, fetched below `into`. An earlier fetch goes on where it ended.

    Raises InvalidInput (BAD_MODEL_ID), and as `fetch`.
    """
    if HUB_ID.fullmatch(model) is None or ".." in model:
        raise InvalidInput(f"{model[:80]!r} is no id of the hub", hint="ORG/NAME", reason="BAD_MODEL_ID")
    home = into / _WORKING
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return fetch(model, home, lambda event: tell(event.done, event.size) if event.ByteSize() else None)
