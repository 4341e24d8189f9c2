"""What the process that fetches a model asks for, and when it ends."""

from __future__ import annotations

import socket
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from sealring.node.models import fetch


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("huggingface_hub")
    made.asked, made.error = [], None

    def snapshot_download(model: str, *, allow_patterns: list[str]) -> None:
        made.asked.append((model, allow_patterns))
        if made.error is not None:
            raise made.error

    made.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    monkeypatch.setattr(fetch, "forbid_core_files", lambda: made.asked.append("no core files"))
    monkeypatch.setattr(fetch.logging, "configure", lambda name: None)
    monkeypatch.setattr(fetch, "_die_with_daemon", lambda descriptor: None)
    monkeypatch.setattr(sys, "argv", ["fetch", "org/model", "--control-fd", "7"])
    return made


def test_no_code_comes_with_a_model(hub: Any) -> None:
    fetch.main()
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
    assert hub.asked == ["no core files", ("org/model", patterns)]


def test_a_fetch_that_fails_ends_with_a_status(hub: Any) -> None:
    hub.error = OSError("no network")
    with pytest.raises(SystemExit) as ended:
        fetch.main()
    assert ended.value.code == 1


def test_it_dies_with_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(fetch.os, "_exit", ended.append)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=fetch._die_with_daemon, args=(theirs.detach(),))
    thread.start()
    assert ended == []
    ours.close()
    thread.join(200)
    assert ended == [1]
