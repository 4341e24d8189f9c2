"""A model's chat template in a process of its own (`node/engine/text/template.py`), started by the front.

A template is a program that came with a model, and may run or grow without end. There it has so many seconds
and so much memory, and takes nothing with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from sealring.mesh.errors import InvalidInput, ModelError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's, but that a call's arguments are an object."""

SECONDS = 5
"""Of a processor, for each chat."""

WALL_SECONDS = 60.0
"""For each chat, however busy the machine is: a child that is stopped, or waits, needs no processor."""

MEMORY_BYTES = 1 << 30
"""Address space; not every system holds a process to it."""

_ANSWER_BYTES = 64 << 20
_PART_BYTES = 1 << 16


class RenderingProcess:
    """As ChatTemplate, which runs in the child; it is started again when it has come to its limits.

    Raises ModelError: CHAT_TEMPLATE_CORRUPT, or CHAT_TEMPLATE_ENDLESS where the shortest chat is too much.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._first = {"source": source, "variables": dict(variables)}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(InvalidInput):
            if self._ask({"messages": [{"role": "user", "content": "x"}]}) is None:
                raise ModelError(
                    f"the chat template does not come to an end in {SECONDS} s, or takes too much memory",
                    reason="CHAT_TEMPLATE_ENDLESS",
                    hint="look at the chat template in the model's folder",
                )

    def render(
        self, messages: Messages, tools: Tools = (), arguments: Mapping[str, Any] | None = None
    ) -> str:
        """Raises InvalidInput (CHAT_TEMPLATE_REFUSED), without the template's own words, which may quote."""
        text = self._ask({"messages": messages, "tools": tools, "arguments": arguments})
        if text is None:
            raise refused(f"it has {SECONDS} s for them")
        return text

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._end()

    def _ask(self, chat: Mapping[str, Any]) -> str | None:
        """None where the child came to its limits."""
        with self._lock:
            try:
                child = self._child or self._start()
                answer = _exchange(child, chat)
            except (OSError, ValueError):
                self._end()
                return None
        if "refused" in answer:
            raise refused()
        text: str = answer["text"]
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        """Raises ModelError, OSError."""
        command = [
            sys.executable,
            "-P",
            "-m",
            "sealring.node.engine.text.template",
            str(SECONDS),
            str(MEMORY_BYTES),
        ]
        child = subprocess.Popen(  # noqa: S603  # our own module
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._child = child
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)  # a part of a long chat is written, not waited for
        answer = _exchange(child, self._first)
        if "corrupt" in answer:
            self._end()
            raise ModelError(
                answer["corrupt"],
                reason="CHAT_TEMPLATE_CORRUPT",
                hint="download or convert the model again",
            )
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def refused(why: str = "") -> InvalidInput:
    """The error for messages that a template does not take."""
    return InvalidInput(
        "the model's chat template refuses these messages",
        reason="CHAT_TEMPLATE_REFUSED",
        hint=why or "many want user and assistant in turns, beginning with user, and some no system message",
        param="messages",
    )


def _exchange(child: subprocess.Popen[bytes], message: object) -> dict[str, Any]:
    """Raises ValueError or OSError where the child ends, as it does when its time is up, and TimeoutError.

    No thread keeps the time: at the end of memory Python waits for ever for one that could not begin.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    until = time.monotonic() + WALL_SECONDS
    unsent = memoryview(json.dumps(message).encode() + b"\n")
    while unsent:
        _wait(child.stdin.fileno(), select.POLLOUT, until)
        unsent = unsent[os.write(child.stdin.fileno(), unsent) :]
    line = bytearray()
    while not line.endswith(b"\n"):
        _wait(child.stdout.fileno(), select.POLLIN, until)
        part = os.read(child.stdout.fileno(), _PART_BYTES)
        line += part
        if not part or len(line) > _ANSWER_BYTES:
            raise ValueError
    answer: dict[str, Any] = json.loads(line)
    return answer


def _wait(descriptor: int, event: int, until: float) -> None:
    """Raises TimeoutError, an OSError."""
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(until - time.monotonic(), 0) * 1000):
        raise TimeoutError
