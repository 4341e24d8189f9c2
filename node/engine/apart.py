"""Answers of a process that runs one piece of work for another, so that a crash of mlx ends only itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from sealring.mesh.errors import Internal, SealringError


def answer(work: Callable[[], dict[str, Any]]) -> int:
    """Prints what `work` returns, or the SealringError that it raises, as the one line of standard output.

    Whatever else is printed meanwhile, by libraries for one, goes to standard error.
    """
    own = _own_output()
    try:
        told: dict[str, Any] = {"result": work()}
    except SealringError as error:
        parts = {name: getattr(error, name) for name in ("code", "reason", "message", "hint", "metadata")}
        told = {"problem": parts}
    with own:
        own.write(json.dumps(told) + "\n")
    return 0 if "result" in told else 1


def answers(works: Iterable[Callable[[], dict[str, Any]]]) -> int:
    """The same for several: a line for each as soon as it is there, so that a crash loses no other's."""
    with _own_output() as own:
        for work in works:
            own.write(json.dumps(work()) + "\n")
            own.flush()
    return 0


def _own_output() -> TextIO:
    """Standard output, and whoever else writes there from now on writes to standard error."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def result_of(said: bytes, otherwise: str) -> dict[str, Any]:
    """What `answer` printed in another process. Raises the error that it told, Internal with `otherwise`."""
    try:
        told: dict[str, Any] = json.loads(said)
    except ValueError:
        raise Internal(otherwise) from None
    if "problem" in told:
        from sealring.mesh.rpc.problem import from_parts  # protobuf, which `--help` does without

        raise from_parts(**told["problem"])
    result: dict[str, Any] = told["result"]
    return result
