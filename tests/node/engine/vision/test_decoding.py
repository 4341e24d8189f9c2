"""Image files to pixels, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
from hostileimages import HOSTILE, SOUND, endless_scans, frames, picture, png, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sealring.node.engine.vision.decoding import (
    MAX_PIXELS,
    MAX_SCANNED,
    BadImageError,
    LargeImageError,
    decode,
    scans,
)

FILES = {
    "png": saved(picture(), "PNG"),
    "interlaced": saved(picture(mode="RGBA"), "PNG"),
    "palette": saved(picture().convert("P"), "PNG"),
    "jpeg": saved(picture(), "JPEG"),
    "progressive": saved(picture(), "JPEG", progressive=True),
    "webp": saved(picture(), "WEBP"),
    "gif": saved(picture().convert("P"), "GIF"),
    "animated": saved(frames(3)[0], "WEBP", save_all=True, append_images=frames(3)[1:]),
}


@given(st.sampled_from(sorted(FILES)), st.data())
@settings(max_examples=300, deadline=None)
def test_a_file_that_was_cut_or_changed_is_an_image_or_refused(name: str, data: st.DataObject) -> None:
    file = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(0, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(file[: data.draw(st.integers(0, len(file)))])
    try:
        found = decode(cut, 64)
    except (BadImageError, LargeImageError):
        return
    assert found.mode == "RGB"
    assert 1 <= max(found.size) <= 64


@pytest.mark.parametrize("name", [name for name in HOSTILE if "endless" not in name])
def test_a_hostile_file_is_refused(name: str) -> None:
    reason, make = HOSTILE[name]
    with pytest.raises(LargeImageError if reason == "IMAGE_TOO_LARGE" else BadImageError):
        decode(make(), 512)


@pytest.mark.parametrize("name", SOUND)
def test_an_unusual_file_is_read(name: str) -> None:
    assert decode(SOUND[name](), 512).mode == "RGB"


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True})])
def test_the_first_frame_counts(kind: str, options: dict[str, bool]) -> None:
    first, *others = frames(4)
    file = saved(first, kind, save_all=True, append_images=others, **options)
    assert (
        np.abs(np.asarray(decode(file, 512), int) - np.asarray(first, int)).max() <= 24
    )  # GIF has a palette


def test_transparent_parts_are_white() -> None:
    glass = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    for file in (saved(glass, "PNG"), saved(glass, "WEBP", lossless=True), saved(glass, "GIF")):
        assert np.asarray(decode(file, 512)).min() == 255
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert decode(saved(half, "PNG"), 512).getpixel((0, 0)) == (255, 127, 127)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_made_upright(orientation: int) -> None:
    """As Pillow's exif_transpose does it, on the way back."""
    back = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270, 2: Image.Transpose.FLIP_LEFT_RIGHT}
    back |= {3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    back |= {5: Image.Transpose.TRANSPOSE, 7: Image.Transpose.TRANSVERSE}
    upright = picture()
    exif = Image.Exif()
    exif[0x0112] = orientation
    lying = upright.transpose(back[orientation]) if orientation in back else upright
    assert decode(saved(lying, "PNG", exif=exif), 512).tobytes() == upright.tobytes()


def test_sixteen_bits_become_eight() -> None:
    deep = Image.fromarray(np.linspace(0, 65_535, 64, dtype=np.uint16).reshape(8, 8))
    found = np.asarray(decode(saved(deep, "PNG"), 512))
    assert (found[..., 0] == np.asarray(deep) >> 8).all()


def test_a_large_image_is_made_smaller_and_keeps_its_shape() -> None:
    assert decode(saved(picture(3000, 1000), "JPEG"), 2048).size == (2048, 683)
    assert decode(saved(picture(300, 1000), "WEBP"), 512).size == (154, 512)
    assert decode(saved(picture(300, 200), "PNG"), 512).size == (300, 200)


def test_pixels_are_counted_by_the_header() -> None:
    with pytest.raises(LargeImageError) as caught:
        decode(png(10_000, 5_001), 2048)
    assert caught.value.pixels == 50_010_000


def test_scans_are_counted_by_their_markers() -> None:
    """Not those of a preview in a segment, nor bytes of a picture that look like one."""
    plain, progressive = saved(picture(), "JPEG"), saved(picture(), "JPEG", progressive=True)
    preview = b"\xff\xe1" + (len(plain) + 2).to_bytes(2, "big") + plain
    assert (scans(plain), scans(progressive)) == (1, 10)
    assert scans(plain[:2] + preview + plain[2:]) == 1
    assert scans(endless_scans(64, 500)) == scans(endless_scans(64, 1)) + 499


@pytest.mark.parametrize(("side", "count"), [(2000, 300), (6000, 60)])
def test_scans_are_bounded_by_the_size_before_anything_is_decoded(
    monkeypatch: pytest.MonkeyPatch, side: int, count: int
) -> None:
    file = endless_scans(side, count)
    monkeypatch.setattr(Image.Image, "draft", lambda *_: pytest.fail("it is decoded"), raising=False)
    with pytest.raises(BadImageError, match="scans"):
        decode(file, 2048)


def test_a_telephones_largest_progressive_photo_has_few_scans_enough() -> None:
    assert 12 * MAX_PIXELS < MAX_SCANNED
