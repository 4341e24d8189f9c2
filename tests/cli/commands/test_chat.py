"""Whom `sealring chat` talks to when nobody said it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize(("question", "status"), [("12345", 0), ("123456", 2), ("", 2)])
def test_a_question_is_so_long_at_most_and_not_empty(
    here: Any, monkeypatch: pytest.MonkeyPatch, typed: bool, question: str, status: int
) -> None:
    asked: list[str] = []

    async def once(gateway: Any, first: Any, question: str, *, as_json: bool) -> None:
        asked.append(question)

    monkeypatch.setattr(chat, "_MAX_LINE", 5)
    monkeypatch.setattr(chat, "_once", once)
    monkeypatch.setattr(chat, "_gateway", lambda loaded: ("127.0.0.1:1", {}))
    done = here("chat", "-" if typed else question, stdin=question if typed else "")
    assert done.status == status
    assert asked == ([question] if status == 0 else [])
    assert ("BAD_QUESTION" in done.err) == (status == 2)
