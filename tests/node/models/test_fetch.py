"""The process that fetches a model from the hub, with the real huggingface_hub and a hub on loopback."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from localhub import LocalHub, local_hub

from sealring.mesh.errors import ModelError
from sealring.node.ipc.frames import FrameSocket, socket_pair
from sealring.node.models import fetch
from sealring.v1 import engine_pb2

WEIGHTS = random.Random(1).randbytes(24 << 20)
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling.py": b"import os",
    "README.md": b"words",
}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub("org/model", dict(FILES)) as running:
        yield running


def start(hub: LocalHub, into: Path, model: str = "org/model", **more: str) -> tuple[Any, FrameSocket]:
    into.mkdir(exist_ok=True)
    ours, theirs = socket_pair()
    with theirs:
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "sealring.node.models.fetch", model),
                *("--into", str(into), "--control-fd", str(theirs.fileno())),
            ],
            pass_fds=(theirs.fileno(),),
            env={
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(into.parent / "home"),
                "HF_HUB_DISABLE_XET": "1",
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "PATH": "/usr/bin:/bin",
                **more,
            },
            stderr=subprocess.DEVNULL,
        )
    return child, FrameSocket(ours)


def run(hub: LocalHub, into: Path, model: str = "org/model", **more: str) -> list[engine_pb2.HubEvent]:
    """What the real process says until it ends."""
    child, frames = start(hub, into, model, **more)
    events = []
    while (event := frames.receive(engine_pb2.HubEvent)) is not None:
        events.append(event)
    status = child.wait(200)
    frames.close()
    assert (status == 0) == (not any(event.HasField("problem") for event in events))
    return events


def test_the_files_of_a_model_come_and_no_code(hub: LocalHub, tmp_path: Path) -> None:
    (event,) = run(hub, tmp_path / "into")
    assert event.size == len(WEIGHTS) + 2
    files = {path.name for path in (tmp_path / "into").iterdir() if path.is_file()}
    assert files == {"config.json", "model.safetensors"}
    assert (tmp_path / "into" / "model.safetensors").read_bytes() == WEIGHTS
    before = len(hub.sent("GET", "/storage/"))
    run(hub, tmp_path / "into")
    assert len(hub.sent("GET", "/storage/")) == before


def test_a_download_that_was_killed_goes_on_where_it_was(hub: LocalHub, tmp_path: Path) -> None:
    hub.breaks_after, hub.stalls = 21 << 20, threading.Event()
    child, frames = start(hub, tmp_path / "into")
    assert hub.stalled.wait(200)
    partial = tmp_path / "into" / ".hub" / hub.etag("model.safetensors")
    while partial.stat().st_size < 20 << 20:
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait(200)
    frames.close()
    hub.stalls.set()
    run(hub, tmp_path / "into")
    assert (tmp_path / "into" / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent("GET", "/storage/") == ["", f"bytes={20 << 20}-"]


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        ("org/other", {}, "MODEL_NOT_FOUND"),
        ("org/model", {"HF_HUB_OFFLINE": "1"}, "HUB_OFFLINE"),
        ("org/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "HUB_UNREACHABLE"),
    ],
)
def test_a_fetch_that_fails_says_why(
    hub: LocalHub, tmp_path: Path, model: str, more: dict[str, str], reason: str
) -> None:
    (event,) = run(hub, tmp_path / "into", model, **more)
    assert event.problem.reason == reason
    if "HF_HUB_OFFLINE" in more:
        assert not hub.asked


def test_a_file_that_is_not_what_the_hub_says_is_dropped(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "etag", lambda name: "0" * 64)
    (_, event) = run(hub, tmp_path / "into")
    assert event.problem.reason == "MODEL_PART_DAMAGED"
    assert {path.name for path in (tmp_path / "into").rglob("*") if path.is_file()} >= {"config.json"}
    assert not list((tmp_path / "into").rglob("*" + "0" * 64))


def test_a_repository_of_very_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is asked for: 20,000 files are listed, of which the model's are too many."""
    names = ["config.json", *(f"model-{number}.safetensors" for number in range(20_000))]
    listed = [SimpleNamespace(rfilename=name, size=1, lfs=None) for name in names]
    info = SimpleNamespace(siblings=listed, sha="0" * 40)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", None)
    with pytest.raises(ModelError) as raised:
        fetch.fetch("org/model", tmp_path, None)  # type: ignore[arg-type]
    assert raised.value.reason == "MODEL_TOO_LARGE"


def test_holes_take_no_room_yet(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        stream.truncate(1 << 20)
    assert fetch._written(tmp_path / "file") < 1 << 20


def test_it_dies_with_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(fetch.os, "_exit", ended.append)
    ours, theirs = socket.socketpair()
    with theirs:
        thread = threading.Thread(target=fetch._die_with_daemon, args=(theirs,))
        thread.start()
        assert ended == []
        ours.close()
        thread.join(200)
    assert ended == [1]
