"""Copies a child's standard error to the daemon's log: events, error types and places, but no content.

Children log JSON through `mesh/system/logging.py`, which keeps content out. Even so, only the event, the
reason or type of an error and its frames are copied. Other lines are copied only in parts that cannot hold
content: places and exception types of a traceback, sentences of MLX, and sentences of macOS about the end of
a process. A sentence counts only at the beginning of a line, after the prefix of the runtime. Further on it
may be part of a prompt that a library quotes.
"""

from __future__ import annotations

import asyncio
import json
import re

import structlog

from sealring.mesh.system.logging import MLX_MESSAGE

log = structlog.get_logger()

_CHUNK = 16384
_MAX_LINE = 8192
_MAX_EVENT = 200
_PLACE = re.compile(r'\s*File "[^"]{1,300}", line \d{1,7}, in [\w<>.]{1,80}')
_RUNTIME_ERROR = re.compile(rf"RuntimeError: {MLX_MESSAGE}")
_EXCEPTION = re.compile(r"((?:\w+\.){0,6}\w{0,80}(?:Error|Exception|Exit|Interrupt|Ended|Input|Exhausted))\b")
_STAMP = r"(?:\d{4}-\d\d-\d\d [\d:.+-]{1,24} [\w.-]{1,40}\[[\da-fx:]{1,24}\] )?"
"""The prefix of macOS for a line of the system's log on standard error."""
_ABI = r"libc\+\+abi: terminating(?:(?: [a-z]{1,20}){0,5} of type [\w:]{1,80}|(?: [a-z]{1,20}){0,5})"
_MLX = re.compile(rf"{_STAMP}(?:{_ABI}[: ]{{1,2}}|  what\(\):  )?{MLX_MESSAGE}")
_MACOS = re.compile(
    rf"{_STAMP}(?:{_ABI}|Fatal Python error: [\w ]{{1,80}}"
    r"|objc\[\d{1,7}\]: Class \w{1,80} is implemented in both [ -~]{1,300}"
    r"|dyld\[\d{1,7}\]: (?:Library not loaded|Symbol not found): [ -~]{1,200}"
    r"|(?:[-+]\[\w{1,80} [\w:]{1,160}\]:\d{1,5}: )?failed assertion [ -~]{1,200}"
    r"|(?:MTLCompiler: |Compiler failed to |Execution of the command buffer was )[ -~]{1,200})"
)
"""Lines of C++, Python, the Objective-C runtime, the linker, and Metal with its compiler."""
_ERROR = re.compile(
    rf"[A-Z][A-Z0-9_]{{2,60}}(?=: )|RuntimeError: {MLX_MESSAGE}\Z|\w{{1,80}}(?: errno \d{{1,5}})?\Z"
)
_FRAME = re.compile(r"  [^\s\"']{1,300}:\d{1,7} [\w<>.]{1,80}\Z")
_MAX_FRAMES = 20
_LEVELS = frozenset({"debug", "info", "warning", "error"})


class ChildLog:
    """The reader of one child's standard error."""

    def __init__(self, child: str, pid: int) -> None:
        self._log = log.bind(child=child, child_pid=pid)
        self._unknown = 0

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Reads until the stream ends; lines are cut at 8 KiB."""
        line = b""
        while chunk := await stream.read(_CHUNK):
            first, *rest = chunk.split(b"\n")
            line = (line + first)[:_MAX_LINE]
            for following in rest:
                self._take(line)
                line = following[:_MAX_LINE]
        if line:
            self._take(line)
        if self._unknown:
            self._log.warning("child_lines_not_logged", lines=self._unknown)

    def _take(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace").strip("\r")
        entry = _parse(text)
        if entry is not None:
            level, fields = entry
            getattr(self._log, level)("child_log", **fields)
            return
        for pattern in (_PLACE, _RUNTIME_ERROR, _EXCEPTION, _MLX, _MACOS):
            match = pattern.match(text)
            if match is not None:
                self._log.warning("child_log", said=match[0].strip())
                return
        if text.strip():
            self._unknown += 1


def _parse(text: str) -> tuple[str, dict[str, str | list[str]]] | None:
    """Level and fields of a JSON line; None for another line."""
    if not text.startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    event = entry.get("event") if isinstance(entry, dict) else None
    if not isinstance(event, str):
        return None
    fields: dict[str, str | list[str]] = {"said": event[:_MAX_EVENT]}
    error, frames, level = entry.get("error"), entry.get("exception"), entry.get("level")
    if isinstance(error, str) and (match := _ERROR.match(error)):
        fields["error"] = match[0]
    if isinstance(frames, list):
        fields["exception"] = [kept for line in frames[:_MAX_FRAMES] if (kept := _frame(line))]
    return (level if level in _LEVELS else "info"), fields


def _frame(line: object) -> str:
    """The part of a line of `exception` to log: a place, an error's reason or type, or nothing."""
    if not isinstance(line, str):
        return ""
    match = _FRAME.match(line) or _ERROR.match(line)
    return match[0] if match else ""
