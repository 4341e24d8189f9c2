"""One process per state folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sealring.mesh.errors import Conflict
from sealring.mesh.system.files import unwritable


@contextmanager
def lock_state(folder: Path) -> Iterator[None]:
    """Holds the folder until the end of the block; the lock goes with the process, however it ends.

    Makes the folder with mode 0700. Raises Conflict (STATE_IN_USE), ConfigError (STATE_UNWRITABLE).
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise unwritable(folder, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise state_in_use(folder) from None
    try:
        yield
    finally:
        os.close(descriptor)


def state_in_use(folder: Path) -> Conflict:
    """What is said of a folder that another process holds."""
    return Conflict(
        f"another process uses the state folder {folder}",
        hint="it runs here already, in another terminal or as a service: stop that first",
        reason="STATE_IN_USE",
    )
