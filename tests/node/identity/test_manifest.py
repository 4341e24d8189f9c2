"""The manifest of what runs here: versions, lists of files, and the files themselves."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sealring.node.identity import manifest
from sealring.node.identity.manifest import manifest_hash


def install(folder: Path, name: str = "mlx", version: str = "9.9") -> Path:
    """A package with a module, compiled bytecode and a script outside, as pip would leave them."""
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir(parents=True)
    files = {
        f"{name}/__init__.py": b"value = 1\n",
        f"{name}/lib.so": os.urandom(100_000),
        "../bin/tool": b"#!/bin/sh\n",
        f"{information.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
    }
    rows = []
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(content)}")
    (folder / name / "__pycache__").mkdir()
    (folder / name / "__pycache__" / "one.pyc").write_bytes(b"compiled")
    rows += [f"{name}/__pycache__/one.pyc,,", f"{information.name}/RECORD,,"]
    (information / "RECORD").write_text("\n".join(rows) + "\n")
    return folder / name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = install(tmp_path / "first" / "site")
    (tmp_path / "now").symlink_to("first")
    monkeypatch.setattr(manifest.sysconfig, "get_path", lambda kind: str(tmp_path / "now" / "site"))
    return made


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"import os\n")


def same_size_and_time(file: Path) -> None:
    """What a careful hand would do: size and time of change put back."""
    before = file.stat()
    file.write_bytes(b"value = 2\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def to_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def to_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("change", [append, same_size_and_time, Path.unlink, to_a_folder, to_a_pipe])
def test_a_changed_file_is_another_manifest(package: Path, change: Callable[[Path], None]) -> None:
    before = manifest_hash()
    assert manifest_hash() == before
    content = (package / "__init__.py").read_bytes()
    change(package / "__init__.py")
    changed = manifest_hash()
    assert changed != before
    assert manifest_hash() == changed
    if change is append:  # and is put right
        (package / "__init__.py").write_bytes(content)
        assert manifest_hash() == before


def test_two_different_changes_are_two_manifests(package: Path) -> None:
    found = {manifest_hash()}
    for name in ("__init__.py", "lib.so", "../../bin/tool"):
        append(package / name)
        found.add(manifest_hash())
    append(package / "__init__.py")
    assert len(found | {manifest_hash()}) == 5


def test_equal_installations_have_equal_manifests(tmp_path: Path, package: Path) -> None:
    before = manifest_hash()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    (tmp_path / "now").unlink()
    (tmp_path / "now").symlink_to("second")
    assert manifest_hash() == before


def test_bytecode_and_files_of_nobody_do_not_count(package: Path) -> None:
    before = manifest_hash()
    append(package / "__pycache__" / "one.pyc")
    (package / "stranger.py").write_text("value = 3\n")
    assert manifest_hash() == before


@pytest.mark.parametrize(
    "row", ["", "one", "one,two", "a,b,c,d", "nowhere.py,md5=abc,3", "nowhere.py,sha256=,0"]
)
def test_the_list_itself_counts(package: Path, row: str) -> None:
    before = manifest_hash()
    record = next(package.parent.glob("*.dist-info")) / "RECORD"
    record.write_text(record.read_text() + row + "\n")
    assert manifest_hash() != before


def test_an_absent_package_and_an_empty_list_differ(package: Path) -> None:
    record = next(package.parent.glob("*.dist-info")) / "RECORD"
    found = {manifest_hash()}
    record.write_text("")
    found.add(manifest_hash())
    record.unlink()
    found.add(manifest_hash())
    for file in record.parent.iterdir():
        file.unlink()
    record.parent.rmdir()
    assert len(found | {manifest_hash()}) == 3, "an empty list and none are the same"


@pytest.mark.parametrize(("limit", "value"), [("_MAX_FILES", 2), ("_MAX_BYTES", 1000)])
def test_reading_is_bounded(package: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    before = manifest_hash()
    monkeypatch.setattr(manifest, limit, value)
    assert manifest_hash() != before


def test_only_what_changed_is_read_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest_hash()
    read: list[str] = []
    digest = hashlib.file_digest

    def counting(file: object, name: str) -> object:
        read.append(file.name)  # type: ignore[attr-defined]
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(manifest.hashlib, "file_digest", counting)
    manifest_hash()
    append(package / "__init__.py")
    manifest_hash()
    assert [Path(name).name for name in read] == ["__init__.py"]


def test_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifest_hash()
    assert len(before) == 32
    assert manifest_hash() == before
    monkeypatch.setattr(manifest.platform, "python_version", lambda: "3.99")
    assert manifest_hash() != before


def test_it_is_the_same_wherever_the_daemon_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = manifest_hash()
    install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert manifest_hash() == before
