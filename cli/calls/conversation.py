"""A conversation line by line: Ctrl-C stops an answer and not the conversation, a full context forgets."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from sealring.cli.calls.asking import Asker, Question, Target, read_image
from sealring.cli.terminal.output import say
from sealring.mesh.errors import InvalidInput, SealringError

if TYPE_CHECKING:
    from sealring.client.question import Content

MAX_LINE = 1 << 20

_TOO_LONG = frozenset({"CONTEXT_TOO_LONG", "TOO_LARGE_FOR_RING"})
_CLEAR, _EXIT, _HELP, _IMAGE, _MODEL = "/clear", "/exit", "/help", "/image", "/model"
_COMMAND = re.compile(r"/[a-z]+\Z")
_COMMANDS = f"""\
{_CLEAR}  forget what was said and begin again
{_EXIT}   leave, as Ctrl-D does
{_HELP}   show this
{_IMAGE}  show a picture with the next question: {_IMAGE} FILE
{_MODEL}  ask this model from now on: {_MODEL} NAME
Ctrl-C stops an answer, or drops what is typed; the arrow keys edit the line and fetch earlier ones"""


def converse(
    target: Target,
    opened: AbstractAsyncContextManager[Asker],
    base: Question,
    show: Callable[[str], None],
    images: Sequence[bytes] = (),
) -> None:
    """Asks `opened`, which leads to `target`, each line that the user types, until Ctrl-D or /exit.

    `base` has the model, the options and the messages before the first line; `show` gets the answers' pieces.
    `images` are shown with the first line.

    Lines are read and Ctrl-C is caught in the main thread, between the runs of the event loop.
    """
    way = "in clear" if target.pin is None else "sealed"
    addresses = " or ".join(target.addresses)
    say(f"talking to {addresses}, {way}; Ctrl-C stops an answer, Ctrl-D ends it, /help lists the rest")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        asker = runner.run(stack.enter_async_context(opened))
        conversation = Conversation(runner, asker, base, show, images)
        try:
            while (line := read_line()) is not None:
                if line == _EXIT:
                    break
                conversation.take(line)
        finally:
            runner.run(stack.aclose())


class Conversation:
    """The messages of a conversation, without the oldest if they do not fit the context."""

    def __init__(
        self,
        runner: asyncio.Runner,
        asker: Asker,
        base: Question,
        show: Callable[[str], None],
        images: Sequence[bytes] = (),
    ) -> None:
        """`images` are shown with the first question."""
        self._runner = runner
        self._asker = asker
        self._base = base
        self._show = show
        self._said: list[tuple[str, Content]] = []
        self._images = list(images)

    def take(self, line: str) -> None:
        """A line that was typed: a command, a question, or nothing."""
        if line == _CLEAR:
            self._said.clear()
            self._images.clear()
            say("(a new conversation)")
        elif line.startswith(f"{_IMAGE} "):
            self._attach(line.removeprefix(_IMAGE))
        elif line.startswith(f"{_MODEL} "):
            self._base = replace(self._base, model=line.removeprefix(_MODEL).strip())
            say(f"(from now on {self._base.model} is asked)")
        elif _COMMAND.match(line):
            if line != _HELP:
                say(f"there is no {line}")
            say(_COMMANDS)
        elif line:
            self.turn(line)

    def _attach(self, named: str) -> None:
        """Shows files with the next question; names with blanks are quoted as in a shell."""
        try:
            images = [read_image(file) for file in shlex.split(named)]
        except (InvalidInput, ValueError) as error:
            say(f"error: {error}")
            return
        self._images += images
        say(f"(the next question shows {len(self._images)} picture{'s' * (len(self._images) > 1)})")

    def turn(self, line: str) -> None:
        """One question and its answer; both are kept if any of the answer came and no error ended it."""
        if len(line) > MAX_LINE:
            say(f"error: the question is longer than {MAX_LINE} characters")
            return
        images, self._images = self._images, []
        asked: list[tuple[str, Content]] = [*self._said, ("user", (*images, line) if images else line)]
        try:
            text = self._ask(asked)
            while text is None:
                asked = asked[2:]  # the oldest question and its answer
                say("(the conversation does not fit any more: its oldest question is left out)")
                text = self._ask(asked)
        except SealringError as error:
            say(f"error: {error} [{error.reason}]")
            return
        if text:
            self._said = [*asked, ("assistant", text)]

    def _ask(self, messages: list[tuple[str, Content]]) -> str | None:
        """The answer as far as it was shown, without reasoning, or None when older messages stand in its way.

        Raises SealringError.
        """
        pieces: list[str] = []
        shown = False

        def show(text: str) -> None:
            nonlocal shown
            shown = True
            self._show(text)

        def take(text: str) -> None:
            pieces.append(text)
            show(text)

        question = replace(self._base, messages=[*self._base.messages, *messages])
        try:
            answer = self._runner.run(self._asker.ask(question, take, on_reasoning=show))
        except KeyboardInterrupt:
            say("\n(stopped)")
            return "".join(pieces)
        except SealringError as error:
            if shown:
                self._show("\n")
            if error.reason in _TOO_LONG and len(messages) > 1:
                return None
            raise
        self._show("\n")
        if answer.finish == "length":
            say("(cut: no more tokens were allowed, or fit)")
        return answer.text


def read_line() -> str | None:
    """The next line, stripped, or None at its end (Ctrl-D). Ctrl-C drops what was typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines and keeps a history with it
    while True:
        try:
            return _line().strip()
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            say("\n(Ctrl-D ends it, /help lists the rest)")


def _line() -> str:
    """Raises EOFError."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    if sys.stdin.isatty():  # the answers go elsewhere, so the prompt must not go there
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline(MAX_LINE + 2)
    if not line:
        raise EOFError
    return line
