"""`sealring logs`: the components of local clusters and services, by name, and as they grow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.local.leftovers import temporary_folder
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


def test_the_last_lines_of_each_component(here: Any, home: Path) -> None:
    write(home / "state", node_0="a\nb\nc\n", node_1="x\n", gateway="g\x1b[2J\n")
    shown = here("logs", "--state-dir", "state", "-n", "2")
    assert shown.out.splitlines() == ["gateway | g?[2J", "node-0  | b", "node-0  | c", "node-1  | x"]
    assert here("logs", "--state-dir", "state", "--component", "node-1").out == "x\n"
    assert here("logs", "--state-dir", "state", "--component", "node", "-n", "1").out.count("|") == 2
    nothing = here("logs", "--state-dir", "state", "--component", "nod")
    assert (nothing.status, "nod in state" in nothing.err) == (3, True)


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


def test_following_goes_on_until_ctrl_c(here: Any, host: Any, home: Path) -> None:
    file = write(home / "state", gateway="first\n") / "logs" / "gateway.log"

    def append(text: str) -> None:
        with file.open("a") as opened:
            opened.write(text)

    host.pauses = iter([lambda: append("second\n"), lambda: append("third\n"), None])
    done = here("logs", "--state-dir", "state", "--follow")
    assert (done.status, done.out) == (130, "first\nsecond\nthird\n")
    said = here("logs", "--component", "node", "--component", "x").err
    assert "there is no log of node, x on this machine" in said
