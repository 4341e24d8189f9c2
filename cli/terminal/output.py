"""Data on standard output, as tables or JSON; everything said to people on standard error."""

from __future__ import annotations

import base64
import datetime
import io
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from sealring.cli.terminal.telling import Telling
from sealring.mesh.system.start import show_rich
from sealring.mesh.trust.levels import level_of

if TYPE_CHECKING:
    from google.protobuf.message import Message


_TRUST_FIELDS = frozenset({"trust", "min_trust", "trust_floor"})
_BAR_WIDTH = 20
_LOOK_SECONDS = 0.5
_UNBOUNDED = 10_000
"""Columns of a table that goes to a file or a pipe: nothing is folded there."""


def write(text: str) -> None:
    """Writes text to standard output, at once. Exits if the reader has closed it (`| head -1`)."""
    if not _taken(sys.stdout, text):
        raise SystemExit(0)


def _taken(stream: TextIO, text: str) -> bool:
    """Whether there was a reader still; what else is written goes nowhere then."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def printable(text: str, *, keep: str = "", instead: str = "?") -> str:
    """Text without what could steer a terminal or turn its letters round, save the characters in `keep`."""
    return "".join(char if char.isprintable() or char in keep else instead for char in text)


def print_json(data: Any) -> None:
    """One JSON document on standard output, by itself; what does not print stands there by its number."""
    text = json.dumps(data, ensure_ascii=False, indent=2)
    write("".join(char if char.isprintable() or char == "\n" else _escaped(char) for char in text) + "\n")


def _escaped(char: str) -> str:
    return json.dumps(char)[1:-1] if char != "\x7f" else "\\u007f"


def print_data(text: str) -> None:
    """Lines of data on standard output; control characters of others do not reach the terminal."""
    write(printable(text, keep="\n\t") + "\n")


def clear_screen() -> None:
    """Empties a terminal, so that what follows stands where the last stood; a blank line elsewhere."""
    write("\x1b[H\x1b[2J" if sys.stdout.isatty() else "\n")


def say(text: str) -> None:
    """A line for people on standard error; control characters of others do not reach the terminal. It is lost
    where nobody reads, and the command goes on: its exit status tells how it ended."""
    _taken(sys.stderr, printable(text, keep="\n") + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table on standard output; a dash stands for nothing. Columns of numbers are aligned to the right."""
    show_rich()
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # no title of the table's own, which would be folded to its width
    shown: list[Any] = [Text(printable(title, keep="\n"), style="table.title")] if title else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numbers = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    shown.append(table)
    if sys.stdout.isatty():
        Console(file=sys.stdout).print(*shown, sep="\n")
    else:
        console = Console(file=io.StringIO(), width=_UNBOUNDED)
        with console.capture() as captured:
            console.print(*shown, sep="\n")
        write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))
    if not rows:
        say("(none)")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    text = "" if value is None else str(value)
    return printable(text) or "-"


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Shows `what` while the block runs: a spinner on a terminal, elsewhere lines now and then, or with
    `quiet` nothing."""
    shown = Progress(what, quiet=quiet)
    try:
        yield shown
    finally:
        shown.close()


class Progress:
    """What is being waited for. On a terminal it is one line that changes, with the time that it has taken,
    and a bar where the words have a share in them ("loading 60 %")."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        """With `quiet` nothing is said where there is no terminal."""
        self._quiet = quiet
        self._bars: Any = None
        from sealring.mesh.clock import monotonic_clock  # which brings the log, for which --help has no time

        self._clock = monotonic_clock
        self._telling = Telling(self._clock())
        self._turn, self._over = threading.Lock(), threading.Event()
        if sys.stderr.isatty():
            show_rich()
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=_BAR_WIDTH),
                TimeElapsedColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )
            self._bars.start()
            self._task = self._bars.add_task("", total=None)
        elif not quiet:
            threading.Thread(target=self._break_silences, daemon=True).start()
        self.update(what)

    def update(self, what: str, *, loud: bool = False) -> None:
        """Says what happens now; if `loud`, also where `quiet` says nothing."""
        with self._turn:
            line = self._telling.update(what, self._clock())
            if self._bars is None:
                if line and (loud or not self._quiet):
                    say(line)
                return
        words, share = printable(self._telling.words), self._telling.share
        total = None if share is None else 100
        # at 100 the clock would stop, though the wait goes on
        self._bars.update(self._task, description=words, total=total, completed=min(share or 0, 99))

    def _break_silences(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            with self._turn:
                if line := self._telling.due(self._clock()):
                    say(line)

    def close(self) -> None:
        """Takes the line away, and ends the lines of a long silence."""
        self._over.set()
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def plain(message: Message) -> dict[str, Any]:
    """A protobuf message as JSON data: fields by their proto names, enums and trust as words."""
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))  # a map has no order, and another one in each process
    if field.is_repeated:
        return [_value(item, field) for item in value]
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.name in _TRUST_FIELDS:
        return level_of(value)
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return enum_word(field.enum_type, value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value


def enum_word(descriptor: Any, number: int) -> str:
    """`RING_PHASE_SERVING` as `serving`; a number that this release does not know as itself."""
    known = descriptor.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = "".join(f"_{char}" if char.isupper() else char.upper() for char in descriptor.name).lstrip("_")
    return str(known.name.removeprefix(f"{prefix}_")).lower()


def moment(seconds: int) -> str:
    """Unix seconds as local time, for people; nothing for 0, and as they are where no calendar has them."""
    if not seconds:
        return ""
    try:
        found = datetime.datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s"
    return found.isoformat(sep=" ", timespec="seconds")


def until(seconds: int, now: float) -> str:
    """When something ends, by Unix seconds: "in 59 minutes", or the time at which it has ended; nothing for
    0."""
    left = seconds - now
    if left <= 0:
        return moment(seconds)
    units = (("year", 31_557_600), ("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))
    name, length = next(one for one in units if left >= 2 * one[1] or one[1] == 1)
    many = max(1, round(left / length))
    return f"in {many} {name}{'s' * (many != 1)}"
