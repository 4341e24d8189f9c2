"""`sealring logs`: the components of local clusters and services, by name, and as they grow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.here.leftovers import temporary_folder
from sealring.cli.service.logfiles import Tail, find_logs


@pytest.fixture(autouse=True)
def nothing_else_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def write(folder: Path, **logs: str) -> Path:
    (folder / "logs").mkdir(parents=True)
    for name, text in logs.items():
        (folder / "logs" / f"{name.replace('_', '-')}.log").write_text(text)
    (folder / "ports.json").write_text("{}")
    return folder


def test_running_clusters_are_found() -> None:
    assert find_logs(None, []) == {}
    with ExitStack() as stack:
        first = write(stack.enter_context(temporary_folder()), gateway="")
        assert find_logs(None, []) == {"gateway": first / "logs" / "gateway.log"}
        second = write(stack.enter_context(temporary_folder()), gateway="")
        assert set(find_logs(None, ["gateway"])) == {f"{first.name}/gateway", f"{second.name}/gateway"}


def test_what_grows_is_followed_through_rotation(tmp_path: Path) -> None:
    file = tmp_path / "node.log"
    tail = Tail(file)
    assert list(tail.new()) == [], "it may come later"
    file.write_text("one\ntwo\nhal")
    assert tail.last(1) == ["two"]
    with file.open("a") as opened:
        opened.write("f\n")
    assert list(tail.new()) == ["half"]
    assert list(tail.new()) == [], "nothing has come"
    file.rename(tmp_path / "node.log.0")
    file.write_text("new\n")
    assert list(tail.new()) == ["new"]
    file.write_text("")
    assert list(tail.new()) == [], "truncated"


def test_where_nothing_runs_the_names_are_said(here: Any) -> None:
    said = here("logs", "--component", "node", "--component", "x").err
    assert "there is no log of node, x on this machine" in said
