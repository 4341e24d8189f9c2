"""`sealring` whose engines have a slow disk for prefixes: `python slow_disk.py ARGUMENTS`.

The same file is then the engine, as `python -m slow_disk`.
"""

from __future__ import annotations

import sys
import time

import hasty

SECONDS = 2.0
"""For each block that is opened, to be read or written."""


def slow() -> None:
    """An engine."""
    from sealring.node.engine import main

    def wait(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and ".block" in str(arguments[0]):
            time.sleep(SECONDS)

    sys.addaudithook(wait)
    main.main()


if __name__ == "__main__":
    slow() if "--control-fd" in sys.argv else hasty.main("slow_disk")
