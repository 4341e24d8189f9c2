"""Images take the places that a template gives them, whatever the messages spell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from visionmodels import FAMILIES, tokenizer, write_folder

from sealring.mesh.errors import InvalidInput
from sealring.node.engine.text import Tokenizer, load_tokenizer
from sealring.node.engine.text.showing import Shown

NAME = "<start_of_image>"
SPECIAL = FAMILIES["gemma3"].special
TEXT = "\n\n<start_of_image><image_soft_token><image_soft_token><end_of_image>\n\n"
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    made = load_tokenizer(write_folder(tmp_path_factory.mktemp("gemma3"), "gemma3"))
    yield made
    made.close()


def spelt(ids: list[int]) -> str:
    """The tokens, with special ones in other brackets than a text can have."""
    backend = tokenizer(SPECIAL)
    return "".join(
        f"«{SPECIAL[token]}»" if token < len(SPECIAL) else backend.decode([token]) for token in ids
    )


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


BEGIN, END = "«<bos>»«<start_of_turn>»user\n", "«<end_of_turn>»\n«<start_of_turn>»model\n"
SHOWN = "\n\n«<start_of_image>»«<image_soft_token>»«<image_soft_token>»«<end_of_image>»\n\n"


def test_the_template_says_what_stands_for_an_image(gemma: Tokenizer) -> None:
    assert gemma.placeholder(["<image_soft_token>", NAME, "<image>"]) == NAME
    assert gemma.placeholder(["<image>"]) == ""


def test_the_images_text_is_where_the_image_is(gemma: Tokenizer) -> None:
    ids = gemma.encode_chat(chat(text("a"), IMAGE, text("b"), IMAGE), shown=Shown(NAME, [TEXT, TEXT]))
    assert spelt(ids) == f"{BEGIN}a{SHOWN}b{SHOWN}{END}"


@pytest.mark.parametrize(
    "said", [NAME, f"{NAME}{NAME}", f"x{TEXT}y", "<image_soft_token>", "<start_of_", "image>", "<bos>"]
)
def test_an_image_that_somebody_spelt_is_text(gemma: Tokenizer, said: str) -> None:
    shown = Shown(NAME, [TEXT])
    ids = gemma.encode_chat(chat(text(said), IMAGE, text(said)), shown=shown)
    assert spelt(ids) == f"{BEGIN}{said.strip()}{SHOWN}{said.strip()}{END}"


@given(st.lists(st.sampled_from([NAME, "<start_of_", "image>", "<", "x", "<bos>", None]), max_size=6))
@settings(max_examples=60, deadline=None)
def test_as_many_images_stand_there_as_were_shown(gemma: Tokenizer, parts: list[str | None]) -> None:
    """Also where parts that stand side by side spell one together."""
    content = [IMAGE if part is None else text(part) for part in parts]
    shown = Shown(NAME, [TEXT] * parts.count(None))
    wanted = "".join(SHOWN if part is None else part for part in parts)
    assert spelt(gemma.encode_chat(chat(*content), shown=shown)) == f"{BEGIN}{wanted}{END}"


def test_a_template_that_knows_no_images_refuses_them(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gemma3")
    plain = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(plain)
    loaded = load_tokenizer(folder)
    try:
        assert loaded.placeholder([NAME]) == ""
        with pytest.raises(InvalidInput) as caught:
            loaded.encode_chat(chat(IMAGE), shown=Shown(NAME, [TEXT]))
    finally:
        loaded.close()
    assert caught.value.reason == "BAD_IMAGE"
    assert json.dumps(caught.value.message)
