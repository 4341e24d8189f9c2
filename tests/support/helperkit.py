"""Helper processes that are stopped, killed, or answer anything."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from sealring.node.engine import helper


def packed(answer: Any, data: bytes | None = None) -> bytes:
    """An answer as a process writes it."""
    if data is not None:
        answer = {**answer, "data": len(data)}
    return json.dumps(answer).encode() + b"\n" + (data or b"")


def lie(monkeypatch: pytest.MonkeyPatch, folder: Path, first: bytes, answer: bytes) -> None:
    """Every process that is started answers its first question with the one, all others with the other."""
    (folder / "first").write_bytes(first)
    (folder / "answer").write_bytes(answer)
    monkeypatch.setattr(helper, "WALL_SECONDS", 0.5)  # for one that says less than it announces
    said = [shlex.quote(str(folder / name)) for name in ("first", "answer")]
    script = f"read -r q; cat {said[0]}; while read -r q; do cat {said[1]}; done"
    started = helper.start_process
    monkeypatch.setattr(helper, "start_process", lambda command: started(["/bin/sh", "-c", script]))


def idle(before: set[psutil.Process]) -> list[psutil.Process]:
    """The children that there were not before, and that have not ended."""
    children = set(psutil.Process().children()) - before
    return [one for one in children if one.status() != psutil.STATUS_ZOMBIE]


def while_one_is_asked(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], Any], meanwhile: Callable[[], Any]
) -> Any:
    """The result or error of `ask`. `meanwhile` is called once a process has its question."""
    waits = threading.Event()
    wait = helper.wait_for

    def noting(descriptor: int, event: int, *more: Any) -> None:
        if event == helper.select.POLLIN:
            waits.set()
        wait(descriptor, event, *more)

    found: list[Any] = []

    def asking() -> None:
        try:
            found.append(ask())
        except Exception as error:
            found.append(error)

    monkeypatch.setattr(helper, "wait_for", noting)
    thread = threading.Thread(target=asking)
    thread.start()
    assert waits.wait(200)
    meanwhile()
    thread.join(200)
    return found[0]


class Clock:
    """The helpers' clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        real = helper.time.monotonic
        monkeypatch.setattr(helper, "time", SimpleNamespace(monotonic=lambda: real() + self.ahead))

    def put_on(self) -> None:
        """By the time in which a process has to answer."""
        self.ahead += helper.WALL_SECONDS
