"""The folder of stored prefixes: what is in it, what a thief of it learns, and disks that fail."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sealring.mesh.crypto import SoftwareSigner
from sealring.node.stored import policy
from sealring.node.stored.keys import StageIdentity, forget, model_folder, stage_key
from sealring.node.stored.places import Place
from sealring.node.stored.store import Store, listed

STAGE = StageIdentity("cluster", "deployment", "ab" * 32, (0, 8), 0)
SCOPE, OTHER_SCOPE = b"a" * 16, b"b" * 16
SIGNER = SoftwareSigner.generate()


def places(prompt: int, count: int = 3) -> list[Place]:
    names = random.Random(prompt)
    return [Place(names.randbytes(16), 256 * index, 256 * (index + 1)) for index in range(count)]


def content(prompt: int, index: int = 0, size: int = 2000) -> bytes:
    return random.Random(prompt * 1000 + index).randbytes(size)


def store(
    root: Path, stage: StageIdentity = STAGE, setting: int | None = 1 << 20, signer: SoftwareSigner = SIGNER
) -> Store:
    made = Store(
        root,
        model_folder(root, stage.model_digest),
        stage_key(root, stage, f"org/{stage.model_digest[:2]}", signer),
        setting,
    )
    made.look()
    return made


def write(target: Store, prompt: int, scope: bytes = SCOPE) -> None:
    for index, place in enumerate(places(prompt)):
        assert target.write(scope, place, memoryview(content(prompt, index)))


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.block"))


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    again = store(tmp_path)
    assert again.held(SCOPE, places(1)) == 3
    for index, place in enumerate(places(1)):
        assert again.read(SCOPE, place, 2000) == content(1, index)
        assert not again.wants(SCOPE, place)
    assert again.held(SCOPE, places(2)) == 0
    assert again.read(SCOPE, places(2)[0], 2000) is None
    assert again.figures().blocks == 3


def test_prompts_wait_for_the_first_look_at_the_folder_and_not_for_a_slow_one(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    now, key = 200.0, stage_key(tmp_path, STAGE, "org/ab", SIGNER)
    folder = model_folder(tmp_path, STAGE.model_digest)
    again, slow = (Store(tmp_path, folder, key, steady=lambda: now) for _ in range(2))
    now = 0.0
    looking = threading.Thread(target=again.look)
    looking.start()
    assert again.held(SCOPE, places(1)) == 3
    looking.join()
    now = 201.0
    assert slow.held(SCOPE, places(1)) == 0


def test_uses_count_across_restarts_and_decide_what_goes(tmp_path: Path) -> None:
    first = store(tmp_path)
    write(first, 1)
    write(first, 2)
    for _ in range(3):
        first.used(SCOPE, places(1))
    small = store(tmp_path, setting=first.figures().bytes)
    assert small.write(SCOPE, places(3)[0], memoryview(content(3)))
    assert small.held(SCOPE, places(1)) == 3
    assert small.held(SCOPE, places(2)) in (1, 2), "its last blocks were worth least"
    assert small.figures().bytes <= first.figures().bytes


@pytest.mark.parametrize(
    "stage",
    [
        StageIdentity("other", "deployment", "ab" * 32, (0, 8), 0),
        StageIdentity("cluster", "other", "ab" * 32, (0, 8), 0),
        StageIdentity("cluster", "deployment", "cd" * 32, (0, 8), 0),
        StageIdentity("cluster", "deployment", "ab" * 32, (0, 9), 0),
        StageIdentity("cluster", "deployment", "ab" * 32, (8, 16), 0),
        StageIdentity("cluster", "deployment", "ab" * 32, (0, 8), 4),
        StageIdentity("cluster", "deployment", "ab" * 32, (0, 8), 0, (b"one", b"two")),
        StageIdentity("cluster", "deployment", "ab" * 32, (0, 8), 0, (b"two",), (b"one",)),
        StageIdentity("cluster", "deployment", "ab" * 32, (0, 8), 0, (), (b"one", b"two")),
    ],
)
def test_another_stage_opens_no_block_wherever_it_lies(tmp_path: Path, stage: StageIdentity) -> None:
    write(store(tmp_path), 1)
    own = files(tmp_path)
    other = store(tmp_path, stage)
    assert other.held(SCOPE, places(1)) == 0
    write(other, 1)
    theirs = [file for file in files(tmp_path) if file not in own]
    for mine, target in zip(own, theirs, strict=True):
        shutil.copyfile(mine, target)
    again = store(tmp_path, stage)
    assert [again.read(SCOPE, place, 2000) for place in places(1)] == [None] * 3


def test_another_identity_or_a_new_seed_opens_nothing(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    assert store(tmp_path, signer=SoftwareSigner.generate()).held(SCOPE, places(1)) == 0
    (model_folder(tmp_path, STAGE.model_digest) / "seed").unlink()
    assert store(tmp_path).held(SCOPE, places(1)) == 0


def test_a_thief_finds_neither_content_nor_what_is_equal(tmp_path: Path) -> None:
    """One prompt is stored in two scopes, two deployments and twice in one: names, bytes and keys differ."""
    mine = store(tmp_path)
    write(mine, 1)
    write(mine, 1, OTHER_SCOPE)
    write(store(tmp_path, StageIdentity("cluster", "second", "ab" * 32, (0, 8), 0)), 1)
    stolen = [(file.name, file.read_bytes()) for file in files(tmp_path)]
    assert len(stolen) == len({name for name, _ in stolen}) == 9
    everything = b"".join(data for _, data in stolen) + "".join(map(str, tmp_path.rglob("*"))).encode()
    for index, place in enumerate(places(1)):
        assert content(1, index)[:16] not in everything
        assert place.name not in everything
        assert place.name.hex().encode() not in everything
    for scope in (SCOPE, OTHER_SCOPE, b"deployment", b"second", STAGE.model_digest.encode()):
        assert scope not in everything
    sealed = [data[20:] for _, data in stolen]
    words = [data[at : at + 16] for data in sealed for at in range(0, len(data) - 16, 16)]
    assert len(words) == len(set(words)), "two blocks share bytes"
    assert all(oct(path.stat().st_mode)[-2:] == "00" for path in tmp_path.rglob("*"))


def test_a_block_in_anothers_place_is_a_miss_and_goes(tmp_path: Path) -> None:
    mine = store(tmp_path)
    write(mine, 1)
    write(mine, 2, OTHER_SCOPE)
    paths = files(tmp_path)
    datas = [path.read_bytes() for path in paths]
    for path, data in zip(paths, [*datas[1:], datas[0]], strict=True):
        path.write_bytes(data)
    again = store(tmp_path)
    for prompt, scope in ((1, SCOPE), (2, OTHER_SCOPE)):
        for place in places(prompt):
            assert again.read(scope, place, 2000) is None
            assert again.wants(scope, place)
    assert again.figures().damaged == 6
    assert not files(tmp_path)


def test_what_was_never_used_is_known(tmp_path: Path) -> None:
    mine, (one, other, missing) = store(tmp_path), places(1, 3)
    for place in (one, other):
        assert mine.write(SCOPE, place, memoryview(content(1)))
    mine.used(SCOPE, [one])
    assert [mine.unused(SCOPE, place) for place in (one, other, missing)] == [False, True, False]


def test_a_removed_model_is_gone_and_others_stay(tmp_path: Path) -> None:
    other = StageIdentity("cluster", "deployment", "cd" * 32, (0, 8), 0)
    write(store(tmp_path), 1)
    write(store(tmp_path, other), 1)
    forget(tmp_path, "org/ab")
    assert store(tmp_path, other).held(SCOPE, places(1)) == 3
    assert store(tmp_path).held(SCOPE, places(1)) == 0
    forget(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert listed(tmp_path) == []


def test_a_running_engine_writes_nothing_under_a_key_that_was_destroyed(tmp_path: Path) -> None:
    running = store(tmp_path)
    write(running, 1)
    forget(tmp_path)
    assert not running.write(SCOPE, places(2)[0], memoryview(content(2)))
    again = store(tmp_path)
    assert not running.write(SCOPE, places(2)[0], memoryview(content(2)))
    assert running.figures().writes, "the disk has not failed"
    assert files(tmp_path) == []
    write(again, 1)


def test_a_model_is_forgotten_by_its_name_if_it_was_served_from_its_path(tmp_path: Path) -> None:
    stage_key(tmp_path, STAGE, "/home/models/org/model", SIGNER)
    assert forget(tmp_path, "org/mod") == 0
    assert forget(tmp_path, "org/model") == 1


def test_tables_beside_the_stages_count(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    before = store(tmp_path).figures()
    (model_folder(tmp_path, STAGE.model_digest) / "ab.layers").write_bytes(bytes(5000))
    after = store(tmp_path).figures()
    assert (after.bytes, after.blocks) == (before.bytes + 5000, before.blocks)


def test_a_folder_among_blocks_hides_none_of_them(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    folder = files(tmp_path)[0].parent / "0 folder"
    folder.mkdir()
    os.utime(folder, (0, 0))
    (found,) = listed(tmp_path)
    assert found.blocks == 3


def test_the_list_shows_models(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    (found,) = listed(tmp_path)
    assert (found.folder, found.blocks) == (model_folder(tmp_path, STAGE.model_digest).name, 3)
    assert found.bytes == store(tmp_path).figures().bytes


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("fails", [full, read_only])
def test_a_disk_that_takes_no_writes_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[..., None]
) -> None:
    now = 0.0
    mine = Store(tmp_path, tmp_path / "model", bytes(32), 1 << 20, steady=lambda: now)
    write(mine, 1)
    with monkeypatch.context() as failing:
        failing.setattr(os, "open", fails)
        assert not mine.write(SCOPE, places(2)[0], memoryview(content(2)))
        assert not mine.wants(SCOPE, places(2)[0])
    assert not mine.figures().writes
    assert mine.read(SCOPE, places(1)[0], 2000) == content(1)
    now = 601.0
    assert mine.wants(SCOPE, places(2)[0])
    assert mine.write(SCOPE, places(2)[0], memoryview(content(2)))


def test_a_disk_that_others_fill_is_left_its_last_gigabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = store(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=policy.LEAST_FREE)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert not mine.write(SCOPE, places(1)[0], memoryview(content(1)))
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    mine = Store(blocked, blocked / "model", bytes(32), 1 << 20)
    assert mine.read(SCOPE, places(1)[0], 2000) is None
    assert not mine.write(SCOPE, places(1)[0], memoryview(content(1)))


def test_what_a_crash_left_and_what_is_no_block_goes(tmp_path: Path) -> None:
    write(store(tmp_path), 1)
    folder = files(tmp_path)[0].parent
    (folder / "1.block.dead").write_bytes(b"half")
    os.utime(folder / "1.block.dead", (0, 0))
    (folder / "2.block").write_bytes(b"no block")
    assert store(tmp_path).figures().blocks == 3
    assert len(list(folder.iterdir())) == 3
