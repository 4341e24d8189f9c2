"""Logs of every process: structlog events without content, JSON unless the stream is a terminal.

No argument of a log call is trusted to be free of content. Fields with sensitive names are dropped, bytes
become lengths, objects become type names, and an exception becomes its type and its frames. Only errors of
our own tree, whose messages hold no content by rule, and those of MLX, which name
parts, sizes, shapes, files and devices but never the values of a computation, keep their text.

Handlers of the standard library write the lines, and never stop or block the process that logs. Their lock is
reentrant, which is needed: Python runs finalizers at any moment, and one may log while its own thread writes
another line.
"""

from __future__ import annotations

import contextlib
import enum
import io
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from logging.handlers import WatchedFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from sealring.mesh.errors import ConfigError, SealringError

LEVELS = ("debug", "info", "warning", "error")
SENSITIVE = frozenset(
    {"prompt", "prompts", "text", "texts", "message", "messages", "content", "contents", "token", "tokens"}
    | {"secret", "secrets", "key", "keys", "password", "passwords", "authorization", "envelope", "plaintext"}
    | {"input", "output", "outputs", "completion", "logits", "ids", "payload", "body", "delta", "stop", "pem"}
)
"""A field is dropped when a word of its name is one of these."""

_HARMLESS: Mapping[str, type] = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "max_tokens": int,
    "token_id": str,
    "key_type": str,
    "key_id": str,
}
"""Names with a sensitive word whose values of this type are counts, or ids of join tokens and keys."""

_OURS = "sealring"
"""The standard library's logger that our own events go through."""

_KEPT_OF_LIBRARIES = ("exc_info", "_record", "_from_structlog")
MLX_MESSAGE = (
    r"\[(?:METAL|malloc|ring|jaccl|nccl|(?:cuda|metal|load|gpu|distributed|Compile|Event)[\w:]{0,60}"
    r"|\w{1,60}::eval(?:_cpu|_gpu)?)\] ?[ -~]{0,200}"
)
"""A regular expression for a message of MLX up to the end of its line: a part in brackets, then text."""

_OF_MLX = re.compile(MLX_MESSAGE)
_MAX_STRING = 500
_MAX_ITEMS = 8
_MAX_FRAMES = 20
_FILE_MODE = 0o600


def configure(
    component: str, *, level: str = "info", stream: TextIO | None = None, file: Path | None = None
) -> None:
    """Sends every log of this process to `stream` (standard error) or to `file`, which may be rotated.

    Lines are JSON unless the stream is a terminal. Also replaces the standard library's logging and the hooks
    for uncaught exceptions, whose own output could hold content.
    Raises ConfigError (BAD_LOG_LEVEL, BAD_LOG_FILE).
    """
    if level not in LEVELS:
        raise ConfigError(
            f"log level {level[:20]!r} is unknown", hint=f"one of {', '.join(LEVELS)}", reason="BAD_LOG_LEVEL"
        )
    number = getattr(logging, level.upper())
    out = stream if stream is not None else sys.stderr
    target = StreamTarget(out) if file is None else FileTarget(file)
    common, renderer = _processors(component, terminal=file is None and out.isatty())
    target.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
            foreign_pre_chain=[_quote_library, *common],
            use_get_message=False,
        )
    )
    structlog.configure(
        processors=[*common, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: logging.getLogger(_OURS),
    )
    _take_over_standard_logging(target, number)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _log_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def end_with_any_thread() -> None:
    """Makes an uncaught error in any thread end the process from now on.

    The thread may have run out of memory, and others would wait for it for ever.
    """
    report = threading.excepthook

    def end(args: threading.ExceptHookArgs) -> None:
        try:
            report(args)
        finally:
            os._exit(1)

    threading.excepthook = end


def redact(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: drops fields with sensitive names and everything that could hold content.

    `exc_info` passes; `describe_exception` has to come next.
    """
    return {
        name: value if name == "exc_info" else _plain(value)
        for name, value in event.items()
        if not _is_sensitive(name, value)
    }


def describe_exception(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """A structlog processor: replaces `exc_info` by `error`, and by `exception`, the frames of the error or
    of its cause, whichever is not of our own tree."""
    info = event.pop("exc_info", None)
    error = _exception_of(info)
    if error is not None:
        event["error"] = _error_name(error)
        foreign = error.__cause__ if isinstance(error, SealringError) else error
        if foreign is not None and not isinstance(foreign, SealringError):
            event["exception"] = _frames(foreign)
    return event


def _quote_library(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Reduces a library's log record to the first line of its message, without arguments."""
    lines = str(event["event"]).splitlines() or [""]
    quoted = {"event": "library log", "library": event["_record"].name, "says": lines[0][:200]}
    return {**{name: event[name] for name in _KEPT_OF_LIBRARIES if name in event}, **quoted}


def _processors(component: str, *, terminal: bool) -> tuple[list[Processor], Processor]:
    """The processors of every event, and the renderer that makes a line of it."""

    def add_component(_logger: Any, _method: str, event: EventDict) -> EventDict:
        return {"component": component, "pid": os.getpid(), **event}

    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        redact,
        describe_exception,
        structlog.processors.add_log_level,
    ]
    if terminal:
        short = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        return [*common, short], structlog.dev.ConsoleRenderer()
    common += [add_component, structlog.processors.TimeStamper(fmt="iso", utc=True)]
    return common, structlog.processors.JSONRenderer(default=_type_name)


def _take_over_standard_logging(target: logging.Handler, level: int) -> None:
    root = logging.getLogger()
    for handler in [one for one in root.handlers if isinstance(one, StreamTarget | FileTarget)]:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(target)
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(_OURS).setLevel(level)
    logging.captureWarnings(True)


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, _traceback: TracebackType | None
) -> None:
    if issubclass(kind, SystemExit | KeyboardInterrupt):
        return
    structlog.get_logger().error("uncaught_exception", exc_info=error if error is not None else kind())


def _is_sensitive(name: str, value: object) -> bool:
    harmless = _HARMLESS.get(name)
    if harmless is not None and isinstance(value, harmless):
        return False
    return any(word in SENSITIVE for word in name.lower().split("_"))


def _plain(value: object, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth + 1)
    if isinstance(value, str | Path):
        shown = str(value)
        return shown if len(shown) <= _MAX_STRING else f"{shown[:_MAX_STRING]}..."
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, BaseException):
        return _error_name(value)
    if depth < 3 and isinstance(value, Mapping):
        return {
            str(name): _plain(item, depth + 1)
            for name, item in value.items()
            if not _is_sensitive(str(name), item)
        }
    if depth < 3 and isinstance(value, list | tuple | set | frozenset):
        if len(value) > _MAX_ITEMS:
            return f"<{len(value)} items>"
        return [_plain(item, depth + 1) for item in value]
    return _type_name(value)


def _type_name(value: object) -> str:
    return f"<{type(value).__name__}>"


def _error_name(error: BaseException) -> str:
    if isinstance(error, SealringError):
        return f"{error.reason}: {error}"[:_MAX_STRING]
    if isinstance(error, OSError) and error.errno is not None:
        return f"{type(error).__name__} errno {error.errno}"
    return name_with_mlx_message(error)


def name_with_mlx_message(error: BaseException) -> str:
    """The error's type, and its message if it is one of MLX's own."""
    name = type(error).__name__
    own = _OF_MLX.match(str(error)) if type(error) is RuntimeError else None
    return f"{name}: {own[0].rstrip()}" if own is not None else name


def _exception_of(info: object) -> BaseException | None:
    if isinstance(info, BaseException):
        return info
    if isinstance(info, tuple) and len(info) == 3 and isinstance(info[1], BaseException):
        return info[1]
    return sys.exc_info()[1] if info else None


def _frames(error: BaseException) -> list[str]:
    """The error's frames, innermost last, and those of its causes: file, line and function only."""
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None and len(lines) < _MAX_FRAMES:
        frames = traceback.extract_tb(link.__traceback__)[-10:]
        lines.append(_error_name(link))
        lines.extend(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return lines[:_MAX_FRAMES]


class StreamTarget(logging.StreamHandler[TextIO]):
    """Writes lines to a stream, and drops those that cannot be written."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """A line that cannot be written is lost; telling so would quote it."""


class FileTarget(WatchedFileHandler):
    """A log file that newsyslog may move away: it is opened again once its name belongs to another file.

    A failure to open it is retried with every line. Raises ConfigError (BAD_LOG_FILE).
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write the log file {path}: {error.strerror}", reason="BAD_LOG_FILE"
            ) from None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line to the file that has the name now."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the standard library's name
        """A line that cannot be written is lost; telling so would quote it."""

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_create_for_owner)


def _create_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, _FILE_MODE)
