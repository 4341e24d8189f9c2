"""The engine, with a step now and then that takes as long as a big one on a small machine."""

from __future__ import annotations

import time

from mesh.composition import ResolvedStep
from node.engine import main
from node.engine.epoch import Epoch

SLOW_SECONDS = 8.0
SLOW_STEPS = (1, 5)
"""A prefill and a decode step."""

_genuine = Epoch.execute


def _slow(self: Epoch, step: ResolvedStep) -> None:
    if step.number in SLOW_STEPS:
        time.sleep(SLOW_SECONDS)
    _genuine(self, step)


if __name__ == "__main__":
    Epoch.execute = _slow  # type: ignore[method-assign]
    main.main()
