"""Errors as `Problem` messages, for the streams on which a gRPC status cannot travel.

Engines and carriers, which load no gRPC, import this module and not `status.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from sealring.mesh.errors import Internal, SealringError
from sealring.v1 import membership_pb2

MAX_MESSAGE = 1200
"""Characters: a status travels twice in the trailers, which peers cap at 8 KiB."""

MAX_METADATA = 24
MAX_VALUE = 80


def to_problem(error: BaseException) -> membership_pb2.Problem:
    """The problem for an error; an error outside of the tree is masked."""
    if not isinstance(error, SealringError):
        error = Internal("an internal error", hint="see the log of this process")
    return membership_pb2.Problem(
        code=error.code,
        reason=error.reason,
        message=error.message,
        hint=error.hint,
        metadata=error.metadata,
    )


_BY_CODE = {kind.code: kind for kind in SealringError.__subclasses__()}


def from_parts(
    code: str, reason: str, message: str, hint: str, metadata: dict[str, str] | None = None
) -> SealringError:
    """The error of the tree with this canonical code; Internal when the code is unknown."""
    error = _BY_CODE.get(code, Internal)(message, hint=hint, reason=reason or None)
    error.metadata.update(metadata or {})
    return error


def from_problem(problem: membership_pb2.Problem) -> SealringError:
    """The error of the tree for a problem, no larger than this machine's own errors.

    A peer may write anything into it, and it reaches logs, operators' lists and answers. It is therefore
    reduced to one line without control characters.
    """
    return from_parts(
        problem.code,
        one_line(problem.reason, MAX_VALUE),
        one_line(problem.message, MAX_MESSAGE),
        one_line(problem.hint, MAX_MESSAGE),
        bounded(problem.metadata),
    )


def one_line(text: str, limit: int) -> str:
    """Another machine's text as one printable line of at most `limit` characters."""
    return "".join(char if char.isprintable() else " " for char in text[:limit])


def bounded(metadata: Mapping[str, str]) -> dict[str, str]:
    """An error's metadata, cut to MAX_METADATA entries of MAX_VALUE characters."""
    return {name[:MAX_VALUE]: value[:MAX_VALUE] for name, value in islice(metadata.items(), MAX_METADATA)}
