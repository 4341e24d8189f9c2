"""Places that cannot be read: folders that are closed to the account, and volumes that are sick."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_VERSION = 0x20080522
_READS_ALL = (1 << 1) | (1 << 2)
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root ignores modes (capabilities(7))."""


@contextlib.contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Meanwhile the calling thread, and threads that it starts, may not read the folder."""
    before = folder.stat().st_mode
    folder.chmod(0)
    try:
        with (
            _as_others() if os.geteuid() == 0 and os.uname().sysname == "Linux" else contextlib.nullcontext()
        ):
            with pytest.raises(PermissionError):
                os.listdir(folder)
            yield
    finally:
        folder.chmod(before & 0o7777)


def unprivileged() -> list[str]:
    """What a command begins with so that its process heeds modes, also as root."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv of util-linux, or another account than root")
    return [setpriv, "--bounding-set", "-dac_override,-dac_read_search", "--"]


def make_sick(monkeypatch: pytest.MonkeyPatch, folder: Path, error: int = errno.EIO) -> None:
    """From now on the folder can neither be listed, nor can anything in it be looked at."""
    for name in ("scandir", "stat", "listdir"):
        monkeypatch.setattr(os, name, _failing(getattr(os, name), folder, error))


def _failing(real: Any, folder: Path, error: int) -> Any:
    def checked(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | Path) and (Path(path) == folder or folder in Path(path).parents):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, *arguments, **options)

    return checked


@contextlib.contextmanager
def _as_others() -> Iterator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _VERSION, 0))
    held = ctypes.create_string_buffer(24)
    if libc.capget(header, held) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("=6I", held.raw))
    words[0] &= ~_READS_ALL  # the effective ones; the permitted ones bring them back
    less = ctypes.create_string_buffer(struct.pack("=6I", *words), 24)
    if libc.capset(header, less) != 0:
        raise OSError(ctypes.get_errno(), "capset")
    try:
        yield
    finally:
        libc.capset(header, held)
