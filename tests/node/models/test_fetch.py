"""The process that fetches a model from the hub, with the real huggingface_hub and a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from localhub import COMMIT, LocalHub, local_hub

from sealring.mesh.errors import Unavailable
from sealring.node.models import fetch
from sealring.node.models.fetch import WANTED
from sealring.node.models.folders import NOTE
from sealring.node.models.hub import steady
from sealring.node.models.kept import Note, every_part, hash_of_files, note_of
from sealring.node.models.listing import HubFile
from sealring.node.models.manifest import PART, Manifest
from sealring.node.models.partial_model import PartialModel
from sealring.node.wire.frames import FrameSocket, socket_pair
from sealring.v1 import engine_pb2

LENGTH = 24 << 20
HEADER = b'{"a":{"dtype":"U8","shape":[25165824],"data_offsets":[0,25165824]}}'
NUMBERS = b"".join(number.to_bytes(4, "little") * 1024 for number in range(LENGTH // 4096))
"""No two blocks are alike; each process that collects this would spend a tenth of a second on random ones."""
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + NUMBERS
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


def start(
    hub: LocalHub, home: Path, model: str = "org/model", *options: str, **more: str
) -> tuple[Any, FrameSocket]:
    """The real process, which notes every part that comes."""
    home.mkdir(exist_ok=True)
    ours, theirs = socket_pair()
    code = (
        "from sealring.mesh.system.start import collect_seldom, hide_rich; collect_seldom(); hide_rich()\n"
        "from sealring.node.models import fetch; fetch.KEEP_SECONDS = fetch._TELL_SECONDS = 0; fetch.main()"
    )
    with theirs:
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-c", code, model, *options),
                *("--home", str(home), "--control-fd", str(theirs.fileno())),
            ],
            pass_fds=(theirs.fileno(),),
            env={
                "HF_ENDPOINT": hub.url,
                "HF_HOME": str(home.parent / "home"),
                "HF_HUB_DISABLE_TELEMETRY": "1",
                "PATH": "/usr/bin:/bin",
                "SSL_CERT_DIR": os.devnull,  # as tests/conftest.py has it
                **more,
            },
            stderr=subprocess.DEVNULL,
        )
    return child, FrameSocket(ours)


def run(
    hub: LocalHub, home: Path, model: str = "org/model", *options: str, **more: str
) -> list[engine_pb2.HubEvent]:
    """What the real process says until it ends."""
    child, frames = start(hub, home, model, *options, **more)
    events = []
    while (event := frames.receive(engine_pb2.HubEvent)) is not None:
        events.append(event)
    status = child.wait(200)
    frames.close()
    assert (status == 0) == (not any(event.HasField("problem") for event in events))
    return events


def folder(home: Path) -> Path:
    return PartialModel(home, "org/model").path


def kept(home: Path) -> Note:
    note = note_of(folder(home))
    assert note is not None
    return note


def _named(hub: LocalHub) -> str:
    """`hash_of_files` of what the hub has: large files by their SHA-256, others by their git blob."""
    found = []
    for name in {
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    } & hub.files.keys():
        content = hub.files[name]
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        large = hashlib.sha256(content).hexdigest()
        found.append((name, len(content), large if name == "model.safetensors" else blob))
    return hash_of_files(found)


def test_the_files_of_a_model_come_and_no_code(hub: LocalHub, tmp_path: Path) -> None:
    """A tokenizer may be longer than a part, and lies in git itself."""
    hub.files |= {"1_Pooling/config.json": b"[]", "onnx/config.json": b"{}"}
    tokenizer = hub.files["tokenizer.json"] = random.Random(2).randbytes(PART + 5)
    event = run(hub, tmp_path)[-1]
    assert event.size == event.done == len(WEIGHTS) + len(tokenizer) + 4
    files = {path.name for path in folder(tmp_path).iterdir()}
    assert files == {"1_Pooling", "config.json", "model.safetensors", "tokenizer.json", NOTE}
    assert (folder(tmp_path) / "1_Pooling" / "config.json").read_bytes() == b"[]"
    assert (folder(tmp_path) / "tokenizer.json").read_bytes() == tokenizer
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert (kept(tmp_path).is_part, kept(tmp_path).commit) == (False, COMMIT)
    assert kept(tmp_path).manifest == Manifest.of(folder(tmp_path))
    assert kept(tmp_path).hub_files == _named(hub), "by the hub's hashes, whatever the commit"
    assert {said for _, said in hub.tokens} == {None}
    before = len(hub.sent("GET", "/storage/"))
    run(hub, tmp_path)
    assert len(hub.sent("GET", "/storage/")) == before


def test_the_hub_gets_the_users_token_and_its_storage_does_not(hub: LocalHub, tmp_path: Path) -> None:
    assert not run(hub, tmp_path, HF_TOKEN="hf_test")[-1].HasField("problem")
    sent = {where: said for where, said in hub.tokens if where != "storage"}
    assert ("storage", None) in hub.tokens
    assert set(sent.values()) == {"Bearer hf_test"}
    assert len(sent) == len(hub.tokens) - 1


def test_a_download_that_was_killed_goes_on_where_it_was(hub: LocalHub, tmp_path: Path) -> None:
    hub.breaks_after, hub.stalls = 21 << 20, threading.Event()
    child, frames = start(hub, tmp_path)
    assert hub.stalled.wait(200)
    while (event := frames.receive(engine_pb2.HubEvent)) is not None and event.done < 2 * PART + 2:
        pass
    while kept(tmp_path).done < 2 * PART + 2:
        assert child.poll() is None
        time.sleep(0.01)
    frames.close()  # as when its daemon is gone
    assert child.wait(200) == 1
    hub.stalls.set()
    run(hub, tmp_path)
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.sent("GET", "/storage/") == ["", f"bytes={2 * PART}-{len(WEIGHTS) - 1}"]


def test_a_connection_that_breaks_is_made_again(hub: LocalHub, tmp_path: Path) -> None:
    """So is a request that the hub puts off, and not only when it says."""
    hub.breaks_after, hub.busy = 21 << 20, 1
    run(hub, tmp_path)
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.sent("GET", "/storage/")) == 3


def test_a_hub_that_sends_next_to_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def coming(pieces: int, length: int) -> Iterator[bytes]:
        nonlocal now
        for _ in range(pieces):
            now += 9.0
            yield bytes(length)

    monkeypatch.setattr("sealring.node.models.hub.time", SimpleNamespace(monotonic=lambda: now))
    for _ in steady(coming(100, 16 << 10)):
        now += 1000.0  # the disk is slow
    with pytest.raises(Unavailable) as raised:
        list(steady(coming(100, 1)))
    assert raised.value.reason == "HUB_UNREACHABLE"
    assert raised.value.message == "the hub has sent 7 bytes in 63 seconds"


def test_a_part_comes_at_its_commit_and_the_rest_later(hub: LocalHub, tmp_path: Path) -> None:
    """The hub knows the hash of a whole file and none of its parts."""
    run(hub, tmp_path, "org/model", "--part")
    assert hub.sent("GET", "/storage/") == [f"bytes=0-{PART - 1}"]
    (folder(tmp_path) / WANTED).write_text(json.dumps([["model.safetensors", 2 * PART + 5, 2 * PART + 9]]))
    run(hub, tmp_path, "org/model", "--part")
    assert hub.sent("GET", "/storage/")[1:] == [f"bytes={2 * PART}-{3 * PART - 1}"]
    note = kept(tmp_path)
    assert ([sorted(one) for one in note.have], note.commit) == ([[0], [0, 2]], COMMIT)
    hub.commit = "e" * 40  # it has moved on
    assert run(hub, tmp_path, "org/model", "--commit", hub.commit)[-1].problem.reason == "OTHER_MODEL_VERSION"
    run(hub, tmp_path, "org/model", "--commit", COMMIT)
    assert all(COMMIT in path for _, path, _ in hub.asked if "/resolve/" in path)
    assert hub.sent("GET", "/storage/")[2:] == [
        f"bytes={PART}-{2 * PART - 1}",
        f"bytes={3 * PART}-{len(WEIGHTS) - 1}",
    ]
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
    assert (kept(tmp_path).is_part, kept(tmp_path).commit) == (False, COMMIT)


def test_what_the_hub_has_not_confirmed_is_never_noted_as_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed before it has checked the hash of the last file."""
    monkeypatch.setattr(fetch, "KEEP_SECONDS", 0.0)
    contents = [FILES["config.json"], WEIGHTS]

    def killed(partial: PartialModel, file: int) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(PartialModel, "sha256", killed)
    weights = HubFile("model.safetensors", len(WEIGHTS), "0" * 64, "")
    repository: Any = SimpleNamespace(
        files=[HubFile("config.json", 2, "", "0" * 40), weights],
        small=lambda index: contents[index],
        read=lambda index, first, end: [contents[index][first:end]],
    )
    partial = PartialModel(tmp_path, "org/model")
    partial.begin(Manifest.unhashed([(one.name, one.size) for one in repository.files]), commit=COMMIT)
    with pytest.raises(KeyboardInterrupt):
        fetch.HubFetch(repository, partial, lambda event: None).fill()
    note = kept(tmp_path)
    assert [sorted(one) for one in note.have] == [[0], [0, 1, 2]]
    assert replace(note, have=every_part(note.manifest)).is_part
    assert not replace(note, have=every_part(note.manifest), checked=True).is_part


@pytest.mark.parametrize("lie", ["range", "whole", "longer", "commit", "header"])
def test_a_hub_that_answers_something_else_is_refused(hub: LocalHub, tmp_path: Path, lie: str) -> None:
    hub.lie = lie
    if lie == "header":
        hub.files["model.safetensors"] = (1 << 40).to_bytes(8, "little") + WEIGHTS
    event = run(hub, tmp_path, "org/model", "--part")[-1]
    assert event.problem.reason == ("WEIGHTS_CORRUPT" if lie == "header" else "BAD_HUB_ANSWER")
    assert len(hub.sent("GET", "/storage/")) <= 1


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
    (event,) = run(hub, tmp_path, model, **more)
    assert event.problem.reason == reason
    if "HF_HUB_OFFLINE" in more:
        assert not hub.asked


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_not_what_the_hub_says_is_dropped(hub: LocalHub, tmp_path: Path, name: str) -> None:
    listed = dict(hub.files)
    hub.etags = {one: hub.etag(one) for one in listed}
    hub.files[name] = listed[name][:-1] + b"!"
    event = run(hub, tmp_path)[-1]
    assert event.problem.reason == "MODEL_PART_DAMAGED"
    hub.files[name] = listed[name]
    run(hub, tmp_path)
    assert (folder(tmp_path) / name).read_bytes() == listed[name]


def test_no_more_of_the_hubs_list_is_read_than_a_model_can_need(hub: LocalHub, tmp_path: Path) -> None:
    """Nothing is fetched, and nothing is left behind."""
    hub.pads_list = 9 << 20
    (event,) = run(hub, tmp_path)
    assert event.problem.reason == "MODEL_TOO_LARGE"
    assert not hub.sent("GET", "/resolve/")
    assert not folder(tmp_path).exists()


def test_what_an_error_of_the_hub_says_is_not_read(hub: LocalHub, tmp_path: Path) -> None:
    hub.refusal = iter([b"x" * (1 << 20)] * 64)  # sockets hold a few of them
    (event,) = run(hub, tmp_path)
    assert event.problem.reason == "HUB_UNREACHABLE"
    assert length_hint(hub.refusal) > 0
    assert not folder(tmp_path).exists()


def test_what_comes_of_a_part_is_told_before_the_part_is_whole(hub: LocalHub, tmp_path: Path) -> None:
    """A slow network brings 8 MiB in minutes."""
    done = [event.done for event in run(hub, tmp_path / "home") if event.size]
    assert done == sorted(done)
    assert len(done) > 10, "the model has five parts"


def test_a_fetch_that_goes_on_tells_what_it_reads_of_the_earlier_one(hub: LocalHub, tmp_path: Path) -> None:
    """On a slow disk that takes minutes, before the first byte comes."""
    run(hub, tmp_path, "org/model", "--part")
    (folder(tmp_path) / WANTED).write_text(
        json.dumps([["model.safetensors", 0, 1], ["model.safetensors", 3 * PART, len(WEIGHTS)]])
    )
    run(hub, tmp_path, "org/model", "--part")
    events = run(hub, tmp_path)
    reading = [event.done for event in events if event.done and not event.size]
    assert len(reading) > PART >> 20, "blocks of a part are told while it is read"
    counted = [(event.done, event.size) for event in events if event.size]
    again = len(WEIGHTS) - 3 * PART
    assert counted[-1] == (len(WEIGHTS) + 2 + again,) * 2, (
        "what is read again for the hash of the file counts"
    )
    assert counted == sorted(counted)
    assert {size for _, size in counted} == {counted[-1][1]}
    assert (folder(tmp_path) / "model.safetensors").read_bytes() == WEIGHTS
