"""Keeps memory, and so prompts and keys, out of core files. Every process calls this first.

Children inherit both settings. A debugger of the same account or of root can still read all memory. Linux
could refuse the account's own (PR_SET_DUMPABLE). This would also hide the process's open files, connections
and memory use from its owner. macOS could refuse both while System Integrity Protection is on
(PT_DENY_ATTACH), which Python reaches by ctypes alone.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_FILTER = Path("/proc/self/coredump_filter")


def forbid_core_files() -> None:
    """Forbids core files from now on, and memory in the dump that Linux pipes to a program instead.

    Linux heeds the limit only where cores are files (core(5)). Raises OSError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _FILTER.write_text("0")
