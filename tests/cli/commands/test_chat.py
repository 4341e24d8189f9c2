"""Whom `sealring chat` talks to when nobody said it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from sealring.cli.calls import conversation
from sealring.cli.calls.client import Answer, Question
from sealring.cli.commands import chat
from sealring.cli.local.leftovers import temporary_folder
from sealring.cli.settings import CliSettings
from sealring.mesh.errors import InvalidInput
from sealring.mesh.settings.config import Loaded
from sealring.mesh.system.lock import lock_state
from sealring.mesh.system.paths import default_state_root


@pytest.fixture(autouse=True)
def nobody_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "listens", lambda host, port: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def found(origin: str = "default") -> str:
    loaded: Any = Loaded(CliSettings(), {"gateway": origin})
    return chat._gateway(loaded)[0]


def demo(stack: ExitStack, port: int) -> None:
    folder = stack.enter_context(temporary_folder())
    (folder / "ports.json").write_text(json.dumps({"gateway": port}))


def test_a_running_demo_is_found() -> None:
    assert found() == "127.0.0.1:7780"
    with ExitStack() as stack:
        demo(stack, 4711)
        assert found() == "127.0.0.1:4711"
        assert found(origin="flag --gateway") == "127.0.0.1:7780"
        demo(stack, 4712)
        with pytest.raises(InvalidInput, match="4711") as caught:
            found()
        assert "127.0.0.1:4712" in caught.value.hint
    assert found() == "127.0.0.1:7780"


def test_the_users_own_cluster_comes_before_whoever_took_the_default_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chat, "listens", lambda host, port: True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "")
    with lock_state(default_state_root()):
        (default_state_root() / "ports.json").write_text(json.dumps({"gateway": 4713}))
        assert found() == "127.0.0.1:4713"
        assert found(origin="flag --gateway") == "127.0.0.1:7780"
    assert found() == "127.0.0.1:7780"


def test_who_is_at_the_default_address_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "listens", lambda host, port: port == 7780)
    with ExitStack() as stack:
        demo(stack, 4711)
        assert found() == "127.0.0.1:7780"


class Client:
    """A gateway's client that answers Paris, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    @asynccontextmanager
    async def open(self, address: str, **access: Any) -> AsyncIterator[Self]:
        self.asked.append((address, access))
        yield self

    async def ask(self, question: Question, on_text: Any, *, seconds: float) -> Answer:
        self.asked.append((list(question.messages), question.model, question.max_tokens, question.min_trust))
        on_text("Par\x1b[2Jis\t.\n")
        return Answer("Paris.", "demo", "r", 20, 5, 7, 0.125, 40.0, "stop")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client()
    monkeypatch.setattr("sealring.cli.calls.client.inference", made.open)
    return made


def test_an_answer_is_shown_as_it_comes_without_what_steers_a_terminal(here: Any, client: Client) -> None:
    done = here("chat", "hi", "--gateway", "h:1")
    assert (done.status, done.out) == (0, "Par[2Jis\t.\n\n")
    assert done.err == "(7 tokens, 0.12 s to the first, 40 per second)\n"
    assert client.asked == [
        ("h:1", {"credentials": None, "api_key": None}),
        ([("user", "hi")], "", 0, 0),
    ]
    client.asked.clear()
    options = ("--system", "be brief", "--model", "m", "--max-tokens", "3", "--min-trust", "hardware")
    done = here("chat", "hi", "--gateway", "h:1", "--json", *options)
    assert (done.err, done.data["answer"], done.data["min_trust"]) == ("", "Paris.", "self_signed")
    assert "text" not in done.data
    assert client.asked[1] == ([("system", "be brief"), ("user", "hi")], "m", 3, 30)


def test_without_a_question_it_is_a_conversation(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(conversation, "converse", lambda *what, **how: begun.append((what, how)))
    assert here("chat", "--gateway", "h:1", "--system", "be brief").status == 0
    (((address, _access, first, show), how),) = begun
    assert (address, first.messages, show, how) == (
        "h:1",
        [("system", "be brief")],
        chat.write_piece,
        {"seconds": 3600.0},
    )
    for options in (("--json",), ("--logprobs", "1"), ("--logprobs", "0")):
        refused = here("chat", "--gateway", "h:1", *options)
        assert (refused.status, "[BAD_QUESTION]" in refused.err) == (2, True)
    assert len(begun) == 1


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("question", "status"), [("12345", 0), ("123456", 2), ("", 2)])
def test_a_question_is_so_long_at_most_and_not_empty(
    here: Any, monkeypatch: pytest.MonkeyPatch, typed: bool, question: str, status: int
) -> None:
    asked: list[str] = []

    async def once(gateway: Any, first: Any, question: str, *, as_json: bool) -> None:
        asked.append(question)

    monkeypatch.setattr(chat, "_once", once)
    monkeypatch.setattr(chat, "_gateway", lambda loaded: ("127.0.0.1:1", {}))
    monkeypatch.setattr(chat, "_MAX_LINE", 5)
    done = here("chat", "-" if typed else question, stdin=question if typed else "")
    assert done.status == status
    assert asked == ([question] if status == 0 else [])
    assert ("BAD_QUESTION" in done.err) == (status == 2)


@pytest.mark.parametrize(("typed", "asked"), [(" hi \n", ["hi"]), ("hi    there", []), ("     \n", [])])
def test_a_question_is_not_cut_at_a_blank(
    here: Any, client: Client, monkeypatch: pytest.MonkeyPatch, typed: str, asked: list[str]
) -> None:
    monkeypatch.setattr(chat, "_MAX_LINE", 5)
    done = here("chat", "-", "--gateway", "h:1", stdin=typed)
    assert done.status == (0 if asked else 2)
    assert [one[0][0][1] for one in client.asked[1:]] == asked


@pytest.mark.parametrize(("size", "status"), [(1 << 20, 0), ((1 << 20) + 1, 2)])
def test_a_question_of_a_file_is_a_mebibyte_at_most(
    here: Any, client: Client, size: int, status: int
) -> None:
    assert here("chat", "-", "--gateway", "h:1", stdin="x" * size).status == status
    assert [len(asked[0][0][1]) for asked in client.asked[1:]] == [size] * (status == 0)
