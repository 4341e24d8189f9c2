"""Finds model folders by name, without any machine-learning library."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sealring.mesh.errors import NotFound, SealringError, Unavailable
from sealring.mesh.names import is_commit

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
VISION = "demo-vision"
BUNDLED = {"demo": "demo_model", VISION: "seeing_model"}
"""The models that sealring brings along, by name, and their folders below `examples`: one that reads, and one
that sees pictures, too."""

NOTE = "sealring-manifest.json"
"""File of sealring's note in a folder that it has filled; it is no part of the model."""

LINKED = "linked"
"""Folder in a node's state folder with links to models that other programs have fetched."""

CONFIGURATIONS = ("config.json", "adapter_config.json")
"""Files by which a folder is one of a model or of an adapter."""

_MODULE, _TEMPLATES = r"[0-9]{1,2}_[A-Za-z]{1,40}", r"(?:additional_)?chat_templates"
INNER = re.compile(rf"{_MODULE}/config\.json|{_TEMPLATES}/[A-Za-z0-9][A-Za-z0-9._-]{{0,99}}\.jinja")
"""Files of a model that lie in folders inside its own: how vectors are made, and chat templates for tools."""

INNER_FOLDER = re.compile(f"{_MODULE}|{_TEMPLATES}")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MAX_PATH = 1024
_MAX_FILES = 4096


def local_model(name: str, folders: Sequence[Path]) -> Path | None:
    """The folder of a model on this machine, or None for a hub id that is not here.

    A name is an absolute path, a folder's name in one of `folders`, a name of BUNDLED, or a hub id
    `org/name`. A hub id is looked up in `folders` as `org/name` and as `name`, then in the hub's own cache.
    Folders that cannot be read are skipped.

    Raises NotFound (MODEL_NOT_FOUND), or MODEL_FOLDER_UNREADABLE if the model was not found and a folder
    could not be read.
    """
    if name.startswith("/"):
        return _absolute(name)
    is_hub_id = HUB_ID.fullmatch(name) is not None and ".." not in name
    if not is_hub_id and (NAME.fullmatch(name) is None or ".." in name):
        raise not_found(name, "a model is an absolute path, a folder's name or a hub id org/name")
    unread: SealringError | None = None
    for folder in folders:
        for inner in dict.fromkeys((name, name.rpartition("/")[2])):
            try:
                if holds_model(folder / inner):
                    return folder / inner
            except OSError as error:
                unread = unread or unreadable(folder, error)
    elsewhere = _cached(name) if is_hub_id else bundled_model(name) if name in BUNDLED else None
    if elsewhere is not None:
        return elsewhere
    if unread is not None:
        raise NotFound(
            f"no readable folder has a model {name[:200]}; {unread.message}",
            reason=unread.reason,
            hint=unread.hint,
        )
    if is_hub_id:
        return None
    raise not_found(name, "put it in a models folder, or name it by its path or hub id")


def bundled_model(name: str = "demo") -> Path:
    """The folder of one of BUNDLED, as installed or in the checkout. Raises NotFound (MODEL_NOT_FOUND)."""
    above, inner = Path(__file__).resolve().parents[2], BUNDLED[name]
    for folder in (above / "cli" / inner, above / "examples" / inner / "model"):
        if is_file(folder / "config.json"):
            return folder
    raise not_found(name, "a bundled model is not here: install sealring again")


def not_found(name: str, hint: str) -> NotFound:
    return NotFound(f"there is no model {name[:200]}", reason="MODEL_NOT_FOUND", hint=hint)


def unreadable(folder: Path, error: OSError) -> Unavailable:
    """The error for a folder that may exist and cannot be read."""
    hint = "check the volume that it is on"
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = (
            "home folders are closed to other accounts, and macOS keeps services from Desktop, Documents, "
            "Downloads, removable and network volumes: move the models, or open the folder to the node's "
            "account"
        )
    return Unavailable(
        f"the folder {folder} cannot be read: {error.strerror}", hint=hint, reason="MODEL_FOLDER_UNREADABLE"
    )


@dataclass(frozen=True)
class FolderState:
    """Names, sizes and times of a model folder's files except the note; they show that it has changed."""

    path: Path
    files: tuple[tuple[str, int, int], ...]

    @classmethod
    def read(cls, path: Path) -> FolderState:
        """Raises NotFound (MODEL_NOT_FOUND) when the folder is gone, Unavailable (MODEL_FOLDER_UNREADABLE)
        when it cannot be read."""
        try:
            return cls(path, tuple(sorted(_files(path))))
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(str(path), "check the model's path") from None
        except OSError as error:
            raise unreadable(path, error) from None


def files_in(path: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """The files of a model's folder by their names, and those of INNER. Raises NotFound for too many files,
    OSError."""
    count, folders = 0, [""]
    for inside in folders:
        with os.scandir(path / inside) as entries:
            for entry in entries:
                count += 1
                if count > _MAX_FILES:
                    raise not_found(str(path), "the folder holds too many files to be a model")
                name = f"{inside}/{entry.name}" if inside else entry.name
                if entry.is_file() and (not inside or INNER.fullmatch(name)):
                    yield name, entry
                elif not inside and INNER_FOLDER.fullmatch(name) and entry.is_dir():
                    folders.append(name)


def _files(path: Path) -> Iterator[tuple[str, int, int]]:
    for name, entry in files_in(path):
        if name != NOTE:
            status = entry.stat()
            yield name, status.st_size, status.st_mtime_ns


def _absolute(name: str) -> Path:
    path = Path(name)
    if len(name) > _MAX_PATH or "\0" in name or ".." in path.parts:
        raise not_found(name, "check the model's path")
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return path
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise unreadable(path, error) from None
    raise not_found(name, "check the model's path")


def models_in(folder: Path) -> list[Path]:
    """The folders with a model one and two levels below `folder`, sorted. Folders below that cannot be read,
    or that disappear meanwhile, are skipped.

    Raises OSError if `folder` itself cannot be read.
    """
    found = []
    for outer in _folders_in(folder):
        inner: list[Path] = []
        with contextlib.suppress(OSError):
            inner = _folders_in(outer)
        for one in (outer, *inner):
            with contextlib.suppress(OSError):
                if holds_model(one):
                    found.append(one)
    return sorted(found)


def _folders_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.is_dir()]


def holds_model(folder: Path) -> bool:
    """Whether a folder is one of a model, or of an adapter. Raises OSError if that is unknown."""
    return any(is_file(folder / name) for name in CONFIGURATIONS)


def is_file(path: Path) -> bool:
    """Like `Path.is_file`, but raises OSError if the answer is unknown, in all releases of Python."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _cached(hub_id: str) -> Path | None:
    """The snapshot that the Hugging Face cache holds for the main branch (huggingface_hub's cache layout)."""
    folder = _cache_root() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii")[:64].strip()
        snapshot = folder / "snapshots" / revision
        return snapshot if is_commit(revision) and holds_model(snapshot) else None
    except (OSError, ValueError):
        return None


def _cache_root() -> Path:
    explicit = os.environ.get("HF_HUB_CACHE")
    if explicit:
        return Path(explicit)
    home = os.environ.get("HF_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "huggingface") / "hub"
