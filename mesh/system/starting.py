"""What starting a child process can raise, and how long it may take."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from collections.abc import Iterator

FIRST_SECONDS = 300.0
"""For the first start of a kind of process: macOS checks each library of a new installation when it is first
loaded."""


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


class Starts:
    """The starts of one kind of process: until one of them was ready, each may take FIRST_SECONDS."""

    def __init__(self, kind: str, seconds: float) -> None:
        """`seconds` is what later ones may take."""
        self._kind, self._seconds = kind, seconds
        self._one_was_ready = False

    def allowed(self) -> float:
        """The seconds for a start that begins now."""
        if self._one_was_ready:
            return self._seconds
        import structlog  # `sealring --help` starts nothing

        structlog.get_logger().info("first_start", kind=self._kind, may_take_seconds=FIRST_SECONDS)
        return FIRST_SECONDS

    def ready(self) -> None:
        """Notes that one was ready."""
        self._one_was_ready = True
