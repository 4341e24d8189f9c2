"""Work in a process of its own, such as a model's code: a crash of mlx ends only that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

from sealring.mesh.errors import Internal, ModelError, SealringError
from sealring.mesh.system.starting import starting

EXACT = {"MLX_ENABLE_TF32": "0"}
"""Variables that MLX reads when it is imported. An M5's GPU would multiply float32 matrices of more than a
few rows with 10 bits of mantissa, and rows in a batch are compared with rows alone."""


_SOFAR = b"done "
Tell = Callable[[int, int], None]
"""Called with the bytes that are done, and all of them."""


def ask_apart(module: str, arguments: Sequence[str], tell: Tell = lambda done, total: None) -> dict[str, Any]:
    """The result that `answer` prints in `python -m module arguments`. `tell` hears of `answer_telling`.

    Raises the SealringError that it prints, and ModelError (MODEL_CRASHES) where a signal ended the process.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    last = b""
    with tempfile.TemporaryFile() as errors:
        with starting():
            child = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | EXACT,
            )
        with child:
            try:
                for last in child.stdout or ():
                    if last.startswith(_SOFAR):
                        tell(*map(int, last[len(_SOFAR) :].split()))
            except BaseException:
                child.kill()
                raise
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    if child.returncode < 0:
        raise crash(child.returncode)
    return result_of(last, said)


def crash(status: int) -> ModelError:
    """The error for a process that a signal ended; `status` is its negative return code."""
    return ModelError(
        f"mlx died of {signal.Signals(-status).name} while it ran this model's code",
        reason="MODEL_CRASHES",
        hint="see whether mlx_lm.generate runs this model on this machine",
    )


def answer(work: Callable[[], dict[str, Any]]) -> int:
    """Prints what `work` returns, or the SealringError that it raises, as the one line of standard output.

    Anything else that is printed meanwhile, for example by libraries, goes to standard error.
    """
    return answer_telling(lambda tell: work())


def answer_telling(work: Callable[[Tell], dict[str, Any]]) -> int:
    """As `answer`, with a line before it each time that `work` says how far it is."""
    own = _own_output()

    def tell(done: int, total: int) -> None:
        own.write(f"{_SOFAR.decode()}{done} {total}\n")
        own.flush()

    try:
        printed: dict[str, Any] = {"result": work(tell)}
    except SealringError as error:
        parts = {name: getattr(error, name) for name in ("code", "reason", "message", "hint", "metadata")}
        printed = {"problem": parts}
    with own:
        own.write(json.dumps(printed) + "\n")
    return 0 if "result" in printed else 1


def answers(works: Iterable[Callable[[], dict[str, Any]]]) -> int:
    """Prints one line for each piece of work as soon as it is done, so that a crash loses no earlier one."""
    with _own_output() as own:
        for work in works:
            own.write(json.dumps(work()) + "\n")
            own.flush()
    return 0


def _own_output() -> TextIO:
    """Standard output; writes of anybody else to it go to standard error from now on."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def result_of(said: bytes, otherwise: str) -> dict[str, Any]:
    """The result that `answer` printed in another process.

    Raises the error that it printed, or Internal with the message `otherwise` if it printed neither.
    """
    try:
        printed: dict[str, Any] = json.loads(said)
    except ValueError:
        raise Internal(otherwise) from None
    if "problem" in printed:
        from sealring.mesh.rpc.problem import from_parts  # protobuf, which `--help` does without

        raise from_parts(**printed["problem"])
    result: dict[str, Any] = printed["result"]
    return result
