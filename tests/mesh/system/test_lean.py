"""Imports and collections that are avoided, in this process; tests/cli and tests/node show the savings."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sealring.mesh.system.lean import defer_asyncio, hide_rich, show_rich


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
