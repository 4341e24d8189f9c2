"""Asks a process of its own to run a model's code, which may take the process down with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from sealring.mesh.errors import ModelError
from sealring.node.engine.apart import result_of


def ask_apart(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What `sealring.node.engine.apart.answer` tells in `python -m module arguments`.

    Raises the SealringError that is told, and ModelError (MODEL_CRASHES) where a signal ended the process.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603
    if done.returncode < 0:
        raise ModelError(
            f"mlx died of {signal.Signals(-done.returncode).name} while it ran this model's code",
            reason="MODEL_CRASHES",
            hint="see whether mlx_lm.generate runs this model on this machine",
        )
    return result_of(done.stdout, done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
