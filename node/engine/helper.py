"""Processes of our own that answer an engine's questions within limits, and may be killed at any moment.

They run a template that came with a model, and read schemas and images of requests.
Such work may go on or grow without end, and its input may take it over. A thread cannot be ended, and memory
that is gone is the engine's. So such a process is confined (node/engine/confining.py) before its input comes,
and its answers are checked before they are used.

Questions and answers are JSON objects, each on a line of its own. A message may have bytes under `data`: then
the line holds their number there, and they follow it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sealring.mesh.errors import FailedPrecondition, SealringError, Unavailable
from sealring.mesh.system.starting import Starts, starting
from sealring.node.engine.confining import confine

T = TypeVar("T")

WALL_SECONDS = 20.0
"""For each answer, however busy the machine is: a process that is stopped, or waits, needs no processor."""

START_SECONDS = 60.0
"""For a start and its first answer. Libraries may come from a disk that the model's weights are read from
meanwhile, and a model whose viewer does not start sees no images until it is loaded again."""

MEMORY_BYTES = 256 << 20
"""A process has as much at most, as `memory_of` counts: a head's plan leaves it. Looked at from outside, for
macOS holds no process to RLIMIT_AS."""

LINE_BYTES = 1 << 20
"""An answer without its data has as much at most. Parsed, it takes forty times as much of the engine."""

_LOOK_SECONDS = 0.02
_PART_BYTES = 1 << 16
_REAP_SECONDS = 1.0
_OUT_OF_MEMORY = 77
"""The status with which a process ends that was refused memory."""

BROKEN = frozenset(
    (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
    )
)
"""Signals that a process gets for what it does itself."""

_Process = subprocess.Popen[bytes]


@cache
def _starts_of(module: str) -> Starts:
    return Starts(module, START_SECONDS)


class OverLimitsError(Exception):
    """A question takes more of a processor or of memory than it may, or has broken two processes. The fault
    is the client's."""


class _LostError(Exception):
    """No answer has come, and the process is ended: somebody else has ended it, it was late, or, if it is
    `broken`, it crashed or answered what is no answer."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken


class Helpers:
    """Processes of one kind, at most `most` at once: started when they are first asked, and anew once one has
    ended. Any thread.

    Each start begins with the question `first`, whose answer is given to `begun`. The processes end with
    `close`, and with this object where nobody has closed it.

    Functions that read answers check them, which may be anything. They raise ValueError, TypeError or
    KeyError for what is no answer, and may raise a SealringError for one that refuses.
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
        """`memory` bounds the bytes that a process takes, `data` those of an answer behind its line."""
        self._starts = _starts_of(module)
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._first = first
        self._begun = begun
        self._bounds = memory, data
        self._turn = threading.Semaphore(most)
        self._idle: deque[_Process] = deque()
        self._closing = weakref.finalize(self, _end_all, self._idle)

    def ask(self, question: Mapping[str, Any], read: Callable[[dict[str, Any]], T]) -> T:
        """What `read` makes of the answer. Waits while `most` others are asked.

        The bytes of an answer are a memoryview. Where a process is ended by others or late, another one is
        asked, once. Raises OverLimitsError, what `begun` and `read` raise, FailedPrecondition (NOT_CONFINED),
        and Unavailable: NO_PROCESS where the system lets none begin, NO_ANSWER where both were lost.
        """

        def put(process: _Process | None) -> T:
            if process is None:
                try:
                    process = self._begin()
                except OverLimitsError:  # no question has come yet, so this is nobody's fault
                    raise _LostError from None
            try:
                answer = self._exchange(process, question, WALL_SECONDS, read)
            except SealringError:
                self._keep(process)
                raise
            self._keep(process)
            return answer

        with self._turn:
            return self._twice(put)

    def prepare(self) -> None:
        """Starts a process where none is idle, and waits for none that is asked. Raises as `ask`;
        OverLimitsError is about the first question."""
        if self._turn.acquire(blocking=False):
            try:
                self._twice(lambda process: self._keep(process or self._begin()))
            finally:
                self._turn.release()

    def _twice(self, work: Callable[[_Process | None], T]) -> T:
        """With a process that is idle, if any is, and again with a new one if it is lost."""
        broken = True
        for process in (self._take_idle(), None):
            try:
                return work(process)
            except _LostError as error:
                broken = broken and error.broken
        if broken:
            raise OverLimitsError
        raise no_answer()

    def _begin(self) -> _Process:
        process = start_process(self._command)
        try:
            self._exchange(process, self._first, self._starts.allowed(), self._check_begun)
        except SealringError:
            _end(process)
            raise
        self._starts.ready()
        return process

    def _check_begun(self, answer: dict[str, Any]) -> None:
        if "unconfined" in answer:
            raise not_confined(answer["unconfined"])
        self._begun(answer)

    def _exchange(
        self,
        process: _Process,
        question: Mapping[str, Any],
        seconds: float,
        read: Callable[[dict[str, Any]], T],
    ) -> T:
        """Ends the process unless it answers. Raises OverLimitsError, _LostError, and what `read` raises."""
        try:
            return read(_exchange(process, question, seconds, *self._bounds))
        except SealringError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            _end(process)
            raise _LostError(broken=True) from None
        except TimeoutError:
            _end(process)
            raise _LostError from None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAP_SECONDS)  # its status says why
            status = _end(process)
            if status in (-signal.SIGPROF, _OUT_OF_MEMORY):
                raise OverLimitsError from None
            raise _LostError(broken=-status in BROKEN) from None
        except BaseException:
            _end(process)
            raise

    def _keep(self, process: _Process) -> None:
        self._idle.append(process)
        if not self._closing.alive:  # closed meanwhile
            _end_all(self._idle)

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


def start_process(command: list[str]) -> _Process:
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


def no_answer() -> Unavailable:
    """The error of a request about which two processes were asked that were ended or stood still."""
    return Unavailable(
        "the head's process that looks at such requests was ended, or stood still, and so did the next one",
        hint="try again; if it lasts, the head's machine has no memory left, or something ends its processes",
        reason="NO_ANSWER",
    )


def not_confined(why: object) -> FailedPrecondition:
    return FailedPrecondition(
        f"a process that reads what strangers send cannot be confined on this machine: {str(why)[:200]}",
        hint="a container's policy must let processes give up rights: seccomp(2) with a filter of their own",
        reason="NOT_CONFINED",
    )


def _end(process: _Process) -> int:
    """Ends the process, and those that it has forked; its status."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # its group has no member any more
        process.kill()
    process.communicate()
    return process.returncode


def _end_all(processes: deque[_Process]) -> None:
    with contextlib.suppress(IndexError):
        while True:
            _end(processes.pop())


def _exchange(
    process: _Process, question: Mapping[str, Any], seconds: float, memory: int, data: int
) -> dict[str, Any]:
    """Raises OverLimitsError, TimeoutError, EOFError or OSError where the process ends, and ValueError for
    what is no answer.

    No thread keeps the time: at the end of memory Python waits for ever for one that could not begin.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    until = time.monotonic() + seconds
    for part in _packed(question):
        unsent = memoryview(part).cast("B")
        while unsent:
            wait_for(process.stdin.fileno(), select.POLLOUT, until, process.pid, memory)
            unsent = unsent[os.write(process.stdin.fileno(), unsent[:_PART_BYTES]) :]
    output = process.stdout.fileno()
    line = bytearray()
    while b"\n" not in line[-_PART_BYTES:]:
        wait_for(output, select.POLLIN, until, process.pid, memory)
        part = os.read(output, _PART_BYTES)
        line += part
        if not part:
            raise EOFError
        if len(line) > LINE_BYTES + data:
            raise ValueError
    head, _, begun = line.partition(b"\n")
    answer = json.loads(head) if len(head) <= LINE_BYTES else None
    if not isinstance(answer, dict):
        raise ValueError
    size = answer.get("data", 0)
    if type(size) is not int or not len(begun) <= size <= data:
        raise ValueError
    if "data" in answer:
        content = memoryview(bytearray(size))
        content[: len(begun)] = begun
        at = len(begun)
        while at < size:
            wait_for(output, select.POLLIN, until, process.pid, memory)
            read = os.readv(output, [content[at : at + _PART_BYTES]])
            if not read:
                raise EOFError
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


def wait_for(descriptor: int, event: int, until: float, process: int, memory: int) -> None:
    """Raises TimeoutError and OverLimitsError for a process that is late or has grown too large: also for one
    that answers byte by byte, of which there is always something to read."""
    poll = select.poll()
    poll.register(descriptor, event)
    ready = False
    while not ready:
        ready = bool(poll.poll(_LOOK_SECONDS * 1000))
        if memory_of(process) > memory:
            raise OverLimitsError
        if time.monotonic() > until:
            raise TimeoutError


_RUSAGE = struct.Struct("=16x7Q Q 2Q")
"""rusage_info_v0 (sys/resource.h of macOS): a UUID, seven numbers, ri_phys_footprint, two more."""


def memory_of(process: int) -> int:
    """Bytes of a process in memory; 0 of a process that has ended. macOS compresses pages, which are no
    longer resident and count all the same."""
    return {"darwin": _footprint}.get(sys.platform, _resident)(process)


def _footprint(process: int) -> int:
    found = ctypes.create_string_buffer(_RUSAGE.size)
    failed = ctypes.CDLL("/usr/lib/libproc.dylib").proc_pid_rusage(process, 0, found)
    return 0 if failed else int(_RUSAGE.unpack(found)[7])


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def hold_to(address: int) -> None:
    """Holds this process to `address` bytes of address space, where the system can."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (address, address))


def serve(
    answer: Callable[[dict[str, Any]], Mapping[str, Any]],
    seconds: float,
    *,
    confined_first: bool = False,
    forks: bool = False,
) -> None:
    """The loop of such a process: answers messages with messages until its input ends.

    The `data` of a question are bytes, those of an answer bytes or a sequence of buffers. A signal ends the
    process where one answer takes more than `seconds` of a processor. It is confined once the first question
    is answered, for which it may read files and import code, or before that if it is `confined_first`. Where
    it cannot be, it says so instead, and ends. `forks` is as `confine` has it.
    """
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    begins = True
    for line in questions:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        question: dict[str, Any] = json.loads(line)
        if "data" in question:
            question["data"] = questions.read(question["data"])
        refused: Mapping[str, Any] = {}
        try:
            if begins and confined_first:
                refused = _confine(forks)
            said = refused or answer(question)
            if begins and not confined_first:
                refused = _confine(forks)
            for part in _packed(refused or said):
                answers.write(part)
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if refused:
            return
        begins = False
        del question, said, part  # an image's arrays, beside which the next one's would be made


def _confine(forks: bool) -> Mapping[str, Any]:
    """What there is to say where this process cannot be confined."""
    try:
        confine(forks=forks)
    except OSError as error:
        return {"unconfined": str(error)}
    return {}
