"""Files that come as images and are broken, of another kind, or larger than they look, by what they are."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(width: int = 48, height: int = 32, mode: str = "RGB") -> Image.Image:
    """A picture with a ramp in each direction."""
    ramp = Image.linear_gradient("L").resize((width, height))
    image = Image.merge("RGB", (ramp, ramp.rotate(180), ramp.transpose(Image.Transpose.FLIP_LEFT_RIGHT)))
    return image.convert(mode)


def frames(count: int) -> list[Image.Image]:
    """Pictures of which each is darker than the one before."""
    first = picture()
    return [first.point(lambda value, part=part: value * part // count) for part in range(count, 0, -1)]


def chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, *more: bytes, data: bytes = b"\0" * 64) -> bytes:
    """A PNG that says that it has this size; `more` chunks come before its data."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + body


def _jpeg_of(size: int) -> bytes:
    file = bytearray(saved(picture(), "JPEG"))
    at = file.index(b"\xff\xc0") + 5
    file[at : at + 4] = struct.pack(">HH", size, size)
    return bytes(file)


def endless_scans(side: int = 6000, scans: int = 4000) -> bytes:
    """A progressive JPEG of which one scan is said again and again. Each costs a walk over all blocks."""
    file = saved(Image.new("L", (side, side)), "JPEG", progressive=True)
    begin = file.rindex(b"\xff\xda")
    scan = file[begin : file.rindex(b"\xff\xd9")]
    return file[:begin] + scan * scans + b"\xff\xd9"


def _webp_of(size: int) -> bytes:
    file = bytearray(saved(picture(), "WEBP", lossless=True))
    at = file.index(b"VP8L") + 9  # behind the signature: 14 bits of width and of height, each less one
    bits = struct.unpack("<I", file[at : at + 4])[0] >> 28 << 28 | (size - 1) << 14 | (size - 1)
    file[at : at + 4] = struct.pack("<I", bits)
    return bytes(file)


def _gif_of(screen: int, frame: int) -> bytes:
    file = bytearray(saved(picture().convert("P"), "GIF"))
    file[6:10] = struct.pack("<HH", screen, screen)
    at = file.index(b"\x2c\0\0\0\0") + 5
    file[at : at + 4] = struct.pack("<HH", frame, frame)
    return bytes(file)


def _flipped(file: bytes, at: int) -> bytes:
    return file[:at] + bytes([file[at] ^ 0xFF]) + file[at + 1 :]


BAD, LARGE = "BAD_IMAGE", "IMAGE_TOO_LARGE"

HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "nothing but zeros": (BAD, lambda: b"\0" * 4096),
    "a page": (BAD, lambda: b"<html><body>not an image</body></html>"),
    "an SVG": (
        BAD,
        lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><rect width='9e9' height='9e9'/></svg>",
    ),
    "a BMP": (BAD, lambda: saved(picture(), "BMP")),
    "a TIFF": (BAD, lambda: saved(picture(), "TIFF")),
    "a PPM named PNG": (BAD, lambda: saved(picture(), "PPM")),
    "PostScript": (BAD, lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n{ } loop\n"),
    "a PNG of which the end lacks": (BAD, lambda: saved(picture(256, 256), "PNG")[:-900]),
    "a PNG of 1 x 1e9": (LARGE, lambda: png(1, 10**9)),
    "a PNG of 100,000 x 100,000": (LARGE, lambda: png(100_000, 100_000, data=b"\0" * 10**6)),
    "a PNG without width": (BAD, lambda: png(0, 9)),
    "a PNG with a damaged header": (BAD, lambda: _flipped(saved(picture(), "PNG"), 20)),
    "a PNG with a text of 200 MB": (
        BAD,
        lambda: png(8, 8, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(200 << 20), 1))),
    ),
    "a PNG with 80 texts of 1 MB": (
        BAD,
        lambda: png(8, 8, chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1_000_000))) * 80),
    ),
    "a PNG with a profile of 200 MB": (
        BAD,
        lambda: png(8, 8, chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(200 << 20), 1))),
    ),
    "a JPEG of which the end lacks": (BAD, lambda: saved(picture(256, 256), "JPEG")[:900]),
    "a JPEG of 65,500 x 65,500": (LARGE, lambda: _jpeg_of(65_500)),
    "a JPEG of endless scans": (BAD, endless_scans),
    "a GIF with a screen of 65,535 x 65,535": (LARGE, lambda: _gif_of(65_535, 32)),
    "a GIF with a frame of 65,535 x 65,535": (LARGE, lambda: _gif_of(48, 65_535)),
    "a GIF of which the end lacks": (BAD, lambda: saved(picture().convert("P"), "GIF")[:-300]),
    "a WebP of which the end lacks": (BAD, lambda: saved(picture(256, 256), "WEBP")[:-50]),
    "a WebP of 16,000 x 16,000": (LARGE, lambda: _webp_of(16_000)),
    "a WebP of another file": (BAD, lambda: b"RIFF\x10\0\0\0WEBPVP8 " + b"\xff" * 64),
}
"""What each is refused with, and what makes it."""

SOUND: dict[str, Callable[[], bytes]] = {
    "an APNG of 200 frames": lambda: saved(
        frames(200)[0], "PNG", save_all=True, append_images=frames(200)[1:]
    ),
    "a GIF of 200 frames": lambda: saved(frames(200)[0], "GIF", save_all=True, append_images=frames(200)[1:]),
    "a WebP of 50 frames": lambda: saved(
        frames(50)[0], "WEBP", save_all=True, append_images=frames(50)[1:], lossless=True
    ),
    "a JPEG in CMYK": lambda: saved(picture(mode="CMYK"), "JPEG"),
    "a JPEG with broken EXIF": lambda: saved(picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" * 9),
    "a PNG of one pixel": lambda: saved(picture(1, 1), "PNG"),
}
"""Unusual files that are images all the same."""
