"""What starting a child process can raise."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Raises OSError (EAGAIN) for a child that ended before it was a program; every start is in such a block.

    CPython raises SubprocessError then, which is no OSError, if the child left half a word. `fork` gives it
    more time to do so than `vfork`, and macOS has only `fork`. TimeoutExpired stays what it is.
    """
    try:
        yield
    except subprocess.TimeoutExpired:
        raise
    except subprocess.SubprocessError as error:
        raise OSError(errno.EAGAIN, f"a process ended before it began: {error}") from None
