"""Folders that backups and search indexes leave out: a copy there would outlive what was destroyed here.

The attribute is what `tmutil addexclusion` sets (tmutil(8)). Time Machine leaves such a folder out, wherever
it is moved. Spotlight looks at no folder with `.metadata_never_index`. Other programs know `CACHEDIR.TAG`
(Cache Directory Tagging Specification), if they are run with the option for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import plistlib
from pathlib import Path

EXCLUDED = "com.apple.metadata:com_apple_backup_excludeItem"
_BY = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)

_MARKS = {
    ".metadata_never_index": b"",
    "CACHEDIR.TAG": b"Signature: 8a477f597d28d172789f06886806bc55\n",
}


def leave_out(folder: Path, attribute: str = EXCLUDED) -> None:
    """Marks a folder, as far as its disk can be written and has attributes."""
    for name, content in _MARKS.items():
        mark = folder / name
        with contextlib.suppress(OSError):
            if not mark.exists():
                mark.touch(mode=0o600)
                mark.write_bytes(content)
    with contextlib.suppress(OSError):
        _set_attribute(folder, attribute, _BY)


def _set_attribute(path: Path, name: str, value: bytes) -> None:
    """Calls setxattr(2) of the C library, since Python has `os.setxattr` on Linux only. Position and options
    are 0: Linux's function has flags in their place. Raises OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_uint32(0)
    size = ctypes.c_size_t(len(value))
    if library.setxattr(os.fsencode(path), name.encode(), value, size, zero, ctypes.c_int(0)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
