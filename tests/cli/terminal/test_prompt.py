"""Lines that somebody types, or that come from a file."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sealring.cli.terminal import prompt
from sealring.cli.terminal.prompt import read_line


class Terminal(io.StringIO):
    """Standard input that is a terminal or is not; None among its lines is a Ctrl-C."""

    def __init__(self, *lines: str | None, tty: bool = False) -> None:
        super().__init__()
        self.lines, self.tty = list(lines), tty

    def isatty(self) -> bool:
        return self.tty

    def readline(self, size: int | None = -1, /) -> str:
        assert size == (1 << 20) + 2, "a line of no end is not read whole"
        line = self.lines.pop(0) if self.lines else ""
        if line is None:
            raise KeyboardInterrupt
        return line


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def given(*lines: str | None, tty: bool = False) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(*lines, tty=tty))

    return given


def test_lines_of_a_file_come_without_a_prompt(typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed(" one \n", "\n", "two")
    assert [read_line() for _ in range(4)] == ["one", "", "two", None]
    assert capsys.readouterr() == ("", "\n"), "the shell's next prompt begins a line"
    typed("x", None)
    read_line()
    with pytest.raises(KeyboardInterrupt):
        read_line()


def test_the_prompt_is_not_where_the_answers_go(
    typed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(None, "one\n", tty=True)
    assert read_line() == "one"
    assert capsys.readouterr() == ("", "> \n(Ctrl-D ends it, /help lists the rest)\n> ")
    did: list[str] = []
    error = SimpleNamespace(write=did.append, flush=lambda: did.append("shown"))
    monkeypatch.setattr(sys, "stderr", error)
    typed("one\n", tty=True)
    assert (read_line(), did) == ("one", ["> ", "shown"])


def test_a_file_is_read_as_one_though_the_answers_go_to_a_terminal(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    typed("one\n")
    assert (read_line(), capsys.readouterr()) == ("one", ("", ""))


def test_a_terminal_edits_lines(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(tty=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    monkeypatch.setattr(prompt, "input", lambda text: asked.append(text) or " one ", raising=False)
    assert read_line() == "one"
    assert asked == ["> "]
    assert capsys.readouterr().err == ""
