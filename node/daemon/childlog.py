"""A child's standard error, line by line, into the daemon's log: events, error types and places.

Children log JSON through `mesh/system/logging.py`, which keeps content out; even so only the event, an
error's reason or type and its frames are taken over. Of any other line only what cannot hold content is
kept: a traceback's places and exception types, and the ring's own notices.
"""

from __future__ import annotations

import asyncio
import json
import re

import structlog

log = structlog.get_logger()

_CHUNK = 16384
_MAX_LINE = 8192
_MAX_EVENT = 200
_PLACE = re.compile(r'\s*File "[^"]{1,300}", line \d{1,7}, in [\w<>.]{1,80}')
_EXCEPTION = re.compile(r"((?:\w+\.){0,6}\w{0,80}(?:Error|Exception|Exit|Interrupt|Ended|Input|Exhausted))\b")
_RING = re.compile(r"\[(?:ring|jaccl|metal|cuda)\][ -~]{0,160}")
_ERROR = re.compile(r"[A-Z][A-Z0-9_]{2,60}(?=: )|\w{1,80}(?: errno \d{1,5})?\Z")
_FRAME = re.compile(r"  [^\s\"']{1,300}:\d{1,7} [\w<>.]{1,80}\Z")
_MAX_FRAMES = 20
_LEVELS = frozenset({"debug", "info", "warning", "error"})


class ChildLog:
    """The reader of one child's standard error."""

    def __init__(self, child: str, pid: int) -> None:
        self._log = log.bind(child=child, child_pid=pid)
        self._unknown = 0

    async def follow(self, stream: asyncio.StreamReader) -> None:
        """Reads until the stream ends; a line beyond 8 KiB is cut."""
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
        for pattern in (_PLACE, _EXCEPTION, _RING):
            match = pattern.match(text)
            if match is not None:
                self._log.warning("child_log", said=match[0].strip())
                return
        if text.strip():
            self._unknown += 1


def _parse(text: str) -> tuple[str, dict[str, str | list[str]]] | None:
    """Level and fields of a JSON line."""
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
    """A line of `exception`: a place as it is, an error's reason or type, or nothing."""
    if not isinstance(line, str):
        return ""
    match = _FRAME.match(line) or _ERROR.match(line)
    return match[0] if match else ""
