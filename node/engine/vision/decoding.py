"""Image files to pixels, by Pillow. `python -m sealring.node.engine.vision.decoding` is the process that
`node/engine/vision/viewing.py` starts for the images of one prompt.

A file may come from anybody, and decoders are large programs in C. So nothing but the files of that prompt is
ever in this process. It is confined before the first of them comes (node/engine/confining.py). A file that
takes it over reads no other file, and reaches nobody but the engine, which checks the answers.
"""

from __future__ import annotations

import importlib
import io
import re
import sys
import warnings
from typing import Any

from PIL import (
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from sealring.mesh.system.start import forbid_core_files
from sealring.node.engine.helper import hold_to, serve

PLUGINS = (GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
"""Imported here, so that Pillow looks for no others."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_LATER = (
    "ExifTags",
    "ImageColor",
    "ImageFile",
    "ImagePalette",
    "MpoImagePlugin",
    "TiffImagePlugin",
    "TiffTags",
)
"""What is imported within functions there."""

MAX_PIXELS = 50_000_000
"""By a file's header, before anything is decoded. A telephone's photo of 48 megapixels has fewer."""

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image of this orientation upright (EXIF 2.32, 4.6.4 A)."""


MAX_SCANNED = 1 << 30
"""Pixels of a JPEG times its scans. Each scan walks over all blocks, in 1.1 ns for each pixel, however few
bytes it has. Encoders write 10 scans; 50 megapixels may have 21."""

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SCAN = 0xDA
_BARE = frozenset((0x01, 0xD8, 0xD9))
"""Markers without a length."""


class BadImageError(ValueError):
    """The file is no image of the formats that are read, or is broken. Its text says which."""


class LargeImageError(ValueError):
    """The image has more pixels than MAX_PIXELS."""

    def __init__(self, pixels: int) -> None:
        super().__init__(f"{pixels} pixels")
        self.pixels = pixels


def decode(file: bytes, side: int) -> Image.Image:
    """The first frame of a file as an RGB image: upright, transparent parts on white, and neither wider nor
    higher than `side` pixels.

    Raises BadImageError, LargeImageError, MemoryError.
    """
    Image.MAX_IMAGE_PIXELS = None  # our own bound is lower, and is no warning
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # Pillow warns of broken EXIF
            Image.open(io.BytesIO(file), formats=FORMATS) as image,
        ):
            _check(image)
            if image.format == "JPEG" and scans(file) * image.width * image.height > MAX_SCANNED:
                raise BadImageError("it has more scans than images of its size have")
            image.draft("RGB", (side, side))  # a JPEG that is much larger is decoded at a part of its size
            image.load()
            _check(image)
            return _plain(image, side)
    except (BadImageError, LargeImageError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise BadImageError("it is no PNG, JPEG, WebP or GIF file, or its beginning is broken") from None
    except Exception:  # decoders raise OSError, ValueError, SyntaxError, struct.error and others
        raise BadImageError("the file is broken or not whole") from None


def scans(file: bytes) -> int:
    """Scans of a JPEG, by its markers (ITU-T T.81, B.1.1). What is no JPEG has any number."""
    count, at = 0, 0
    while (found := _MARKER.search(file, at)) is not None:
        marker, at = file[found.start() + 1], found.end()
        count += marker == _SCAN
        if marker not in _BARE:
            at += max(2, int.from_bytes(file[at : at + 2], "big"))
    return count


def _check(image: Image.Image) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise BadImageError("it has no pixels")
    if width * height > MAX_PIXELS:
        raise LargeImageError(width * height)


def _plain(image: Image.Image, side: int) -> Image.Image:
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # cameras write broken EXIF into sound images
        orientation = None
    transparent = image.has_transparency_data
    if image.mode.startswith("I;16"):  # Pillow would make white of all that 8 bits do not hold
        found = image.convert("I").point([value >> 8 for value in range(1 << 16)], "L").convert("RGB")
    else:
        mode = "RGBA" if transparent else "RGB"
        found = image if image.mode == mode else image.convert(mode)  # a copy may be 200 MB
    found.thumbnail((side, side), Image.Resampling.BICUBIC)
    if found.mode == "RGBA":
        white = Image.new("RGBA", found.size, "white")
        white.alpha_composite(found)
        found = white.convert("RGB")
    turn = _UPRIGHT.get(orientation) if isinstance(orientation, int) else None
    return found.copy() if turn is None else found.transpose(turn)


def _import_all() -> None:
    """Reads what Pillow would read later, when this process is confined."""
    for name in _LATER:
        importlib.import_module(f"PIL.{name}")
    Image.preinit()


def main() -> None:
    """Answers until standard input ends; a signal ends the process where one answer takes too long.

    Arguments: as node.engine.text.template. Each question has a file, and the longer `side` of the image at
    most; each answer the pixels, and their `size`: width and height.
    """
    forbid_core_files()
    seconds, address = map(int, sys.argv[1:])
    hold_to(address)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "data" not in asked:
            _import_all()
            return {}
        try:
            image = decode(asked["data"], asked["side"])
        except BadImageError as error:
            return {"bad": str(error)}
        except LargeImageError as error:
            return {"large": [error.pixels, MAX_PIXELS]}
        return {"size": image.size, "data": image.tobytes()}

    serve(answer, seconds)


if __name__ == "__main__":
    main()
