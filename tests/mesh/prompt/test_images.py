"""Bounds of images, and prompts with images for models that cannot see."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.images import (
    MAX_IMAGE_BYTES,
    MAX_IMAGES,
    MAX_IMAGES_BYTES,
    NOTE,
    has_images,
    images_size,
    just_asked,
    without_images,
)
from sealring.mesh.prompt.validate import validate_prompt
from sealring.v1 import inference_pb2 as inference


def message(role: str, content: str, *images: tuple[int, bytes]) -> inference.ChatMessage:
    shown = [inference.Image(at=at, data=data) for at, data in images]
    return inference.ChatMessage(role=role, content=content, images=shown)


def prompt(*messages: inference.ChatMessage) -> inference.Prompt:
    return inference.Prompt(chat=inference.Chat(messages=messages))


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(InvalidInput) as caught:
        call()
    return caught.value.reason, caught.value.metadata["param"]


def test_images_in_order_within_the_content_pass_and_alone_are_a_prompt() -> None:
    shown = prompt(message("user", "ab", (0, b"x"), (0, b"x"), (2, b"xy")), message("tool", "", (0, b"x")))
    validate_prompt(shown)
    assert (has_images(shown), images_size(shown)) == (True, 5)
    validate_prompt(prompt(message("user", "", (0, b"x"))))
    assert not has_images(prompt(message("user", "x")))


@pytest.mark.parametrize(
    ("shown", "param"),
    [
        ([message("user", "é", (2, b"x"))], "messages[0].images[0]"),
        ([message("user", "ab", (1, b"x"), (0, b"x"))], "messages[0].images[1]"),
        ([message("user", "x", (0, b""))], "messages[0].images[0]"),
        ([message("user", "x"), message("assistant", "x", (0, b"x"))], "messages[1].images[0]"),
        ([message("system", "x", (0, b"x")), message("user", "x")], "messages[0].images[0]"),
    ],
)
def test_an_image_out_of_place_is_refused(shown: list[inference.ChatMessage], param: str) -> None:
    assert refused(lambda: validate_prompt(prompt(*shown))) == ("BAD_IMAGE", param)


def test_the_bounds_of_one_image_of_all_and_of_their_number() -> None:
    largest = b"x" * MAX_IMAGE_BYTES
    most = [(0, largest)] * (MAX_IMAGES_BYTES // MAX_IMAGE_BYTES)
    validate_prompt(prompt(message("user", "", *most)))
    for images, param in (([(0, largest + b"x")], "images[0]"), ([*most, (0, b"x")], f"images[{len(most)}]")):
        made = prompt(message("user", "", *images))
        assert refused(lambda made=made: validate_prompt(made)) == ("IMAGE_TOO_LARGE", f"messages[0].{param}")
    many = [message("tool", "", *[(0, b"x")] * (MAX_IMAGES // 2)) for _ in range(2)]
    validate_prompt(prompt(*many))
    many.append(message("user", "", (0, b"x")))
    assert refused(lambda: validate_prompt(prompt(*many))) == ("TOO_MANY_IMAGES", "messages[2].images[0]")


@pytest.mark.parametrize(
    ("roles", "asked"),
    [
        (["user"], {0}),
        (["system", "user", "assistant", "user", "system"], {3, 4}),
        (["user", "assistant", "tool"], set()),
        (["user", "assistant", "tool", "user"], set()),
        (["user", "assistant"], set()),
    ],
)
def test_what_the_user_has_just_asked(roles: list[str], asked: set[int]) -> None:
    assert just_asked(roles) == asked


def test_a_model_that_cannot_see_reads_a_note_in_the_place_of_each_earlier_image() -> None:
    shown = prompt(
        message("user", "abcd", (0, b"x"), (2, b"y"), (2, b"z"), (4, b"x")),
        message("assistant", "no"),
        message("tool", "", (0, b"x")),
        message("user", "and now?"),
    )
    told = without_images(shown, "demo")
    assert [one.content for one in told.chat.messages] == [
        "\n".join([NOTE, "ab", NOTE, NOTE, "cd", NOTE]),
        "no",
        NOTE,
        "and now?",
    ]
    assert has_images(shown)
    assert not has_images(told)


def test_an_image_that_the_user_has_just_sent_is_refused_with_the_models_that_see() -> None:
    shown = prompt(message("user", "x"), message("user", "see", (3, b"x")))
    with pytest.raises(InvalidInput) as caught:
        without_images(shown, "demo", ["other", "eyes"])
    assert (caught.value.reason, caught.value.metadata["param"]) == (
        "MODEL_CANNOT_SEE",
        "messages[1].images[0]",
    )
    assert "demo cannot see" in str(caught.value)
    assert "eyes, other" in caught.value.hint
