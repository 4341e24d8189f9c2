import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

FOLDER = Path(__file__).parents[2] / "examples" / "seeing_model"
MODEL = FOLDER / "model"


def test_folder_is_small_and_holds_no_code() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 20 * 2**20
    assert {path.suffix for path in files} == {".json", ".safetensors", ".png"}


def test_pictures_show_what_the_answers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import pictures

    for seed in range(60):
        random = Random(seed)
        size = random.choice(pictures.SIZES)
        shapes = pictures.shapes_of(random, size)
        drawn = np.asarray(pictures.draw(shapes, size, (255, 255, 255))).reshape(-1, 3).tolist()
        assert {pictures.COLOURS[shape.colour] for shape in shapes} <= set(map(tuple, drawn))
        assert all(f"{shape.colour} {shape.kind}" in pictures.described(shapes) for shape in shapes)


def test_the_demos_picture_is_small_and_the_score_is_of_held_out_pictures() -> None:
    with Image.open(MODEL / "shapes.png") as picture:
        assert picture.size == (96, 96)
    score = json.loads((FOLDER / "score.json").read_text())
    assert score["right"] / score["asked"] == pytest.approx(score["score"], abs=1e-3)
