"""The folder that a model is fetched to: kept files, counted bytes, and room on the disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealring.mesh.errors import ModelError, ResourceExhausted
from sealring.node.models import partial_model
from sealring.node.models.folders import NOTE
from sealring.node.models.kept import note_of
from sealring.node.models.manifest import Manifest, ModelFile
from sealring.node.models.partial_model import SPARE, PartialModel, check_disk, places

PART = 64
COMMIT = "ab" * 20
CONFIG, WEIGHTS = b"{}", bytes(range(1, 201))


pytestmark = pytest.mark.usefixtures("small_parts")


def cut(content: bytes) -> list[bytes]:
    return [content[at : at + PART] for at in range(0, len(content), PART)]


def model(*, hashed: bool = True) -> Manifest:
    return Manifest(
        tuple(
            ModelFile(
                name,
                len(content),
                b"".join(hashlib.sha256(one).digest() if hashed else bytes(32) for one in cut(content)),
            )
            for name, content in (("config.json", CONFIG), ("model.safetensors", WEIGHTS))
        )
    )


@pytest.mark.parametrize(
    ("free", "needed", "fits"),
    [
        (SPARE + 5, 5, True),
        (SPARE + 4, 5, False),
        (0, 0, True),
        (SPARE, 1, False),
        (SPARE + (3 << 20), 5 << 20, False),
    ],
)
def test_so_much_of_the_disk_stays_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, needed: int, fits: bool
) -> None:
    monkeypatch.setattr(partial_model.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    if fits:
        check_disk(tmp_path, needed)
        return
    with pytest.raises(ResourceExhausted) as caught:
        check_disk(tmp_path, needed)
    assert caught.value.reason == "DISK_FULL"
    assert f"needs {needed >> 20} MiB more" in caught.value.message
    assert f"{free >> 20} MiB are free, of which 1024 stay so" in caught.value.message


def test_parts_are_counted_once_and_only_where_they_are_wanted(tmp_path: Path) -> None:
    assert places(tmp_path, "org/m") == (tmp_path / ".partial" / "org--m", tmp_path / "org" / "m")
    made = PartialModel(tmp_path, "org/m")
    made.begin(model(), [frozenset({0}), frozenset({1, 3})])
    assert (made.size, made.done) == (2 + 64 + 8, 0)
    pieces = cut(WEIGHTS)
    with pytest.raises(ModelError) as caught:
        made.add(1, 1, [pieces[0]])
    assert (caught.value.reason, made.done) == ("MODEL_PART_DAMAGED", 0)
    for _ in range(2):
        made.add(1, 3, [pieces[3][:1], pieces[3][1:]])
        assert made.done == 8
    made.add(1, 0, [pieces[0]])
    assert (made.done, made.missing()) == (8, [frozenset({0}), frozenset({1})])
    made.add(0, 0, [CONFIG])
    assert (made.done, made.complete(0), made.complete(1)) == (10, True, False)
    made.want([frozenset({0}), frozenset({0, 3})])
    assert (made.size, made.done) == (2 + 64 + 8, 2 + 64 + 8)
    made.keep()
    again = PartialModel(tmp_path, "org/m")
    again.begin(model())
    assert (again.size, again.done) == (202, 74)
    assert again.missing() == [frozenset(), frozenset({1, 2})]
    for part in (1, 2):
        again.add(1, part, [pieces[part]])
    (again.path / "folder").mkdir()
    (again.path / "folder" / "file").touch()
    assert again.publish() == tmp_path / "org" / "m"
    assert not (tmp_path / "org/m/folder").exists()
    assert (tmp_path / "org/m/model.safetensors").read_bytes() == WEIGHTS
    assert not again.path.exists()


def test_folders_inside_a_models_hold_its_files_and_no_others(tmp_path: Path) -> None:
    """And a link there leads nowhere else."""
    inner = ModelFile("1_Pooling/config.json", 2, hashlib.sha256(b"[]").digest())
    manifest = Manifest((inner, *model().files))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_bytes(b"mine")
    made = PartialModel(tmp_path, "m")
    made.prepare()
    (made.path / "1_Pooling").symlink_to(outside)
    (made.path / "2_Dense").mkdir()
    made.begin(manifest)
    for file, content in ((0, b"[]"), (1, CONFIG)):
        made.add(file, 0, [content])
    assert (outside / "config.json").read_bytes() == b"mine"
    (made.path / "1_Pooling" / "other.json").touch()
    (made.path / "1_Pooling" / "deep").mkdir()
    made.begin(manifest)
    assert made.missing() == [frozenset(), frozenset(), frozenset(range(4))]
    for part, piece in enumerate(cut(WEIGHTS)):
        made.add(2, part, [piece])
    made.keep()
    found = PartialModel(tmp_path, "m").publish()  # as the daemon does, for the process that fetched
    files = {str(path.relative_to(found)) for path in found.rglob("*")}
    assert files == {"1_Pooling", "1_Pooling/config.json", "config.json", "model.safetensors", NOTE}
    assert Manifest.of(found) == manifest


def test_a_link_in_the_place_of_a_folder_inside_is_not_followed(tmp_path: Path) -> None:
    for name in ("model", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(CONFIG)
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="leads elsewhere"):
        Manifest.of(tmp_path / "model")


def test_what_the_hub_has_no_hashes_of_is_learnt_and_forgotten(tmp_path: Path) -> None:
    made = PartialModel(tmp_path, "m")
    made.begin(model(hashed=False), commit=COMMIT, hub_files="cd" * 32)
    for part, piece in enumerate(cut(WEIGHTS)):
        made.add(1, part, [piece])
    with pytest.raises(ModelError):
        made.add(1, 0, [bytes(64)])
    made.add(0, 0, [CONFIG])
    made.keep(checked=True)
    made.keep()
    note = note_of(made.path)
    assert note is not None
    assert (note.commit, note.checked, note.hub_files, note.whole) == (COMMIT, True, "cd" * 32, True)
    assert note.manifest == model()
    made.forget(1)
    note = note_of(made.path)
    assert note is not None
    assert (note.checked, note.have) == (False, [frozenset({0}), frozenset()])
    assert not note.manifest.files[1].knows(0)
    assert (made.done, made.size, made.complete(1)) == (2, 202, False)
    assert (made.path / "model.safetensors").read_bytes() == bytes(200)
    made.add(1, 0, [bytes([7]) * 64])


def test_what_does_not_belong_to_the_model_is_dropped(tmp_path: Path) -> None:
    made = PartialModel(tmp_path, "m")
    made.prepare()
    assert made.path.stat().st_mode & 0o777 == 0o700
    (made.path / "folder").mkdir()
    (made.path / "other.json").write_text("{}")
    (made.path / "config.json").symlink_to(tmp_path / "elsewhere")
    (made.path / "model.safetensors").write_bytes(WEIGHTS[:PART] + bytes(400))
    made.begin(model())
    assert sorted(entry.name for entry in made.path.iterdir()) == ["config.json", "model.safetensors"]
    assert not (made.path / "config.json").is_symlink()
    assert made.missing() == [frozenset({0}), frozenset({1, 2, 3})]
    assert (made.path / "model.safetensors").stat().st_size == 200
    assert (made.path / "config.json").stat().st_mode & 0o777 == 0o600
    made.target.mkdir()
    (made.target / "here").touch()
    assert made.publish() == made.target
    assert [entry.name for entry in made.target.iterdir()] == ["here"], "which came by another way"
    assert not made.path.exists()
    assert NOTE not in {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize("changed", [False, True])
def test_a_file_is_hashed_while_its_parts_come(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """Nothing is read twice but what an earlier process has left behind a missing part."""
    read: list[int] = []
    real = partial_model.read_part

    def counted(descriptor: int, size: int, part: int) -> Iterator[bytes]:
        read.append(part)
        return real(descriptor, size, part)

    monkeypatch.setattr(partial_model, "read_part", counted)

    @given(st.sets(st.integers(0, 3)))
    def holds(left: set[int]) -> None:
        home, pieces = tmp_path_factory.mktemp("home"), cut(WEIGHTS)
        made = PartialModel(home, "m")
        made.begin(model(hashed=False), commit=COMMIT)
        for part in left:
            made.add(1, part, [pieces[part]])
        made.keep()
        read.clear()
        told: list[tuple[int, int]] = []
        again, note = PartialModel(home, "m"), note_of(made.path)
        assert note is not None
        again.begin(
            note.manifest, commit=COMMIT, whole=True, tell=lambda: told.append((again.size, again.done))
        )
        assert sorted(read) == sorted(left)
        first = min(set(range(4)) - left, default=4)
        behind = {part for part in left if part > first}
        size = len(CONFIG) + len(WEIGHTS) + sum(len(pieces[part]) for part in behind)
        assert {size for size, _ in told} <= {0}, "until it is known what has to be read again"
        assert again.size == size
        if changed and behind:
            with (again.path / "model.safetensors").open("r+b") as stream:
                stream.seek(PART * max(behind))
                stream.write(b"!")
        for file, content in enumerate((CONFIG, WEIGHTS)):
            for part in sorted(again.missing()[file]):
                again.add(file, part, [cut(content)[part]])
                told.append((again.size, again.done))
        assert [done for _, done in told] == sorted(done for _, done in told)
        assert sorted(read) == sorted([*left, *behind])
        assert again.sha256(0) == hashlib.sha256(CONFIG).hexdigest()
        if changed and behind:
            assert again.sha256(1) == ""
        else:
            assert again.sha256(1) == hashlib.sha256(WEIGHTS).hexdigest()
            assert again.done == again.size

    holds()
