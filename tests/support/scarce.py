"""`sealring` whose engines have no memory for long prompts: `python scarce.py ARGUMENTS`.

MLX's CPU build ends its process where it finds no memory; on a Mac it raises, and here it does too. The same
file is then the engine, as `python -m scarce`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hasty

TOKENS = 150
"""The longest prompt for which there is memory."""


def epochs_without_memory(log: Path) -> list[tuple[str, int]]:
    """The rings and epochs that ended for it, by the coordinator's log: on a busy machine an epoch may fail
    to form as well, which is no matter."""
    faults = [json.loads(line) for line in log.read_text().splitlines() if '"epoch_fault"' in line]
    return sorted({(one["ring"], one["epoch"]) for one in faults if one["why"] == "OUT_OF_MEMORY"})


def scarce() -> None:
    """An engine."""
    from sealring.node.engine import epoch, main

    genuine = epoch.StageEpoch.execute

    def execute(self: Any, step: Any) -> None:
        if any(chunk.end > TOKENS for chunk in step.chunks):
            self.fail(RuntimeError("[metal::malloc] Resource limit (499000) exceeded."))
            self.drop()
        else:
            genuine(self, step)

    epoch.StageEpoch.execute = execute  # type: ignore[method-assign]
    main.main()


if __name__ == "__main__":
    scarce() if "--control-fd" in sys.argv else hasty.main("scarce")
