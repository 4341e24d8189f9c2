"""Options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sealring.mesh.errors import InvalidInput
from sealring.mesh.trust.levels import NAMED, TrustLevel
from sealring.mesh.units import parse_duration, show_duration

AsJson = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
JoinTokenText = Annotated[
    str, typer.Argument(metavar="TOKEN", help="join token of `sealring token create`; - reads it from stdin")
]
MinTrust = Annotated[
    TrustLevel,
    typer.Option(
        metavar="LEVEL",
        show_default=False,
        help=f"refuse a ring with members below this trust level: {NAMED}",
    ),
]
RootHash = Annotated[
    str | None,
    typer.Option(
        "--root-sha256",
        metavar="HEX",
        help="hash of the cluster's root key, as its operator gave it to you [default: from this machine]",
    ),
]


class Seconds(float):
    """A duration of an option, shown as it is typed: `10m`."""

    def __str__(self) -> str:
        return show_duration(self)

    @classmethod
    def option(
        cls, summary: str, *, least: float, most: float, name: str = "", panel: str | None = None
    ) -> Any:
        """An option of that kind, in seconds between `least` and `most`."""

        def parse(value: Any) -> Seconds:
            try:
                seconds = cls(parse_duration(value) if isinstance(value, str) else value)
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
            if not least <= seconds <= most:
                raise typer.BadParameter(f"{value} is not between {cls(least)} and {cls(most)}")
            return seconds

        names = [name] if name else []
        return typer.Option(*names, parser=parse, metavar="TIME", help=summary, rich_help_panel=panel)


def read_token(text: str) -> str:
    """The token given, or the end of the line on standard input when it is "-": other users of the machine
    see arguments. Raises InvalidInput (BAD_TOKEN)."""
    from sealring.mesh.member.bootstrap import MAX_TOKEN_CHARACTERS

    if text == "-":
        text = sys.stdin.readline(2 * MAX_TOKEN_CHARACTERS)
    found = text.strip().rpartition(" ")[2]
    if not found or len(found) > MAX_TOKEN_CHARACTERS or not found.isascii():
        raise InvalidInput("the join token is empty or not one", hint="copy all of it", reason="BAD_TOKEN")
    return found


def read_file(file: Path, *, max_bytes: int) -> bytes:
    """What is in a file of the user's. Raises InvalidInput (BAD_FILE), ConfigError (FILE_TOO_LARGE)."""
    from sealring.mesh.system.files import read_bounded

    try:
        return read_bounded(file, max_bytes=max_bytes)
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", reason="BAD_FILE") from None


def write_file(file: Path, content: bytes) -> None:
    """Writes a file of the user's that everybody may read. Raises InvalidInput (BAD_FILE)."""
    from sealring.mesh.system.files import write_atomic

    try:
        write_atomic(file, content, mode=0o644)
    except OSError as error:
        raise cannot_write(file, error) from None


def cannot_write(file: Path, error: OSError) -> InvalidInput:
    """What is said of a file or folder that the user named and that cannot be made (BAD_FILE)."""
    return InvalidInput(
        f"{file} cannot be written: {error.strerror}", hint="name another place", reason="BAD_FILE"
    )


def public_keys(values: Sequence[str]) -> tuple[bytes, ...]:
    """Ed25519 public keys from their hex digits. Raises InvalidInput (BAD_KEY)."""
    try:
        keys = tuple(bytes.fromhex(value) for value in values)
    except ValueError:
        keys = (b"",)
    if any(len(key) != 32 for key in keys):
        raise InvalidInput(
            "a public key is not 64 hex digits", hint="as `sealring root init` prints it", reason="BAD_KEY"
        )
    return keys
