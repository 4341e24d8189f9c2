"""Keeps rich out of whatever prints no table.

structlog imports rich, where it is installed, for tracebacks on terminals. Our logs have none, and it takes 4
MiB of an engine and as much of a carrier, and a fifth of the time in which a daemon imports what it needs.
"""

from __future__ import annotations

import sys


def hide_rich() -> None:
    """From now on whoever imports rich is told that it is not installed, unless somebody has it already."""
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]


def show_rich() -> None:
    """Before rich is imported by who needs it. Does nothing where it is not hidden."""
    if sys.modules.get("rich", ...) is None:
        del sys.modules["rich"]
