"""Lines that somebody types: with editing and a history (in memory only), and Ctrl-C that acts at once."""

from __future__ import annotations

import contextlib
import sys

from sealring.cli.terminal.output import say

MAX_LINE = 1 << 20


def read_line() -> str | None:
    """The next line, stripped, or None at its end (Ctrl-D). Ctrl-C drops what was typed."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines and keeps a history with it
    while True:
        try:
            return _line().strip()
        except EOFError:
            say("")
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            say("\n(Ctrl-D ends it, /help lists the rest)")


def _line() -> str:
    """Raises EOFError."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input("> ")
    if sys.stdin.isatty():  # the answers go elsewhere, so the prompt must not go there
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline(MAX_LINE + 2)
    if not line:
        raise EOFError
    return line
