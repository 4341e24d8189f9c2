"""The scripted model that sees, which `make clients` serves, by its script and by pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image
from scriptedmodel import LOOK, QUESTION, Scene, Step, write_scripted
from shownpictures import SEEN

from sealring.node.engine import load_lazily
from sealring.node.engine.staging.anatomy import full_cache
from sealring.node.engine.staging.splicing import embedded, embedding_of
from sealring.node.engine.text import Picture, Tokenizer, load_tokenizer
from sealring.node.engine.vision.tower import load_tower

SAID = "I have drawn the plan, and look at it now."
FIRST_SAID = 2
"""The number of a script's first answer, behind those without a scene."""

LONGEST = 40
"""Tokens of an answer, at most."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    write_scripted(made, [Scene("draw", "read", [Step(SAID), Step(LOOK)])], sees=True)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[Tokenizer]:
    made = load_tokenizer(folder, chats=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def answer(folder: Path, tokenizer: Tokenizer) -> Callable[..., str]:
    """What the model says greedily behind a text, in which the rows of a picture may stand for images."""
    model: Any = load_lazily(folder)[0]
    (end,) = tokenizer.encode_markers("<|end|>")

    def said(text: str, rows: mx.array | None = None) -> str:
        tokens, cache = tokenizer.encode_markers(text), full_cache(model)
        made = embedding_of(model)(mx.array([tokens]))
        if rows is not None:
            (image,) = tokenizer.encode_markers("<|image|>")
            made[0, mx.array([at for at, token in enumerate(tokens) if token == image])] = rows
        logits, told = model(mx.array([tokens]), cache=cache, input_embeddings=made), list[int]()
        while (token := int(np.argmax(np.array(logits[0, -1])))) != end:
            told.append(token)
            assert len(told) < LONGEST
            logits = model(mx.array([[token]]), cache=cache)
        return b"".join(map(tokenizer.spelling, told)).decode()

    return said


def test_it_says_what_its_script_says(answer: Callable[..., str]) -> None:
    assert answer(f"<|begin|><|user|>draw<|end|><|assistant|><|say_{FIRST_SAID}|>") == SAID


@pytest.mark.parametrize(("file", "seen"), SEEN.items(), ids=SEEN.values())
def test_it_sees_what_the_bundled_model_sees(
    file: bytes, seen: str, folder: Path, answer: Callable[..., str]
) -> None:
    pixels = np.asarray(Image.open(io.BytesIO(file)), np.float32) / 127.5 - 1  # of 96 x 96
    arrays = {"pixel_values": pixels.transpose(2, 0, 1)[None], "image_sizes": np.array([[96, 96]])}
    tower = load_tower(folder, *embedded(load_lazily(folder)[0]))
    assert tower is not None
    rows = tower.rows(Picture.of(0, 36, np.arange(36), b"", arrays)).embeddings
    shown = "<|image_break|>".join(["<|image|>" * 6] * 6)
    assert answer(f"<|begin|><|user|>{shown}<|image_end|>{QUESTION}<|end|><|assistant|>", rows) == seen
