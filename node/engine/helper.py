"""Processes of our own that answer an engine's questions within limits, and may be killed at any moment.

What runs there may run or grow without end: a template that came with a model, a schema or an image that
came with a request, a parser over what a model wrote. A thread cannot be ended, and memory that is gone is
the engine's.

Questions and answers are JSON objects, each on a line of its own. A message may have bytes under `data`: then
the line holds their number there, and they follow it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sealring.mesh.errors import Unavailable
from sealring.mesh.system.starting import starting

WALL_SECONDS = 20.0
"""For each answer, however busy the machine is: a process that is stopped, or waits, needs no processor."""

START_SECONDS = 60.0
"""For a start and its first answer. Libraries may come from a disk that the model's weights are read from
meanwhile, and a model whose viewer does not start sees no images until it is loaded again."""

MEMORY_BYTES = 256 << 20
"""Resident, of a process: a head's plan leaves as much. Looked at from outside, for macOS holds no process to
RLIMIT_AS."""

_LOOK_SECONDS = 0.02
_ANSWER_BYTES = 24 << 20
_PART_BYTES = 1 << 16

_Process = subprocess.Popen[bytes]


class Helpers:
    """Processes of one kind, at most `most` at once: started when they are first asked, and anew once one has
    come to its limits. Any thread.

    Each start begins with the question `first`, whose answer is given to `begun`, which may raise. The
    processes end with `close`, and with this object where nobody has closed it.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        first: Mapping[str, Any],
        most: int,
        begun: Callable[[dict[str, Any]], None] = lambda answer: None,
        memory: int = MEMORY_BYTES,
        data: int = 0,
    ) -> None:
        """`memory` bounds the resident bytes of a process, `data` the bytes of an answer behind its line."""
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._first = first
        self._begun = begun
        self._bounds = memory, data
        self._turn = threading.Semaphore(most)
        self._idle: deque[_Process] = deque()
        self._closing = weakref.finalize(self, _end_all, self._idle)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer; None where the process came to its limits. Waits while `most` others are asked.

        The bytes of an answer are a memoryview.

        Raises what `begun` raises, and Unavailable (NO_PROCESS) where the system lets none begin.
        """
        with self._turn:
            return self._ask([question])

    def prepare(self) -> None:
        """Starts a process where none is idle, and waits for none that is asked. Raises as `ask`."""
        if self._turn.acquire(blocking=False):
            try:
                self._ask([])
            finally:
                self._turn.release()

    def _ask(self, questions: list[Mapping[str, Any]]) -> dict[str, Any] | None:
        answer: dict[str, Any] | None = {}
        process = self._take_idle()
        begins = process is None
        process = process or _start(self._command)
        whole = False
        try:
            if begins:
                self._begun(_exchange(process, self._first, START_SECONDS, *self._bounds))
            for question in questions:
                answer = _exchange(process, question, WALL_SECONDS, *self._bounds)
            whole = True
        except (OSError, ValueError):
            answer = None
        finally:
            if whole:
                self._idle.append(process)
            else:
                _end(process)
        if not self._closing.alive:  # closed meanwhile
            _end_all(self._idle)
        return answer

    def _take_idle(self) -> _Process | None:
        """One that has not been ended from outside while it was idle."""
        with contextlib.suppress(IndexError):
            while (process := self._idle.pop()).poll() is not None:
                _end(process)
            return process
        return None

    def close(self) -> None:
        """Ends the processes that are idle, and each other one when it has answered."""
        self._closing()


def _start(command: list[str]) -> _Process:
    """Raises Unavailable (NO_PROCESS)."""
    try:
        with starting():
            process = subprocess.Popen(  # noqa: S603  # our own module
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
    except OSError:
        raise no_process() from None
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)  # a part of a long question is written, not waited for
    return process


def no_process() -> Unavailable:
    """The error of a request for which this machine could start no process. Nothing is wrong with it."""
    return Unavailable(
        "the head could start no process to look at the request",
        hint="try again; if it lasts, the head's machine runs too many processes or has no memory left",
        reason="NO_PROCESS",
    )


def _end(process: _Process) -> None:
    """Ends the process, and those that it has forked."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # its group has no member any more
        process.kill()
    process.communicate()


def _end_all(processes: deque[_Process]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            _end(processes.pop())


def _exchange(
    process: _Process, question: Mapping[str, Any], seconds: float, memory: int, data: int
) -> dict[str, Any]:
    """Raises ValueError or OSError where the process ends or is at its limits.

    No thread keeps the time: at the end of memory Python waits for ever for one that could not begin.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    until = time.monotonic() + seconds
    for part in _packed(question):
        unsent = memoryview(part).cast("B")
        while unsent:
            _wait(process.stdin.fileno(), select.POLLOUT, until, process.pid, memory)
            unsent = unsent[os.write(process.stdin.fileno(), unsent[:_PART_BYTES]) :]
    output = process.stdout.fileno()
    line = bytearray()
    while b"\n" not in line[-_PART_BYTES:]:
        _wait(output, select.POLLIN, until, process.pid, memory)
        part = os.read(output, _PART_BYTES)
        line += part
        if not part or len(line) > _ANSWER_BYTES:
            raise ValueError
    head, _, begun = line.partition(b"\n")
    answer: dict[str, Any] = json.loads(head)
    size = answer.get("data", 0)
    if not len(begun) <= size <= data:
        raise ValueError
    if "data" in answer:
        content = memoryview(bytearray(size))
        content[: len(begun)] = begun
        at = len(begun)
        while at < size:
            _wait(output, select.POLLIN, until, process.pid, memory)
            read = os.readv(output, [content[at : at + _PART_BYTES]])
            if not read:
                raise ValueError
            at += read
        answer["data"] = content
    return answer


def _packed(message: Mapping[str, Any]) -> Sequence[Any]:
    """The parts of a message as they are written: its line, and the buffers of its `data`."""
    data = message.get("data", ())
    buffers = [data] if isinstance(data, bytes) else data
    if "data" in message:
        message = {**message, "data": sum(memoryview(one).nbytes for one in buffers)}
    return [json.dumps(message).encode() + b"\n", *buffers]


def _wait(descriptor: int, event: int, until: float, process: int, memory: int) -> None:
    """Raises TimeoutError, an OSError, and ValueError where the process has grown too large."""
    poll = select.poll()
    poll.register(descriptor, event)
    while not poll.poll(_LOOK_SECONDS * 1000):
        if _resident(process) > memory:
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


def hold_to(address: int) -> None:
    """Holds this process to `address` bytes of address space, where the system can."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (address, address))


def serve(answer: Callable[[dict[str, Any]], Mapping[str, Any]], seconds: float) -> None:
    """The loop of such a process: answers messages with messages until its input ends.

    The `data` of a question are bytes, those of an answer bytes or a sequence of buffers. A signal ends the
    process where one answer takes more than `seconds` of a processor.
    """
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    for line in questions:
        question: dict[str, Any] = json.loads(line)
        if "data" in question:
            question["data"] = questions.read(question["data"])
        signal.setitimer(signal.ITIMER_PROF, seconds)
        for part in _packed(answer(question)):
            answers.write(part)
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)
