"""A model's chat template in processes of their own (`node/engine/text/template.py`), started by the front.

A template is a program that came with a model, and may run or grow without end. There it has limits of
seconds and memory, and takes nothing with it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sealring.mesh.errors import InvalidInput, ModelError
from sealring.node.engine.answers import text_in
from sealring.node.engine.helper import LINE_BYTES, Helpers, OverLimitsError

MOST_BYTES = 24 << 20
"""A rendered chat has as much at most. The gateway takes prompts of 4 MiB."""

_MOST_CHARACTERS = 200

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's, but that a call's arguments are an object."""

SECONDS = 2
"""Processor time for each chat; one of 4 MB takes 0.1 s."""

MOST = 8
"""Chats that are rendered at once: more than threads read prompts, so none waits for another."""

ADDRESS_BYTES = 1 << 30
"""Address space, where the system holds a process to it: a string of gigabytes is never begun there."""


class RenderingProcess:
    """As ChatTemplate, which runs in children: as many as there are chats at once.

    Raises ModelError: CHAT_TEMPLATE_CORRUPT, or CHAT_TEMPLATE_ENDLESS where the shortest chat is too much.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], with_tools: str = "") -> None:
        self._children = Helpers(
            "sealring.node.engine.text.template",
            str(SECONDS),
            str(ADDRESS_BYTES),
            first={"source": source, "variables": dict(variables), "with_tools": with_tools},
            most=MOST,
            begun=_check,
            data=MOST_BYTES,
        )
        try:
            self._children.prepare()
            with contextlib.suppress(InvalidInput):
                self._ask({"messages": [{"role": "user", "content": "x"}]})
        except OverLimitsError:
            raise ModelError(
                f"the chat template does not come to an end in {SECONDS} s, or takes too much memory",
                reason="CHAT_TEMPLATE_ENDLESS",
                hint="look at the chat template in the model's folder",
            ) from None

    def render(
        self, messages: Messages, tools: Tools = (), arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Raises InvalidInput (CHAT_TEMPLATE_REFUSED), without the template's own words, which may quote, and
        Unavailable (NO_PROCESS, NO_ANSWER)."""
        try:
            return self._ask({"messages": messages, "tools": tools, "arguments": arguments})
        except OverLimitsError:
            raise refused(f"rendering took more than {SECONDS} s or more than its memory") from None

    def render_all(self, chats: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """The texts of several short chats, in the time of one; None for each that is refused."""

        def read(answer: Mapping[str, Any]) -> list[str | None]:
            if len(answer["data"]) > LINE_BYTES:
                raise ValueError
            texts = json.loads(bytes(answer["data"]))
            if len(texts) != len(chats) or not all(text is None or isinstance(text, str) for text in texts):
                raise ValueError
            return list(texts)

        try:
            return self._children.ask({"chats": chats}, read)
        except OverLimitsError:
            return [None] * len(chats)

    def close(self) -> None:
        """Ends the children that are idle, and each other one when it has answered."""
        self._children.close()

    def _ask(self, chat: Mapping[str, Any]) -> str:
        return self._children.ask(chat, _read)


def _read(answer: Mapping[str, Any]) -> str:
    if answer.get("refused") is True:
        raise refused()
    return str(answer["data"], "utf-8", "surrogatepass")


def _check(answer: Mapping[str, Any]) -> None:
    if "corrupt" in answer:
        raise ModelError(
            text_in(answer, "corrupt", _MOST_CHARACTERS),
            reason="CHAT_TEMPLATE_CORRUPT",
            hint="download or convert the model again",
        )


def refused(why: str = "") -> InvalidInput:
    """The error for messages that a template does not take."""
    return InvalidInput(
        "the model's chat template refuses these messages",
        reason="CHAT_TEMPLATE_REFUSED",
        hint=why or "many want user and assistant in turns, beginning with user, and some no system message",
        param="messages",
    )
