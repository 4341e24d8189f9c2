"""Images are decoded and prepared in a process of its own, as mlx-vlm's own processors prepare them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import darwin
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from hostileimages import BAD, HOSTILE, picture, saved
from visionmodels import FAMILIES, tokenizer, write_folder

from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import MAX_PREFILL_CHUNK
from sealring.node.engine.text import with_digests
from sealring.node.engine.vision.viewing import Reading, Seen, Viewer, ViewerError
from sealring.v1 import inference_pb2 as inference

EVERY_RUN = {"gemma3": "gemma", "qwen2_vl": "qwen"}
"""Families and fixtures: a viewer takes two seconds of a processor to start, so tests share one of each."""

PADDED = (
    *("gemma4", "idefics2", "idefics3", "internvl", "internvl_chat", "llava_onevision", "mistral3"),
    *("nemotron_h_nano_omni", "paddleocr_vl", "pixtral", "smolvlm", "step3p7"),
)

FOUND_BY = (
    "a page",
    "a PNG of 100,000 x 100,000",
    "a PNG with a text of 200 MB",
    "a PNG with a profile of 200 MB",
    "a JPEG of which the end lacks",
)
"""Files that are of no known format, too large by their header, too large once decompressed, and cut."""

MLX_VLM = """
import io, json, sys
import numpy as np
from PIL import Image
from sealring.node.engine.vision import mlx_vlm_import
folder, family, text, out, *files = sys.argv[1:]
mlx_vlm_import.family(family)
from transformers import AutoProcessor
images = [Image.open(file).convert("RGB") for file in files]
plain = family in ("llava", "llava_onevision", "paddleocr_vl")
more = {} if plain else {"add_special_tokens": False}  # these take no such thing
made = dict(AutoProcessor.from_pretrained(folder)(images=images, text=[text], **more))
np.savez(out, **{name: np.array(made[name]) for name in made if not name.startswith("_")})
"""
"""Prepares a text with images as mlx-vlm's own `load` and `generate` do."""


def viewer(folder: Path, name: str) -> Viewer:
    made = Viewer(write_folder(folder, name), FAMILIES[name].numbers)
    made.placeholder = next(one for one in made.placeholders if one in FAMILIES[name].image)
    return made


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    made = viewer(tmp_path_factory.mktemp("gemma3"), "gemma3")
    yield made
    made.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    made = viewer(tmp_path_factory.mktemp("qwen2_vl"), "qwen2_vl")
    yield made
    made.close()


@contextlib.contextmanager
def bounded(viewer: Viewer, **bounds: int) -> Iterator[None]:
    """Meanwhile a shared viewer has these bounds."""
    before = {name: getattr(viewer, name) for name in bounds}
    for name, bound in bounds.items():
        setattr(viewer, name, bound)
    try:
        yield
    finally:
        for name, bound in before.items():
            setattr(viewer, name, bound)


def read(viewer: Viewer, messages: list[inference.ChatMessage], scope: bytes = b"") -> Reading:
    """The images of a prompt, all of which are going to be computed."""
    with contextlib.closing(begun(viewer, messages, scope)) as reading:
        for _ in reading.make_ready(0):
            pass
    return reading


def begun(
    viewer: Viewer,
    messages: list[inference.ChatMessage],
    scope: bytes = b"",
    longest: int = MAX_PREFILL_CHUNK,
) -> Reading:
    """The images of a prompt, of which it is known what becomes of them."""
    reading = viewer.read(messages, scope, longest)
    for _ in reading.add_all():
        pass
    return reading


def view(viewer: Viewer, messages: list[inference.ChatMessage]) -> list[Seen]:
    return read(viewer, messages).seen


def shown(*files: bytes, low: bool = False) -> list[inference.ChatMessage]:
    images = [inference.Image(data=file, low_detail=low) for file in files]
    return [inference.ChatMessage(role="user", content="x", images=images)]


@pytest.mark.parametrize(
    "name", [name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.sweep) for name in FAMILIES]
)
def test_images_become_what_mlx_vlm_makes_of_them(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """Two images of different shapes in one prompt: equal tokens and, one behind the other, equal arrays."""
    family = FAMILIES[name]
    files = [saved(picture(300, 200), "PNG"), saved(picture(100, 260), "PNG")]
    if name in EVERY_RUN:
        write_folder(tmp_path / "model", name)
        made: Viewer = request.getfixturevalue(EVERY_RUN[name])
        reading = read(made, shown(*files))
    else:
        with contextlib.closing(viewer(tmp_path / "model", name)) as made:
            reading = read(made, shown(*files))
    text = f"one {family.image} two\n{family.image}\nthree"
    first, second, third = text.split(made.placeholder)
    expanded = f"{first}{reading.shown.texts[0]}{second}{reading.shown.texts[1]}{third}"
    ids = tokenizer(family.special, family.first).encode(expanded, add_special_tokens=False).ids
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    # one by one where mlx-vlm pads what it prepares together
    groups = [paths] if name not in PADDED else [[path] for path in paths]
    texts = [text] if len(groups) == 1 else [f"one {family.image} two"] * 2
    theirs: list[Any] = []
    for group, of_group in zip(groups, texts, strict=True):
        out = tmp_path / "out.npz"
        command = [sys.executable, "-c", MLX_VLM, str(tmp_path / "model"), name, of_group, str(out)]
        subprocess.run([*command, *map(str, group)], check=True, capture_output=True)
        theirs.append(dict(np.load(out)))
    if len(groups) == 1:
        assert theirs[0]["input_ids"].reshape(-1).tolist() == ids
    taken = [seen.source.take() for seen in reading.seen]
    for key in taken[0]:
        ours = [one[key] for one in taken]
        if len(groups) == 1:
            assert np.array_equal(np.concatenate(ours), theirs[0][key]), key
        else:
            assert all(np.array_equal(one, their[key]) for one, their in zip(ours, theirs, strict=True)), key
    places = np.concatenate([picture.places for picture in reading.pictures_in(ids)])
    assert places.tolist() == [place for place, token in enumerate(ids) if token in made.row_tokens]


def test_the_special_tokens_around_an_image_belong_to_it(gemma: Viewer) -> None:
    reading = read(gemma, shown(saved(picture(), "PNG")))
    ids = tokenizer(FAMILIES["gemma3"].special).encode("ab" + reading.shown.texts[0] + "c").ids
    (found,) = reading.pictures_in(ids)
    special = FAMILIES["gemma3"].special
    assert [special[token] for token in (ids[found.start], ids[found.end - 1])] == [
        "<start_of_image>",
        "<end_of_image>",
    ]
    assert found.places.tolist() == list(range(found.start + 1, found.end - 1))


def test_prefixes_are_named_by_the_image(gemma: Viewer) -> None:
    ids = {}
    for name, file in (("one", picture()), ("other", picture().rotate(180))):
        reading = read(gemma, shown(saved(file, "PNG")))
        tokens = np.array([9, 9, 5, *[7] * reading.seen[0].shape.rows, 6, 9], np.uint32)
        (found,) = reading.pictures_in(tokens.tolist())
        ids[name] = with_digests(tokens, [found])
        assert ids[name][[0, 1, -1]].tolist() == [9, 9, 9]
        assert (ids[name][2:-1] >= 1 << 31).all()
        assert view(gemma, shown(saved(file, "PNG")))[0].digest == found.digest
        assert view(gemma, shown(saved(file, "PNG"), low=True))[0].digest != found.digest
    assert (ids["one"][2:-1] != ids["other"][2:-1]).sum() == len(ids["one"]) - 3


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_hostile_file_is_refused_by_its_place_and_the_next_one_is_read(gemma: Viewer, name: str) -> None:
    """One for each way in which the process finds out; test_decoding.py has all files."""
    reason, make = HOSTILE[name]
    sound = saved(picture(), "PNG")
    with pytest.raises(InvalidInput) as caught:
        view(gemma, shown(sound, make()))
    assert (caught.value.reason, caught.value.metadata["param"]) == (reason, "messages[0].images[1]")
    assert len(view(gemma, shown(sound))) == 1


def test_large_images_one_after_another_are_within_the_processors_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where MLX keeps all that was freed, and where the last image's arrays would be there still."""
    monkeypatch.setattr(sys, "executable", str(darwin.make(tmp_path / "mac", pose=True)))
    with contextlib.closing(viewer(tmp_path / "model", "qwen2_vl")) as made:
        for side in (1424, 2048, 2048):
            assert len(view(made, shown(saved(picture(side, side), "JPEG")))) == 1


def test_an_image_takes_no_more_memory_than_it_may(gemma: Viewer) -> None:
    """The parent looks, since macOS holds no process to its address space."""
    file = saved(picture(5000, 5000, "RGBA"), "PNG", compress_level=1)
    with bounded(gemma, memory=150 << 20):
        with pytest.raises(InvalidInput) as caught:
            view(gemma, shown(file))
        assert caught.value.reason == BAD
        assert len(view(gemma, shown(saved(picture(), "PNG")))) == 1


@pytest.mark.sweep
def test_fifty_megapixels_with_transparency_fit(gemma: Viewer) -> None:
    (seen,) = view(gemma, shown(saved(picture(8064, 6048, "RGBA"), "PNG", compress_level=1)))
    assert seen.shape.rows == 16


def test_the_images_of_a_prompt_are_bounded_together(gemma: Viewer) -> None:
    file = saved(picture(), "PNG")
    with bounded(gemma, most=2 * 48 * 32 * 3, ready=0):  # pixels
        assert len(view(gemma, shown(file, file))) == 2
        with pytest.raises(InvalidInput) as caught:
            view(gemma, shown(file, file, file))
    assert (caught.value.reason, caught.value.metadata["param"]) == (
        "TOO_MANY_IMAGES",
        "messages[0].images[2]",
    )


def decoded(viewer: Viewer, messages: list[inference.ChatMessage], scope: bytes, first: int) -> list[int]:
    """The images of a prompt that are decoded, if rows are computed from the image `first` on."""
    reading = begun(viewer, messages, scope)
    with contextlib.closing(reading):
        for _ in reading.make_ready(first):
            pass
    return [index for index, seen in enumerate(reading.seen) if not seen.source.file]


def test_images_that_were_shown_before_are_decoded_only_if_they_are_computed(gemma: Viewer) -> None:
    files = [saved(picture(40 + number, 30), "PNG") for number in range(3)]
    assert decoded(gemma, shown(*files[:2]), b"mine", 0) == [0, 1]
    assert decoded(gemma, shown(*files), b"mine", 2) == [2]
    assert decoded(gemma, shown(*files), b"mine", 1) == [1, 2]
    assert decoded(gemma, shown(*files), b"mine", 3) == []


def test_nobody_learns_from_times_what_others_have_shown(gemma: Viewer) -> None:
    """An image that another scope has shown is decoded, and so is one in no scope."""
    file = saved(picture(61, 30), "PNG")
    for scope in (b"mine", b"yours", b"", b""):
        assert decoded(gemma, shown(file), scope, 1) == [0]


def test_what_was_not_decoded_has_the_same_places_and_arrays(gemma: Viewer) -> None:
    """Its rows are computed after all if the prefix that covers it is dropped."""
    messages = shown(saved(picture(42, 30), "PNG"), saved(picture(42, 31), "JPEG"))
    before, again = begun(gemma, messages, b"scope"), begun(gemma, messages, b"scope")
    assert all(seen.source.file for seen in again.seen)
    assert [seen[:2] for seen in again.seen] == [seen[:2] for seen in before.seen]
    for reading in (before, again):
        reading.close()
    for one, other in zip(before.seen, again.seen, strict=True):
        arrays, others = one.source.take(), other.source.take()
        assert arrays.keys() == others.keys()
        assert all(np.array_equal(arrays[key], others[key]) for key in arrays)
        assert (one.source.nbytes, other.source.nbytes) == (0, 0)


def test_only_the_first_images_wait_as_arrays(gemma: Viewer) -> None:
    """Thirty screenshots would be 750 MB as arrays of Qwen's towers."""
    size = 112 * 112 * 3 * 4
    with bounded(gemma, ready=2 * size):
        seen = view(gemma, shown(*[saved(picture(50, 30), "PNG")] * 4))
        assert [one.source.nbytes for one in seen] == [size, size, 50 * 30 * 3, 50 * 30 * 3]
        assert {one.source.take()["pixel_values"].nbytes for one in seen} == {size}


def test_an_image_with_more_tokens_than_a_chunk_is_made_smaller(qwen: Viewer) -> None:
    messages = shown(saved(picture(280, 140), "PNG"))
    with contextlib.closing(begun(qwen, messages)) as reading:
        (whole,) = reading.seen
    with contextlib.closing(begun(qwen, messages, longest=whole.shape.tokens // 2)) as reading:
        (less,) = reading.seen
    with contextlib.closing(begun(qwen, messages, longest=whole.shape.tokens // 2)) as reading:
        (again,) = reading.seen
        for _ in reading.make_ready(0):
            pass
        arrays = again.source.take()
    assert whole.shape.size == (280, 140)
    width, height = less.shape.size
    assert abs(width - 2 * height) <= 1
    assert whole.shape.tokens // 4 < less.shape.tokens <= whole.shape.tokens // 2
    assert less.shape.text.count("pad") == less.shape.rows
    assert less.digest == again.digest != whole.digest
    assert sum(array.nbytes for array in arrays.values()) == less.shape.nbytes < whole.shape.nbytes


def test_an_image_that_its_processor_makes_smaller_too_is_made_smaller(tmp_path: Path) -> None:
    """MiniMax's has 578 tokens in two sizes, and then 146 in two."""
    made = viewer(tmp_path, "minimax_m3_vl")
    try:
        with contextlib.closing(
            begun(made, shown(saved(picture(2000, 2000), "PNG")), longest=144)
        ) as reading:
            (seen,) = reading.seen
    finally:
        made.close()
    assert 72 < seen.shape.tokens <= 144


def test_an_image_that_no_size_makes_short_enough_is_refused(gemma: Viewer) -> None:
    """Gemma's processor makes as many tokens of any."""
    with pytest.raises(InvalidInput) as caught:
        begun(gemma, shown(saved(picture(), "PNG")), longest=10)
    assert (caught.value.reason, caught.value.metadata["param"]) == (
        "IMAGE_TOO_LARGE",
        "messages[0].images[0]",
    )


def test_no_file_is_in_a_process_that_reads_another_prompts(gemma: Viewer) -> None:
    """A file that takes its decoder over sees no other prompt."""
    before = {one.pid for one in psutil.Process().children()}
    view(gemma, shown(saved(picture(), "PNG")))
    after = [one.cmdline() for one in psutil.Process().children() if one.pid not in before]
    assert not [line for line in after if "sealring.node.engine.vision.decoding" in line]


def test_what_the_processor_refuses_is_refused(qwen: Viewer) -> None:
    """Qwen's takes no image that is 200 times as wide as high."""
    with pytest.raises(InvalidInput) as caught:
        view(qwen, shown(saved(picture(2000, 4), "PNG")))
    assert caught.value.reason == BAD


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ViewerError):
        Viewer(folder, dict(enumerate(FAMILIES["gemma3"].special)))
