"""Images are decoded and prepared in a process of its own, as mlx-vlm's own processors prepare them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from hostileimages import BAD, HOSTILE, endless_scans, picture, saved
from visionmodels import FAMILIES, tokenizer, write_folder

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.vision.picture import with_digests
from sealring.node.engine.vision.viewing import Viewer, ViewerError, pictures_in
from sealring.v1 import inference_pb2 as inference

EVERY_RUN = ("gemma3", "qwen2_vl")

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
made = dict(AutoProcessor.from_pretrained(folder)(images=images, text=[text], add_special_tokens=False))
np.savez(out, **{name: np.array(made[name]) for name in made if not name.startswith("_")})
"""
"""Prepares a text with images as mlx-vlm's own `load` and `generate` do."""


def viewer(folder: Path, name: str, **bounds: int) -> Viewer:
    made = Viewer(write_folder(folder, name), dict(enumerate(FAMILIES[name].special)), **bounds)
    made.placeholder = next(one for one in made.placeholders if one in FAMILIES[name].image)
    return made


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    made = viewer(tmp_path_factory.mktemp("gemma3"), "gemma3")
    yield made
    made.close()


def shown(*files: bytes, low: bool = False) -> list[inference.ChatMessage]:
    images = [inference.Image(data=file, low_detail=low) for file in files]
    return [inference.ChatMessage(role="user", content="x", images=images)]


@pytest.mark.parametrize(
    "name", [name if name in EVERY_RUN else pytest.param(name, marks=pytest.mark.sweep) for name in FAMILIES]
)
def test_images_become_what_mlx_vlm_makes_of_them(tmp_path: Path, name: str) -> None:
    """Two images of different shapes in one prompt: equal tokens and, one behind the other, equal arrays."""
    family = FAMILIES[name]
    files = [saved(picture(300, 200), "PNG"), saved(picture(100, 260), "PNG")]
    made = viewer(tmp_path / "model", name)
    try:
        seen = made.view(shown(*files))
    finally:
        made.close()
    text = f"one {family.image} two\n{family.image}\nthree"
    first, second, third = text.split(made.placeholder)
    expanded = f"{first}{seen[0].text}{second}{seen[1].text}{third}"
    ids = tokenizer(family.special).encode(expanded, add_special_tokens=False).ids
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for path, file in zip(paths, files, strict=True):
        path.write_bytes(file)
    # one by one where mlx-vlm pads what it prepares together
    groups = [paths] if name not in ("mistral3", "pixtral", "gemma4") else [[path] for path in paths]
    texts = [text] if len(groups) == 1 else [f"one {family.image} two"] * 2
    theirs: list[Any] = []
    for group, of_group in zip(groups, texts, strict=True):
        out = tmp_path / "out.npz"
        command = [sys.executable, "-c", MLX_VLM, str(tmp_path / "model"), name, of_group, str(out)]
        subprocess.run([*command, *map(str, group)], check=True, capture_output=True)
        theirs.append(dict(np.load(out)))
    if len(groups) == 1:
        assert theirs[0]["input_ids"].reshape(-1).tolist() == ids
    for key in seen[0].arrays:
        ours = [one.arrays[key] for one in seen]
        if len(groups) == 1:
            assert np.array_equal(np.concatenate(ours), theirs[0][key]), key
        else:
            assert all(np.array_equal(one, their[key]) for one, their in zip(ours, theirs, strict=True)), key
    places = np.concatenate([picture.places for picture in pictures_in(ids, made.row_token, seen)])
    assert places.tolist() == [place for place, token in enumerate(ids) if token == made.row_token]


def test_the_special_tokens_around_an_image_belong_to_it(gemma: Viewer) -> None:
    seen = gemma.view(shown(saved(picture(), "PNG")))
    ids = tokenizer(FAMILIES["gemma3"].special).encode("ab" + seen[0].text + "c").ids
    (found,) = pictures_in(ids, gemma.row_token, seen)
    special = FAMILIES["gemma3"].special
    assert [special[token] for token in (ids[found.start], ids[found.end - 1])] == [
        "<start_of_image>",
        "<end_of_image>",
    ]
    assert found.places.tolist() == list(range(found.start + 1, found.end - 1))


def test_prefixes_are_named_by_the_image(gemma: Viewer) -> None:
    ids = {}
    for name, file in (("one", picture()), ("other", picture().rotate(180))):
        seen = gemma.view(shown(saved(file, "PNG")))
        tokens = np.array([9, 9, 5, *[7] * seen[0].rows, 6, 9], np.uint32)
        (found,) = pictures_in(tokens.tolist(), gemma.row_token, seen)
        ids[name] = with_digests(tokens, [found])
        assert ids[name][[0, 1, -1]].tolist() == [9, 9, 9]
        assert (ids[name][2:-1] >= 1 << 31).all()
        assert gemma.view(shown(saved(file, "PNG")))[0].digest == seen[0].digest
        assert gemma.view(shown(saved(file, "PNG"), low=True))[0].digest != seen[0].digest
    assert (ids["one"][2:-1] != ids["other"][2:-1]).sum() == len(ids["one"]) - 3


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_hostile_file_is_refused_by_its_place_and_the_next_one_is_read(gemma: Viewer, name: str) -> None:
    """One for each way in which the process finds out; test_decoding.py has all files."""
    reason, make = HOSTILE[name]
    sound = saved(picture(), "PNG")
    with pytest.raises(InvalidInput) as caught:
        gemma.view(shown(sound, make()))
    assert (caught.value.reason, caught.value.metadata["param"]) == (reason, "messages[0].images[1]")
    assert len(gemma.view(shown(sound))) == 1


def test_a_file_that_takes_too_long_is_refused_and_the_next_one_is_read(
    tmp_path: Path,
) -> None:
    made = viewer(tmp_path, "gemma3", seconds=4)  # of which the start takes two
    try:
        with pytest.raises(InvalidInput) as caught:
            made.view(shown(endless_scans(4000)))
        assert caught.value.reason == BAD
        assert "4 s" in caught.value.message
        assert len(made.view(shown(saved(picture(), "PNG")))) == 1
    finally:
        made.close()


def test_an_image_takes_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """The parent looks, since macOS holds no process to its address space."""
    file = saved(picture(5000, 5000, "RGBA"), "PNG", compress_level=1)
    made = viewer(tmp_path, "gemma3", memory=150 << 20)
    try:
        with pytest.raises(InvalidInput) as caught:
            made.view(shown(file))
        assert caught.value.reason == BAD
        assert len(made.view(shown(saved(picture(), "PNG")))) == 1
    finally:
        made.close()


@pytest.mark.sweep
def test_fifty_megapixels_with_transparency_fit(gemma: Viewer) -> None:
    (seen,) = gemma.view(shown(saved(picture(8064, 6048, "RGBA"), "PNG", compress_level=1)))
    assert seen.rows == 16


def test_the_images_of_a_prompt_are_bounded_together(tmp_path: Path) -> None:
    file = saved(picture(), "PNG")
    made = viewer(tmp_path, "gemma3", most=2 * 112 * 112 * 3 * 4)
    try:
        assert len(made.view(shown(file, file))) == 2
        with pytest.raises(InvalidInput) as caught:
            made.view(shown(file, file, file))
    finally:
        made.close()
    assert (caught.value.reason, caught.value.metadata["param"]) == (
        "TOO_MANY_IMAGES",
        "messages[0].images[2]",
    )


def test_no_file_is_in_a_process_that_reads_another_prompts(gemma: Viewer) -> None:
    """A file that takes its decoder over sees no other prompt."""
    before = {one.pid for one in psutil.Process().children()}
    gemma.view(shown(saved(picture(), "PNG")))
    after = [one.cmdline() for one in psutil.Process().children() if one.pid not in before]
    assert not [line for line in after if "sealring.node.engine.vision.decoding" in line]


def test_what_the_processor_refuses_is_refused(tmp_path: Path) -> None:
    """Qwen's takes no image that is 200 times as wide as high."""
    made = viewer(tmp_path, "qwen2_vl")
    try:
        with pytest.raises(InvalidInput) as caught:
            made.view(shown(saved(picture(2000, 4), "PNG")))
    finally:
        made.close()
    assert caught.value.reason == BAD


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    (folder / "preprocessor_config.json").write_text("{")
    with pytest.raises(ViewerError):
        Viewer(folder, dict(enumerate(FAMILIES["gemma3"].special)))
