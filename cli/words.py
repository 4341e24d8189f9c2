"""Options that several commands share."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mesh.errors import InvalidInput

AsJson = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
JoinTokenText = Annotated[
    str, typer.Argument(metavar="TOKEN", help="join token as `sealring token create` printed it; - reads it")
]

_MAX_TOKEN = 512


def read_token(text: str) -> str:
    """The token given, or the line on standard input when it is "-". Raises InvalidInput (BAD_TOKEN)."""
    found = sys.stdin.readline(_MAX_TOKEN + 1).strip() if text == "-" else text
    if not found or len(found) > _MAX_TOKEN or not found.isascii():
        raise InvalidInput("the join token is empty or not one", hint="copy all of it", reason="BAD_TOKEN")
    return found
