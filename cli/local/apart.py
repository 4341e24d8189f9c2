"""Asks a process of its own to run a model's code, which may take the process down with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from sealring.mesh.errors import ModelError
from sealring.node.engine.apart import result_of

EXACT = {"MLX_ENABLE_TF32": "0"}
"""For MLX, which reads it when it is imported: rows in a batch are compared with rows alone, and an M5's GPU
multiplies float32 matrices of more than a few rows with 10 bits of mantissa otherwise."""


def ask_apart(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The result that `sealring.node.engine.apart.answer` prints in `python -m module arguments`.

    Raises the SealringError that it prints, and ModelError (MODEL_CRASHES) where a signal ended the process.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    done = subprocess.run(  # noqa: S603
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=os.environ | EXACT
    )
    if done.returncode < 0:
        raise crash(done.returncode)
    return result_of(done.stdout, done.stderr.decode(errors="replace").strip().rpartition("\n")[2])


def crash(status: int) -> ModelError:
    """The error for a process that a signal ended; `status` is its negative return code."""
    return ModelError(
        f"mlx died of {signal.Signals(-status).name} while it ran this model's code",
        reason="MODEL_CRASHES",
        hint="see whether mlx_lm.generate runs this model on this machine",
    )
