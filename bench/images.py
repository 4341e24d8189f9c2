"""Checks every family that sees, in three stages against mlx-vlm's whole model, with random weights.

`python -m bench.images FILE.json > images.json`, where the file is like `tests/data/archs-images.json`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from sealring.node.engine.check_images import check_family
from sealring.node.engine.vision import mlx_vlm_import
from sealring.node.engine.vision.sizes import can_see

STAGES = 3


class _SmallTower(nn.Module):  # type: ignore[misc]
    """For images of 64 x 64 pixels: 16 x 16 rows, each a product of 4 x 4 pixels."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(48, config.hidden_size)

    def __call__(self, pixels: mx.array, **_: object) -> mx.array:
        patches = pixels.reshape(-1, 3, 16, 4, 16, 4).transpose(0, 2, 4, 1, 3, 5)
        rows: mx.array = self.proj(patches.reshape(-1, 16, 16, 48))
        return rows


@contextlib.contextmanager
def small_towers() -> Iterator[None]:
    """Meanwhile mlx-vlm's Gemma 3n has a small tower: its own has 300 million parameters whatever the
    configuration says, and takes images of 512 x 512 pixels and more."""
    package = mlx_vlm_import.family("gemma3n")
    places = [package, importlib.import_module("mlx_vlm.models.gemma3n.gemma3n")]
    own = places[1].VisionModel
    for place in places:
        setattr(place, "VisionModel", _SmallTower)  # noqa: B010
    try:
        yield
    finally:
        for place in places:
            setattr(place, "VisionModel", own)  # noqa: B010


def outcome(family: dict[str, Any]) -> dict[str, str]:
    """`images`: `exact`, `rounding`, `wrong`, or `no` for a family of which sealring refuses images."""
    if not can_see(family["config"]):
        return {"images": "no"}
    with small_towers():
        report = check_family(family, stages=STAGES)
    if report.alone == 0:
        return {"images": "exact"}
    right = report.alone is not None and report.alone <= family.get("rounding", 0)
    return {"images": "rounding" if right else "wrong"}


def main(arguments: Sequence[str]) -> None:
    mx.set_default_device(mx.cpu)
    families = json.loads(Path(arguments[0]).read_bytes())
    found = {key: outcome(family) for key, family in families.items()}
    sys.stdout.write(json.dumps(found))
    if wrong := [key for key, one in found.items() if one["images"] == "wrong"]:
        sys.exit(f"not what mlx-vlm computes: {', '.join(wrong)}")


if __name__ == "__main__":
    main(sys.argv[1:])
