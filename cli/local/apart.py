"""Asks a process of its own to run a model's code, which may take the process down with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from sealring.mesh.errors import Internal, ModelError
from sealring.node.engine.apart import result_of

_EXACT = {"MLX_ENABLE_TF32": "0"}
"""For MLX, which reads it when it is imported: rows in a batch are compared with rows alone, and an M5's GPU
multiplies float32 matrices of more than a few rows with 10 bits of mantissa otherwise."""


def ask_apart(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The result that `sealring.node.engine.apart.answer` prints in `python -m module arguments`.

    Raises the SealringError that it prints, and ModelError (MODEL_CRASHES) where a signal ended the process.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    done = subprocess.run(  # noqa: S603
        command, stdin=subprocess.DEVNULL, capture_output=True, check=False, env=os.environ | _EXACT
    )
    if done.returncode < 0:
        raise _crash(done.returncode)
    return result_of(done.stdout, done.stderr.decode(errors="replace").strip().rpartition("\n")[2])


def ask_each_apart(
    module: str, arguments: Sequence[str], keys: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any] | ModelError]]:
    """For each key what `answers` tells in `python -m module arguments keys`, or the crash that it caused.

    One process is asked for as many as it survives. Raises Internal where it fails in another way.
    """
    waiting = list(keys)
    while waiting:
        command = [sys.executable, "-P", "-m", module, *arguments, *waiting]
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | _EXACT,
        )
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                yield waiting.pop(0), json.loads(line)
        if process.returncode < 0 and waiting:
            yield waiting.pop(0), _crash(process.returncode)
        elif waiting:
            raise Internal(f"the check of {waiting[0]} failed")


def _crash(status: int) -> ModelError:
    return ModelError(
        f"mlx died of {signal.Signals(-status).name} while it ran this model's code",
        reason="MODEL_CRASHES",
        hint="see whether mlx_lm.generate runs this model on this machine",
    )
