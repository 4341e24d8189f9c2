"""A process of our own that answers an engine's questions within limits, and may be killed at any moment.

What runs there may run or grow without end: a template that came with a model, a schema that came with a
request. A thread cannot be ended, and memory that is gone is the engine's.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

WALL_SECONDS = 20.0
"""For each answer, however busy the machine is: a process that is stopped, or waits, needs no processor."""

MEMORY_BYTES = 256 << 20
"""Resident, of a process: a head's plan leaves as much. Looked at from outside, for macOS holds no process to
RLIMIT_AS."""

_LOOK_SECONDS = 0.02
_ANSWER_BYTES = 24 << 20
_PART_BYTES = 1 << 16


class Helper:
    """One process, which is started when it is first asked, and anew once it has come to its limits.

    Each start begins with the question `first`, whose answer is given to `begun`, which may raise. Used by
    one thread at a time.
    """

    def __init__(
        self, module: str, *arguments: str, first: object, begun: Callable[[dict[str, Any]], None]
    ) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._first = first
        self._begun = begun
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: object) -> dict[str, Any] | None:
        """The answer; None where the process came to its limits. Raises what `begun` raises."""
        try:
            return _exchange(self._process or self._start(), question)
        except (OSError, ValueError):
            self.close()
            return None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process, and those that it has forked."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:  # its group has no other member any more
            process.kill()
        process.communicate()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603  # our own module
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self._process = process
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a part of a long question is written, not waited for
        self._begun(_exchange(process, self._first))
        return process


def _exchange(process: subprocess.Popen[bytes], question: object) -> dict[str, Any]:
    """Raises ValueError or OSError where the process ends or is at its limits.

    No thread keeps the time: at the end of memory Python waits for ever for one that could not begin.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    until = time.monotonic() + WALL_SECONDS
    unsent = memoryview(json.dumps(question).encode() + b"\n")
    while unsent:
        _wait(process.stdin.fileno(), select.POLLOUT, until, process.pid)
        unsent = unsent[os.write(process.stdin.fileno(), unsent[:_PART_BYTES]) :]
    line = bytearray()
    while not line.endswith(b"\n"):
        _wait(process.stdout.fileno(), select.POLLIN, until, process.pid)
        part = os.read(process.stdout.fileno(), _PART_BYTES)
        line += part
        if not part or len(line) > _ANSWER_BYTES:
            raise ValueError
    answer: dict[str, Any] = json.loads(line)
    return answer


def _wait(descriptor: int, event: int, until: float, process: int) -> None:
    """Raises TimeoutError, an OSError, and ValueError where the process has grown too large."""
    poll = select.poll()
    poll.register(descriptor, event)
    while not poll.poll(_LOOK_SECONDS * 1000):
        if _resident(process) > MEMORY_BYTES:
            raise ValueError
        if time.monotonic() > until:
            raise TimeoutError


def _resident(process: int) -> int:
    """Bytes; 0 of a process that has ended."""
    import psutil  # type: ignore[import-untyped]  # for who waits long, and never in such a process itself

    try:
        return int(psutil.Process(process).memory_info().rss)
    except psutil.Error:
        return 0


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], seconds: float) -> None:
    """The loop of such a process: answers lines of JSON with lines of JSON until its input ends.

    A signal ends it where one answer takes more than `seconds` of a processor.
    """
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)
