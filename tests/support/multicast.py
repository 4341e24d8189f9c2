"""The group of multicast DNS, which all processes of a machine share: one test at a time has it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = os.path.join(tempfile.gettempdir(), f"sealring-tests-multicast-{os.getuid()}")


@contextmanager
def alone() -> Iterator[None]:
    """What is announced or heard by multicast within the block is of no other test, of this run or another.

    No process holds it any more once it has ended, however it has.
    """
    with open(_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
