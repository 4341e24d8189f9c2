"""Gives back what MLX's ring group keeps for sums over the group, of which a carrier makes none: 32 MiB.

MLX fills them with zeros when a group forms, so they are taken although nobody uses them. Linux gives zeros
again for a page that was given back, so nothing changes for MLX. Elsewhere they stay.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

SUM_BYTES = 4 * (8 << 20)
"""Two neighbours, and two buffers for each."""

_MAPPED = 2
"""How the GNU C library marks a block that has a mapping of its own, in the size that stands before it."""


def give_back_sums() -> int:
    """Returns how many bytes were given back: 0 where the block is not found, or holds anything but zeros."""
    if not sys.platform.startswith("linux"):
        return 0
    library = ctypes.CDLL(None)
    given = 0
    for address in _blocks(SUM_BYTES):
        first = address + mmap.PAGESIZE  # the first page holds the size
        if _all_zeros(library, first, SUM_BYTES):
            block = (ctypes.c_void_p(first), ctypes.c_size_t(SUM_BYTES))
            if library.madvise(*block, ctypes.c_int(mmap.MADV_DONTNEED)) == 0:
                given += SUM_BYTES
    return given


def _blocks(size: int) -> Iterator[int]:
    """Where blocks of just this size begin that the GNU C library has mapped."""
    taken = size + mmap.PAGESIZE
    for start, end in _private_memory():
        if end - start < taken:
            continue
        words = memoryview((ctypes.c_uint64 * ((end - start) // 8)).from_address(start)).cast("B").cast("Q")
        for page, found in enumerate(words[1 :: mmap.PAGESIZE // 8]):
            begin = start + page * mmap.PAGESIZE
            if found == taken | _MAPPED and begin + taken <= end:
                yield begin


def _private_memory() -> list[tuple[int, int]]:
    """Begin and end of this process's mappings that are no file's, no other process's and no stack."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, file, *name = line.split()
        if access == "rw-p" and file == "0" and not name:
            start, _, end = place.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def _all_zeros(library: ctypes.CDLL, address: int, size: int) -> bool:
    if ctypes.c_ubyte.from_address(address).value:
        return False
    shifted = (ctypes.c_void_p(address), ctypes.c_void_p(address + 1), ctypes.c_size_t(size - 1))
    return bool(library.memcmp(*shifted) == 0)
