"""A folder that nobody else can write to, for the code that MLX compiles and then runs.

MLX keeps the kernels that it has compiled, libraries for a CPU and PTX for an NVIDIA GPU, in the folder for
temporary files, and loads what it finds there under their names. In a folder that others write to, that is
theirs. The packages that import mlx call `claim` before they do (`tests/node/test_scratch.py` looks).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from sealring.mesh.errors import ConfigError


def claim() -> None:
    """Makes the folder for temporary files one of this user's own, for this process and its children.

    Raises ConfigError (NO_PRIVATE_FOLDER).
    """
    folder = _private_folder()
    os.environ["TMPDIR"] = str(folder)
    os.environ["MLX_PTX_CACHE_DIR"] = str(folder / "ptx")


def _private_folder() -> Path:
    shared = Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    try:
        if is_private(shared):
            return shared
        if not is_sticky(shared):
            raise ConfigError(
                f"others can change what is in {shared}, the folder for temporary files",
                hint="set TMPDIR to a folder that only you can write to",
                reason="NO_PRIVATE_FOLDER",
            )
        own = shared / f"sealring-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
        if is_private(own):
            return own
        once = Path(
            tempfile.mkdtemp(prefix="sealring-", dir=shared)
        )  # another user has made the folder first
    except OSError as error:
        raise ConfigError(
            f"no folder for what MLX compiles can be made in {shared}: {error.strerror}",
            hint="set TMPDIR to a folder that you can write to",
            reason="NO_PRIVATE_FOLDER",
        ) from None
    atexit.register(shutil.rmtree, once, ignore_errors=True)
    return once


def is_private(folder: Path) -> bool:
    """Whether a path is this user's folder, no link, and writable for nobody else."""
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not stat.S_IMODE(status.st_mode) & 0o022
    )


def is_sticky(folder: Path) -> bool:
    """Whether nobody can rename or remove what is another's in it."""
    return bool(folder.stat().st_mode & stat.S_ISVTX)
