"""What processes are kept from, in this one; what that saves them is in tests/cli and tests/node."""

from __future__ import annotations

import asyncio
import atexit
import gc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from sealring.mesh.system.lean import collect_seldom, defer_asyncio, hide_rich, show_rich


def test_rich_is_hidden_and_shown_unless_somebody_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rich", raising=False)
    show_rich()
    assert "rich" not in sys.modules
    hide_rich()
    hide_rich()
    with pytest.raises(ImportError):
        importlib.import_module("rich")
    show_rich()
    assert "rich" not in sys.modules
    there = ModuleType("rich")
    monkeypatch.setitem(sys.modules, "rich", there)
    hide_rich()
    show_rich()
    assert sys.modules["rich"] is there


def test_asyncio_is_run_when_a_name_in_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defer_asyncio()
    assert sys.modules["asyncio"] is asyncio, "who has it keeps it"
    (tmp_path / "other.py").write_text("def run(): return 7\n")
    spec = importlib.util.spec_from_file_location("asyncio", tmp_path / "other.py")
    monkeypatch.setattr(importlib.util, "find_spec", {"asyncio": spec}.get)
    monkeypatch.delitem(sys.modules, "asyncio")
    defer_asyncio()
    deferred = sys.modules["asyncio"]
    assert not hasattr(deferred, "__all__"), "what only looks at it does not run it"
    assert "run" not in vars(deferred)
    assert deferred.run() == 7
    assert not hasattr(deferred, "no_such_name")


def test_an_interpreter_without_asyncio_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "asyncio")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    defer_asyncio()
    assert "asyncio" not in sys.modules


def test_garbage_is_looked_for_seldom_and_not_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []
    thresholds = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(gc, "set_threshold", thresholds.append)
    collect_seldom()
    assert (thresholds, at_exit) == ([50_000], [gc.freeze])
