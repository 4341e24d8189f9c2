"""Where log lines go: handlers of the standard library that never stop or block the process that logs.

Their lock can be taken again by the thread that holds it: Python runs finalizers at any moment, and what
these log arrives while another line is being written.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import TextIO

from sealring.mesh.errors import ConfigError

FILE_MODE = 0o600


class StreamTarget(logging.StreamHandler[TextIO]):
    """Writes lines to a stream as long as it takes them."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """A line that cannot be written is lost; telling so would quote it."""


class FileTarget(WatchedFileHandler):
    """A log file that newsyslog may move away: it is opened again as soon as the name means another file.

    Where that fails, it is tried again with every line. Raises ConfigError (BAD_LOG_FILE).
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the log file {path}: {error.strerror}", reason="BAD_LOG_FILE"
            ) from None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line, to the file that has the name now."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """A line that cannot be written is lost; telling so would quote it."""

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_create_for_owner)


def _create_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)
