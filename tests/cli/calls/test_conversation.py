"""A conversation over a client that a test scripts: what is shown, said and remembered."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.calls.asking import Question
from sealring.cli.calls.conversation import MAX_LINE, Conversation, read_line
from sealring.mesh.errors import InvalidInput, Unavailable

TOO_LONG = InvalidInput("too long", reason="CONTEXT_TOO_LONG")


class Talk:
    """A scripted ring: for each question, pieces that are shown and then an end or an error."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.script: list[tuple[list[str], Any]] = []
        self.asked: list[list[tuple[str, str]]] = []
        self.shown = self.model = ""
        base = Question([("system", "be brief")])
        asker: Any = SimpleNamespace(ask=self.ask)
        self.conversation = Conversation(runner, asker, base, self.show)

    def show(self, text: str) -> None:
        self.shown += text

    async def ask(
        self,
        question: Question,
        show: Callable[[str], None],
        *,
        on_reasoning: Callable[[str], None],
    ) -> Any:
        self.asked.append(list(question.messages))
        self.model = question.model
        pieces, end = self.script.pop(0)
        told = [piece for piece in pieces if not piece.startswith("(thinks")]
        for piece in pieces:
            (show if piece in told else on_reasoning)(piece)
        if isinstance(end, BaseException):
            raise end
        return SimpleNamespace(text="".join(told), finish=end)

    def say(self, line: str, pieces: list[str], end: Any) -> None:
        self.script.append((pieces, end))
        self.conversation.take(line)


@pytest.fixture
def talk() -> Iterator[Talk]:
    with asyncio.Runner() as runner:
        yield Talk(runner)


def test_the_model_can_be_changed(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk.say("one", ["1"], "stop")
    assert talk.model == ""
    talk.conversation.take("/model demo-vision")
    assert "(from now on demo-vision is asked)" in capsys.readouterr().err
    talk.say("two", ["2"], "stop")
    assert talk.model == "demo-vision"
    assert ("user", "one") in talk.asked[1], "the conversation goes on"


def test_what_was_said_goes_with_the_next_question(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk.say("one", ["1"], "stop")
    talk.say("two", ["2", "2"], "length")
    assert talk.shown == "1\n22\n"
    assert talk.asked[1] == [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    assert capsys.readouterr().err == "(cut: no more tokens were allowed, or fit)\n"
    talk.conversation.take("/clear")
    talk.say("three", [], "stop")
    assert talk.asked[2][1:] == [("user", "three")]
    talk.say("four", ["4"], "stop")
    assert talk.asked[3][1:] == [("user", "four")], "nothing came of the one before"


@pytest.mark.parametrize(("pieces", "shown"), [(["ha", "lf"], "half\n"), ([], "")])
def test_an_answer_that_fails_ends_its_line_and_is_forgotten(
    talk: Talk, capsys: pytest.CaptureFixture[str], pieces: list[str], shown: str
) -> None:
    talk.say("one", pieces, Unavailable("the ring is gone", reason="RING_DOWN"))
    assert talk.shown == shown
    assert "error: the ring is gone" in capsys.readouterr().err
    talk.say("two", ["2"], "stop")
    assert talk.asked[1][1:] == [("user", "two")]


def test_reasoning_is_shown_and_never_kept(talk: Talk) -> None:
    talk.say("one", ["(thinks)", "half"], KeyboardInterrupt())
    talk.say("two", ["(thinks)"], KeyboardInterrupt())
    talk.say("three", ["(thinks)"], Unavailable("the ring is gone", reason="RING_DOWN"))
    talk.say("four", ["4"], "stop")
    assert talk.asked[3][1:] == [("user", "one"), ("assistant", "half"), ("user", "four")]
    assert talk.shown == "(thinks)half(thinks)(thinks)\n4\n"


def test_the_oldest_question_is_left_out_until_the_rest_fits(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        talk.say(f"q{number}", [f"a{number}"], "stop")
    talk.script.append(([], TOO_LONG))
    talk.say("last", ["x"], "stop")
    assert talk.asked[-1][1:] == [("user", "q1"), ("assistant", "a1"), ("user", "last")]
    assert capsys.readouterr().err.count("its oldest question is left out") == 1
    talk.conversation.take("/clear")
    talk.say("alone", [], TOO_LONG)
    assert "CONTEXT_TOO_LONG" in capsys.readouterr().err, "there is nothing to leave out"


def test_what_is_no_question_asks_nothing(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("", "/help", "/nothing", "x" * (MAX_LINE + 1)):
        talk.conversation.take(line)
    told = capsys.readouterr().err
    assert "there is no /nothing" in told
    assert "there is no /help" not in told
    assert told.count("forget what was said") == 2
    assert f"longer than {MAX_LINE} characters" in told
    assert talk.asked == []
    talk.say("x" * MAX_LINE, ["y"], "stop")
    talk.say("/Not a command", ["y"], "stop")
    assert len(talk.asked) == 2


class Terminal(io.StringIO):
    """A terminal at which somebody types Ctrl-C, and then a line."""

    interrupted = False

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return super().readline(size)


def test_the_prompt_is_not_where_the_answers_go(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(" one \n"))
    assert [read_line(), read_line()] == ["one", None]
    assert capsys.readouterr() == ("", "> \n(Ctrl-D ends it, /help lists the rest)\n> > \n")


def test_a_picture_is_shown_with_the_next_question_and_stays_in_the_conversation(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a b.png", "c.png"):
        (tmp_path / name).write_bytes(name.encode())
    talk.conversation.take(f"/image '{tmp_path}/a b.png'")
    talk.conversation.take(f"/image {tmp_path}/c.png")
    assert "shows 2 pictures" in capsys.readouterr().err
    talk.say("both?", ["yes"], "stop")
    talk.say("sure?", ["yes"], "stop")
    shown = ("user", (b"a b.png", b"c.png", "both?"))
    assert talk.asked == [
        [("system", "be brief"), shown],
        [("system", "be brief"), shown, ("assistant", "yes"), ("user", "sure?")],
    ]


def test_a_picture_that_cannot_be_read_is_named_and_clear_drops_others(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (f"{tmp_path}/none.png", f"{tmp_path}", "'", f"{tmp_path}/\0"):
        talk.conversation.take(f"/image {file}")
        assert "error: " in capsys.readouterr().err
    (tmp_path / "a.png").write_bytes(b"x")
    talk.conversation.take(f"/image {tmp_path}/a.png")
    talk.conversation.take("/clear")
    talk.say("hi", ["yes"], "stop")
    assert talk.asked == [[("system", "be brief"), ("user", "hi")]]
