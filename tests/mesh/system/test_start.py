"""Imports and collections that are avoided, in this process; tests/cli and tests/node show the savings."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sealring.mesh.system.start import defer_asyncio, hide_rich, show_rich

CHILD = """
import resource, sys
print(*resource.getrlimit(resource.RLIMIT_CORE))
print(open("/proc/self/coredump_filter").read() if sys.platform == "linux" else 0)
"""
PARENT = f"""
import subprocess, sys
from sealring.mesh.system.start import forbid_core_files
forbid_core_files()
sys.exit(subprocess.run([sys.executable, "-c", {CHILD!r}]).returncode)
"""


def test_neither_a_process_nor_its_children_leave_memory_in_core_files() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=200, check=True
    )
    limits, kinds = done.stdout.split("\n")[:2]
    assert limits == "0 0"
    assert int(kinds, 16) == 0


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
    monkeypatch.setattr(logging, "logAsyncioTasks", True, raising=False)  # back to what it was, at the end
    defer_asyncio()
    deferred = sys.modules["asyncio"]
    assert not hasattr(deferred, "__all__"), "what only looks at it does not run it"
    logging.makeLogRecord({})
    assert "run" not in vars(deferred)
    assert deferred.run() == 7
    assert not hasattr(deferred, "no_such_name")
