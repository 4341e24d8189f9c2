"""Errors as `Problem` messages, for the streams on which a gRPC status cannot travel."""

from __future__ import annotations

from mesh import errors
from mesh.errors import Internal, SealringError
from sealring.v1 import membership_pb2


def to_problem(error: BaseException) -> membership_pb2.Problem:
    """The problem that tells of an error; anything that is not of our own tree is masked."""
    if not isinstance(error, SealringError):
        error = Internal("an internal error", hint="see the log of this process")
    return membership_pb2.Problem(
        code=error.code,
        reason=error.reason,
        message=error.message,
        hint=error.hint,
        metadata=error.metadata,
    )


_BY_CODE: dict[str, type[SealringError]] = {
    "INVALID_ARGUMENT": errors.InvalidInput,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "ABORTED": errors.Conflict,
    "RESOURCE_EXHAUSTED": errors.ResourceExhausted,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Cancelled,
}


def from_parts(
    code: str, reason: str, message: str, hint: str, metadata: dict[str, str] | None = None
) -> SealringError:
    """The error of the tree with this canonical code; Internal when the code is unknown."""
    error = _BY_CODE.get(code, Internal)(message, hint=hint, reason=reason or None)
    error.metadata.update(metadata or {})
    return error


def from_problem(problem: membership_pb2.Problem) -> SealringError:
    """The error of the tree that a problem stands for."""
    return from_parts(problem.code, problem.reason, problem.message, problem.hint, dict(problem.metadata))
