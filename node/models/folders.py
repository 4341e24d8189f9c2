"""Finds model folders by name, without any machine-learning library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.mesh.errors import NotFound
from sealring.mesh.names import is_commit

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
BUNDLED = "demo"
NOTE = "sealring-manifest.json"
"""What sealring notes in a folder that it has filled: no file of the model."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MAX_PATH = 1024
_MAX_FILES = 4096


def local_model(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of a model on this machine, or None for a hub id that is not here.

    A name is an absolute path, a folder's name in one of `folders`, "demo" for the bundled model, or a hub id
    `org/name`, which is looked up in `folders` as `org/name` and as `name`, then in the Hugging Face cache.
    Raises NotFound (MODEL_NOT_FOUND).
    """
    if name.startswith("/"):
        return _absolute(name)
    is_hub_id = HUB_ID.fullmatch(name) is not None and ".." not in name
    if not is_hub_id and (NAME.fullmatch(name) is None or ".." in name):
        raise not_found(name, "a model is an absolute path, a folder's name or a hub id org/name")
    for folder in folders:
        for inner in dict.fromkeys((name, name.rpartition("/")[2])):
            if (folder / inner / "config.json").is_file():
                return folder / inner
    if is_hub_id:
        return _cached(name)
    if name == BUNDLED:
        return bundled_model()
    raise not_found(name, "put it in a models folder, or name it by its path or hub id")


def bundled_model() -> Path:
    """The demo model, as installed or in the checkout. Raises NotFound (MODEL_NOT_FOUND)."""
    above = Path(__file__).resolve().parents[2]
    for folder in (above / "cli" / "demo_model", above / "examples" / "demo_model" / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise not_found(BUNDLED, "the bundled demo model is not here: install sealring again")


def not_found(name: str, hint: str) -> NotFound:
    return NotFound(f"there is no model {name[:200]}", reason="MODEL_NOT_FOUND", hint=hint)


@dataclass(frozen=True)
class FolderState:
    """What changes when somebody changes a model folder: names, sizes and times of its files but the note."""

    path: Path
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def read(cls, path: Path) -> FolderState:
        """Raises NotFound (MODEL_NOT_FOUND) when the folder cannot be read."""
        try:
            return cls(path, tuple(sorted(_files(path))))
        except OSError:
            raise not_found(str(path), "check that the folder can be read") from None


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    with os.scandir(path) as entries:
        for count, entry in enumerate(entries):
            if count == _MAX_FILES:
                raise not_found(str(path), "the folder holds too many files to be a model")
            if entry.name != NOTE and entry.is_file():
                status = entry.stat()
                yield entry.name, status.st_size, status.st_mtime_ns


def _absolute(name: str) -> Path:
    path = Path(name)
    if len(name) > _MAX_PATH or "\0" in name or ".." in path.parts or not path.is_dir():
        raise not_found(name, "check the model's path")
    return path


def _cached(hub_id: str) -> Path | None:
    """The snapshot that the Hugging Face cache holds for the main branch (huggingface_hub's cache layout)."""
    folder = _cache_root() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii")[:64].strip()
    except (OSError, ValueError):
        return None
    snapshot = folder / "snapshots" / revision
    if not is_commit(revision) or not (snapshot / "config.json").is_file():
        return None
    return snapshot


def _cache_root() -> Path:
    explicit = os.environ.get("HF_HUB_CACHE")
    if explicit:
        return Path(explicit)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
