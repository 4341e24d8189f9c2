"""A process that must not outlive its parent: a pipe whose write end the parent alone holds.

However the parent ends, SIGKILL included, the kernel closes the pipe; the child then stops as on SIGTERM.
The pipe works alike on Linux and macOS, and whichever thread of the parent started the child.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
import time

from sealring.mesh.errors import InvalidInput

GRACE_SECONDS = 8.0


def die_with_parent(descriptor: int) -> None:
    """Ends this process once the pipe behind `descriptor` does. Raises InvalidInput (BAD_DESCRIPTOR)."""
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except (OSError, OverflowError):
        is_pipe = False
    if not is_pipe:
        raise InvalidInput(f"descriptor {descriptor} is not a pipe", reason="BAD_DESCRIPTOR")
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_watch, args=(descriptor,), name="lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)
