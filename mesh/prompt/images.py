"""Images in prompts: their bounds, and what becomes of them where the model cannot see.

Nothing here looks into an image. One process at the head decodes them (node/engine/vision).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sealring.mesh.errors import FailedPrecondition, InvalidInput, SealringError
from sealring.mesh.system.extras import INSTALL_VISION

if TYPE_CHECKING:  # commands that show no image do without protobuf
    from sealring.v1 import inference_pb2 as inference

VISION = "vision"
"""The capability of a model that sees (mesh.prompt.tools.CAPABILITIES)."""

MAX_IMAGE_BYTES = 8 << 20
"""Size of one image's file. Agents send screenshots of 0.2 to 5 MB, and Anthropic's API takes 5 MB."""

MAX_IMAGES_BYTES = 24 << 20
"""Size of all files of a prompt: 32 MiB in base64, which is the longest request that Anthropic's API takes. A
conversation with 20 screenshots of 1 MB fits."""

MAX_IMAGES = 100
"""Images of a prompt, as in Anthropic's API."""

SHOWN_BY = ("user", "tool")
"""Roles whose messages may have images. OpenAI's and Anthropic's APIs refuse them elsewhere, too."""

NOTE = "[an image; this model reads text only]"
"""The text in the place of an earlier image, for a model that cannot see."""

_SHOWN_MODELS = 20


def has_images(prompt: inference.Prompt) -> bool:
    """Whether a prompt shows an image."""
    return any(message.images for message in prompt.chat.messages)


def images_size(prompt: inference.Prompt) -> int:
    """The bytes of all images of a prompt."""
    return sum(len(image.data) for message in prompt.chat.messages for image in message.images)


def check_images(messages: Sequence[inference.ChatMessage]) -> None:
    """Checks the number, the sizes and the places of images.

    Raises InvalidInput with `param`, which is `messages[M].images[N]`: BAD_IMAGE, IMAGE_TOO_LARGE,
    TOO_MANY_IMAGES.
    """
    count = size = 0
    for index, message in enumerate(messages):
        at = 0
        for number, image in enumerate(message.images):
            param = f"messages[{index}].images[{number}]"
            count, size = count + 1, size + len(image.data)
            if count > MAX_IMAGES:
                raise InvalidInput(
                    f"there are more than {MAX_IMAGES} images",
                    hint="leave out the oldest ones",
                    reason="TOO_MANY_IMAGES",
                    param=param,
                    limit=MAX_IMAGES,
                )
            check_size(len(image.data), param)
            if size > MAX_IMAGES_BYTES:
                raise too_large("all images together are", MAX_IMAGES_BYTES, param)
            if message.role not in SHOWN_BY:
                raise bad_image(param, f"it is in a message of {message.role[:16]}", _WHO)
            if not image.data:
                raise bad_image(param, "it is empty")
            if not at <= image.at <= len(message.content):
                raise bad_image(
                    param, "its place is not in the content, or before that of the last image", _WHERE
                )
            at = image.at


_WHO = "show images in messages of a user or of a tool"
_WHERE = "let the places of a message's images rise, up to the length of its content"


def check_size(size: int, param: str) -> None:
    """Raises InvalidInput (IMAGE_TOO_LARGE) for a file of `size` bytes that is too large."""
    if size > MAX_IMAGE_BYTES:
        raise too_large("the image is", MAX_IMAGE_BYTES, param)


def too_large(what: str, limit: int, param: str) -> InvalidInput:
    """The refusal of too many bytes; `what` is the sentence up to its verb."""
    return InvalidInput(
        f"{what} larger than {limit >> 20} MiB",
        hint="make it smaller, or leave out older ones",
        reason="IMAGE_TOO_LARGE",
        param=param,
        limit=limit,
    )


def bad_image(param: str, why: str, hint: str = "send a whole PNG, JPEG, WebP or GIF file") -> InvalidInput:
    """The refusal of an image that is malformed or out of place."""
    return InvalidInput(f"{param} is refused: {why}", hint=hint, reason="BAD_IMAGE", param=param)


def cannot_see(
    model: str, param: str = "", seeing: Iterable[str] | None = None, why: str = ""
) -> InvalidInput:
    """The refusal of an image by a model without a tower; `seeing` are models that have one, if all are
    known."""
    hint = "send text only, or ask a model that has the capability vision"
    if seeing is not None:
        hint += f": {', '.join(sorted(seeing)[:_SHOWN_MODELS]) or 'none is served here'}"
    return InvalidInput(
        f"{model or 'the model'} cannot see images{f'; {why}' if why else ''}",
        hint=hint,
        reason="MODEL_CANNOT_SEE",
        param=param or "messages",
    )


def vision_not_installed(model: str = "", param: str = "") -> FailedPrecondition:
    """The refusal of an image by a model that would see if its ring's head had what computes images."""
    return FailedPrecondition(
        f"the machine at the head of the ring lacks what {model or 'the model'} needs for images",
        hint=f"install it there, start its node again and deploy the model again: {INSTALL_VISION}",
        reason="VISION_NOT_INSTALLED",
        param=param or "messages",
    )


def just_asked(roles: Sequence[str]) -> set[int]:
    """The indices of the messages that the user has just asked with, by the roles of all messages.

    They are those behind the last assistant's, unless a tool has answered between them.
    """
    found = set[int]()
    for index in reversed(range(len(roles))):
        if roles[index] == "tool":
            return set()
        if roles[index] == "assistant":
            break
        found.add(index)
    return found


def without_images(
    prompt: inference.Prompt,
    model: str,
    seeing: Iterable[str] | None = None,
    *,
    not_installed: bool = False,
) -> inference.Prompt:
    """The prompt for a model that cannot see: NOTE stands in the place of each image.

    Raises InvalidInput (MODEL_CANNOT_SEE) for an image in what the user has just asked, or FailedPrecondition
    (VISION_NOT_INSTALLED) if that is why. Others are from a tool or from an earlier turn: the conversation
    could not go on if they were refused.
    """
    messages = prompt.chat.messages
    for index in sorted(just_asked([message.role for message in messages])):
        if messages[index].images:
            param = f"messages[{index}].images[0]"
            refusal: SealringError = cannot_see(model, param, seeing)
            raise vision_not_installed(model, param) if not_installed else refusal
    changed = type(prompt)()
    changed.CopyFrom(prompt)
    for message in changed.chat.messages:
        if message.images:
            message.content = _with_notes(message)
            del message.images[:]
    return changed


def _with_notes(message: inference.ChatMessage) -> str:
    """The content, with a line of its own for each image."""
    pieces, begin = list[str](), 0
    for image in message.images:
        pieces += [message.content[begin : image.at], NOTE]
        begin = max(begin, image.at)
    pieces.append(message.content[begin:])
    return "\n".join(filter(None, pieces))
