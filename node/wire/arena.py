"""Anonymous shared memory between an engine and a carrier, divided into slots.

The memory has a name for microseconds only (none at all on Linux), so nothing of it is ever on disk or
reachable by another process.
"""

from __future__ import annotations

import importlib
import mmap
import os
import secrets
import sys
from typing import Any

from sealring.mesh.errors import ResourceExhausted

SLOT_BYTES = (16 << 20) + 4096  # one record of the largest size and its tag
SLOTS = 6
ARENA_BYTES = SLOT_BYTES * SLOTS


def create_arena() -> int:
    """A descriptor of ARENA_BYTES of zeroed shared memory; pages are taken when first written.

    Raises ResourceExhausted (NO_SHARED_MEMORY).
    """
    try:
        descriptor = _anonymous_descriptor()
        os.ftruncate(descriptor, ARENA_BYTES)
    except OSError as error:
        raise ResourceExhausted(
            f"no shared memory for the data channel: {error.strerror}",
            hint="free memory or raise the limit on open files",
            reason="NO_SHARED_MEMORY",
        ) from None
    return descriptor


def _anonymous_descriptor() -> int:
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create("sealring", os.MFD_CLOEXEC)
    # A private module of CPython, used by multiprocessing.shared_memory, whose class keeps the name.
    _posixshmem: Any = importlib.import_module("_posixshmem")
    name = f"/sr-{secrets.token_hex(8)}"
    descriptor: int = _posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    _posixshmem.shm_unlink(name)
    return descriptor


class Arena:
    """The mapping of an arena in one process."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, ARENA_BYTES)
        self._view = memoryview(self._map)
        os.close(descriptor)

    def slot(self, index: int, length: int) -> memoryview:
        """The first `length` bytes of a slot, writable. Raises ValueError outside the arena."""
        if not 0 <= index < SLOTS or not 0 <= length <= SLOT_BYTES:
            raise ValueError("slot outside the arena")
        start = index * SLOT_BYTES
        return self._view[start : start + length]

    def close(self) -> None:
        """Unmaps the memory, unless a slot is in use; the end of the process does it then."""
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass
