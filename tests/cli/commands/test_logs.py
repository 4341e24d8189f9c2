"""`sealring logs`: the components of local clusters and services, by name, and as they grow."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sealring.cli.commands import logs
from sealring.cli.local.leftovers import temporary_folder
from sealring.cli.service import logfiles
from sealring.cli.service.logfiles import Tail, find_logs
from sealring.mesh.errors import PermissionDenied


@pytest.fixture(autouse=True)
def nothing_else_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(logfiles, "COMPONENTS", ())


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


def test_running_clusters_and_services_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_logs(None, []) == {}
    with ExitStack() as stack:
        first = write(stack.enter_context(temporary_folder()), gateway="")
        assert find_logs(None, []) == {"gateway": first / "logs" / "gateway.log"}
        second = write(stack.enter_context(temporary_folder()), gateway="")
        assert set(find_logs(None, ["gateway"])) == {f"{first.name}/gateway", f"{second.name}/gateway"}
    file = tmp_path / "node.log"
    file.write_text("")
    monkeypatch.setattr(logfiles, "COMPONENTS", ("node", "gateway"))
    monkeypatch.setattr(
        "sealring.cli.service.launchd.Service.log_file",
        property(lambda self: str(tmp_path / f"{self.component}.log")),
    )
    assert find_logs(None, ["node"]) == {"service node": file}


def test_a_log_of_somebody_elses_needs_more_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", closed)
    with pytest.raises(PermissionDenied) as refused:
        Tail(tmp_path / "node.log").last(1)
    assert refused.value.reason == "NEEDS_ROOT"


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


def test_files_are_not_looked_at_all_the_time(here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    logs.pause()
    assert slept == [0.5]
    assert "there is no log of any component on this machine" in here("logs").err
    assert (
        "there is no log of node, x on this machine"
        in here("logs", "--component", "node", "--component", "x").err
    )


def test_following_goes_on_until_ctrl_c(here: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(home / "state", gateway="first\n") / "logs" / "gateway.log"
    later = iter(["second\n", "third\n"])

    def pause() -> None:
        text = next(later, None)
        if text is None:
            raise KeyboardInterrupt
        with file.open("a") as opened:
            opened.write(text)

    monkeypatch.setattr(logs, "pause", pause)
    done = here("logs", "--state-dir", "state", "--follow")
    assert (done.status, done.out) == (130, "first\nsecond\nthird\n")
