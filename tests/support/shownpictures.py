"""Pictures that programs show to the bundled model that sees, and what it says is in them."""

from __future__ import annotations

from hostileimages import saved
from PIL import Image, ImageDraw

from sealring.node.models.folders import VISION, bundled_model

SEES = VISION
"""The model, and its deployment."""


def _square() -> bytes:
    picture = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(picture).rectangle((20, 22, 72, 74), fill=(40, 70, 220))
    return saved(picture, "PNG")


SEEN = {
    (bundled_model(VISION) / "shapes.png").read_bytes(): "The picture shows a red circle and a blue star.",
    _square(): "The picture shows a blue square.",
}
"""The answers by file, each a PNG of 96 x 96 pixels."""
