"""Checks every family that sees, in three stages against mlx-vlm's whole model, with random weights.

`python -m bench.images FILE.json > images.json`, where the file is like `tests/data/archs-images.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from sealring.node.engine.vision.check import check_images
from sealring.node.engine.vision.sizes import can_see

STAGES = 3


def outcome(family: dict[str, Any]) -> dict[str, str]:
    """`images`: `exact`, `rounding`, `wrong`, or `no` for a family of which sealring refuses images."""
    config = family["config"]
    if not can_see(config):
        return {"images": "no"}
    given = config, family["images"], family["token"]
    report = check_images(*given, stages=STAGES, names=family.get("names"))
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
