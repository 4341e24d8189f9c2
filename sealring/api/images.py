"""Images in the parts of a message, as the APIs write them: data URLs, and base64 beside a media type.

Nothing is fetched: a server that opens the addresses that strangers name can be sent anywhere.
"""

from __future__ import annotations

import binascii
import re
from typing import Any

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.images import bad_image, check_size
from sealring.v1 import inference_pb2 as inference

_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,64}", re.IGNORECASE)
_LONGEST_HEAD = 256
"""Characters of a data URL before its base64."""

_DETAILS = ("low", "high", "auto", "original", None)

_Object = dict[str, Any]


def image_of(part: _Object, param: str) -> inference.Image | None:
    """The image that a part of a message shows; None for a part of another kind.

    Known are the parts of OpenAI's chat (`image_url`, `file`) and Responses (`input_image`, `input_file`),
    and Anthropic's `image`. Raises InvalidInput: BAD_IMAGE, IMAGE_TOO_LARGE, IMAGE_URL_REFUSED.
    """
    kind = part.get("type")
    if kind == "image_url":
        shown = part.get("image_url")
        shown = shown if isinstance(shown, dict) else {"url": shown}
        return _by_url(shown.get("url"), shown.get("detail", part.get("detail")), param)
    if kind == "input_image":
        return _by_url(part.get("image_url"), part.get("detail"), param)
    if kind == "image":
        return _by_source(part.get("source"), param)
    if kind in ("file", "input_file"):
        file = part.get("file") if kind == "file" else part
        data = file.get("file_data") if isinstance(file, dict) else None
        if isinstance(data, str) and data[:11].lower() == "data:image/":
            return _by_url(data, None, param)
    return None


def base64_part(data: Any) -> _Object:
    """The part for an image in base64 without a media type, as Ollama has it; data URLs are taken, too."""
    if isinstance(data, str) and data[:5].lower() == "data:":
        return {"type": "image_url", "image_url": {"url": data}}
    return {"type": "image", "source": {"type": "base64", "data": data}}


def _by_source(source: Any, param: str) -> inference.Image:
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "url":
        return _by_url(source.get("url"), None, param)
    media_type = source.get("media_type")
    if source.get("type") != "base64":
        raise bad_image(param, "its source is not base64", _HOW)
    if media_type is not None and not (isinstance(media_type, str) and _MEDIA_TYPE.fullmatch(media_type)):
        raise bad_image(param, "its media type is not an image's", _HOW)
    return inference.Image(data=_decoded(source.get("data"), param))


def _by_url(url: Any, detail: Any, param: str) -> inference.Image:
    if not isinstance(url, str) or not url:
        raise bad_image(param, "it has no data URL", _HOW)
    if detail not in _DETAILS:
        raise bad_image(param, "its detail is none of low, high and auto", "leave detail out")
    head, comma, _ = url[: _LONGEST_HEAD + 1].partition(",")
    if head[:5].lower() != "data:":
        raise InvalidInput(
            "images are not fetched from addresses",
            hint="send the image itself, as a data URL: data:image/png;base64,...",
            reason="IMAGE_URL_REFUSED",
            param=param,
        )
    media_type, *options = head[5:].split(";")
    if not comma or not _MEDIA_TYPE.fullmatch(media_type) or options[-1:] != ["base64"]:
        raise bad_image(param, "its data URL is not that of an image in base64", _HOW)
    return inference.Image(data=_decoded(url[len(head) + 1 :], param), low_detail=detail == "low")


_HOW = "send data:image/png;base64,... or another type of image"


def _decoded(data: Any, param: str) -> bytes:
    """The bytes of base64 (RFC 4648 section 4). Nothing is decoded of a text that is too long."""
    if not isinstance(data, str) or not data:
        raise bad_image(param, "it has no base64", _HOW)
    check_size(len(data) // 4 * 3 - 2, param)
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError:  # also for a character outside ASCII
        raise bad_image(
            param, "its base64 is malformed", "leave out line breaks, and keep its padding"
        ) from None
