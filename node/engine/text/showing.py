"""Images in chats: a template writes a placeholder for each, and the text of the image takes its place.

Placeholders that somebody wrote into a message stay text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from sealring.mesh.errors import InvalidInput

MAX_WAITING_BYTES = 384 << 20
"""The images of all prompts that are not prefilled, as files, pixels or arrays."""

Write = Callable[[str], str]
"""Changes what the author wrote, wherever it stands in the prompt."""

_MARKS = range(0xF0000, 0xFFFFE)
"""Characters for private use, of a plane that node.engine.text.plaintext takes none of."""

PROBE: Sequence[dict[str, Any]] = (
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]},
)
"""The shortest chat with an image."""


class Shown(NamedTuple):
    """The images of a chat: what its template writes for each, and their texts in order."""

    placeholder: str
    texts: Sequence[str]

    def within(self, render: Callable[[Write], str], write: Write, written: str) -> str:
        """The chat as `render` makes it, with the images in it. `written` is all that its authors wrote.

        Raises InvalidInput (BAD_IMAGE) unless the template shows each image once, and what `render` raises.
        """
        parts = render(write).split(self.placeholder)
        if len(parts) > len(self.texts) + 1:  # an author spelt the placeholder
            mark = next(chr(code) for code in _MARKS if chr(code) not in written)
            first = self.placeholder[0]
            marked = render(lambda text: write(text).replace(first, first + mark))
            parts = [part.replace(mark, "") for part in marked.split(self.placeholder)]
        if len(parts) != len(self.texts) + 1:
            raise InvalidInput(
                "the model's chat template does not show the images of these messages",
                hint="show images in messages of the user",
                reason="BAD_IMAGE",
                param="messages",
            )
        return "".join(chain.from_iterable(zip(parts, (*self.texts, ""), strict=True)))


def placeholder(render: Callable[[Sequence[dict[str, Any]]], str], known: Sequence[str]) -> str:
    """The first of the `known` texts that a template writes for an image; empty if it knows no images."""
    try:
        rendered = render(PROBE)
    except InvalidInput:
        return ""
    return next((one for one in known if rendered.count(one) == 1), "")
