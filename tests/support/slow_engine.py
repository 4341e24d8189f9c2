"""The engine, with a step that takes as long as a big one on a small machine: a prefill at the head, a decode
step at the tail. That it was slow it leaves as a file in the temporary folder."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from sealring.mesh.ring import ResolvedStep
from sealring.node.engine import StageEpoch, main

SLOW_SECONDS = 6.0
SLOW_STEPS = {"head": 1, "tail": 5}

_genuine = StageEpoch.execute


def markers(folder: Path) -> list[Path]:
    """What slow engines leave."""
    return [folder / f"slow-{end}" for end in SLOW_STEPS]


def _slow(self: StageEpoch, step: ResolvedStep) -> None:
    end = "head" if self.is_head else "tail"
    if step.number == SLOW_STEPS[end]:
        time.sleep(SLOW_SECONDS)
        (Path(tempfile.gettempdir()) / f"slow-{end}").touch()
    _genuine(self, step)


if __name__ == "__main__":
    StageEpoch.execute = _slow  # type: ignore[method-assign]
    main.main()
