"""Keeps memory, and so prompts and keys, out of core files. Called first thing by whatever is a process.

Children inherit both settings. A debugger of the same account or of root still reads all of it. Linux could
refuse the former (PR_SET_DUMPABLE), and with it every look at a process that its own account may want: which
files and connections it has open, what memory is its own. macOS could refuse both for as long as System
Integrity Protection is on (PT_DENY_ATTACH), which Python reaches by ctypes alone.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_FILTER = Path("/proc/self/coredump_filter")


def forbid_core_files() -> None:
    """No core file from now on, and nothing of the memory in what Linux hands to a program instead.

    Linux heeds the limit only where cores are files (core(5)). Raises OSError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _FILTER.write_text("0")
