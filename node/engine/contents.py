"""What a model folder may hold. Its files may come from anybody, and are read whole, but for weights."""

from __future__ import annotations

import os
from pathlib import Path

from sealring.mesh.errors import ModelError
from sealring.node.models.folders import INNER_FOLDER
from sealring.node.models.json_files import limit_of

REDOWNLOAD = "download or convert the model again"

MAX_FILES = 10_000

WEIGHTS = "*.safetensors"
"""Mapped, and never read whole: only their headers, which have a bound of their own."""


def check_folder(path: Path) -> None:
    """Raises ModelError (MODEL_NOT_FOUND, MODEL_FOLDER_UNUSABLE) unless all in the folder are files or
    folders, and no file is larger than those of its kind. To open a pipe may take for ever."""
    try:
        _check(path, path)
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(
            f"there is no model folder {path.name}", reason="MODEL_NOT_FOUND", hint="check the model's path"
        ) from None
    for name in os.listdir(path):
        if INNER_FOLDER.fullmatch(name) and (path / name).is_dir():
            _check(path, path / name)


def _check(model: Path, folder: Path) -> None:
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= MAX_FILES:
                raise _unusable(model, f"has more than {MAX_FILES} files")
            if entry.is_file():
                limit = limit_of(entry.name)
                if limit is not None and (size := entry.stat().st_size) > limit:
                    raise _unusable(
                        model,
                        f"holds {entry.name[:80]!r} of {size} bytes, and such a file has {limit} at most",
                    )
            elif not (entry.is_dir() or _dangles(entry)):
                raise _unusable(model, f"holds {entry.name[:80]!r}, which is no file")


def _dangles(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not Path(entry.path).exists()


def _unusable(path: Path, why: str) -> ModelError:
    return ModelError(f"the folder {path.name} {why}", reason="MODEL_FOLDER_UNUSABLE", hint=REDOWNLOAD)
