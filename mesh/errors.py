"""The one exception tree.

Every error says what happened, to what, and (in `hint`) what to do about it. `reason` is a stable
UPPER_SNAKE word for programs; `code` is the canonical gRPC status name. Messages never hold prompt
text, token ids or generated text. `mesh/rpc/status.py` maps the tree to gRPC status with ErrorInfo, and
`sealring/api/errors.py` maps it to the forms of the HTTP APIs; nothing else translates errors.
"""

# ruff: noqa: N818 - errors are named for the situation

from __future__ import annotations

DOMAIN = "sealring"


def forget_frames(error: BaseException) -> None:
    """Takes the tracebacks from an error that goes no further, and from the errors that it came from.

    Their frames hold the request, the calls and the tasks of a failure, and a task holds the error again. All
    of it would stay until Python looks for garbage. A daemon seldom does, and a prompt may have 32 MiB.
    """
    met, errors = set[BaseException](), [error]
    while errors:
        one = errors.pop()
        if one not in met:
            met.add(one)
            one.__traceback__ = None
            more = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            errors += [each for each in (one.__cause__, one.__context__, *more) if each is not None]


class SealringError(Exception):
    """Base of every error that a user may see.

    `metadata` holds short strings for programs (limits, names, numbers); it goes into ErrorInfo.
    """

    code = "UNKNOWN"
    default_reason = ""
    """Empty if the code says enough."""

    def __init__(self, message: str, *, hint: str = "", reason: str | None = None, **metadata: object):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reason = reason or self.default_reason or self.code
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InvalidInput(SealringError):
    """The caller's input is wrong and will stay wrong; `param` in the metadata names the field."""

    code = "INVALID_ARGUMENT"
    default_reason = "INVALID_INPUT"


class NotFound(SealringError):
    """The named object does not exist."""

    code = "NOT_FOUND"


class AlreadyExists(SealringError):
    """The named object exists already."""

    code = "ALREADY_EXISTS"


class Unauthenticated(SealringError):
    """No valid credential was presented."""

    code = "UNAUTHENTICATED"


class PermissionDenied(SealringError):
    """The caller is known and may not do this."""

    code = "PERMISSION_DENIED"


class FailedPrecondition(SealringError):
    """The system is not in the state that the call needs; retrying alone does not help."""

    code = "FAILED_PRECONDITION"


class ConfigError(FailedPrecondition):
    """A setting, a file named by a setting, or the environment is unusable."""

    default_reason = "BAD_CONFIG"


class ModelError(FailedPrecondition):
    """A model folder is missing, corrupt, or of a kind that cannot be served."""

    default_reason = "BAD_MODEL"


class Conflict(SealringError):
    """Another change or holder came first; read the state again and retry."""

    code = "ABORTED"
    default_reason = "CONFLICT"


class ResourceExhausted(SealringError):
    """A limit, a quota or memory is used up."""

    code = "RESOURCE_EXHAUSTED"


class Unavailable(SealringError):
    """Not served just now; the same call may succeed later."""

    code = "UNAVAILABLE"


class DeadlineExceeded(SealringError):
    """It took longer than the caller or a limit allowed."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(SealringError):
    """The caller went away or cancelled."""

    code = "CANCELLED"


class Internal(SealringError):
    """A fault of sealring's own; the details are in its log, not in the message."""

    code = "INTERNAL"


class StageFailed(Internal):
    """The model's code failed on a step. No member was lost, so the next epoch may fail in the same way."""

    default_reason = "STAGE_FAILED"
    out_of_memory = "OUT_OF_MEMORY"
    """The reason if the member lacked memory for the step: a smaller request may fit."""
    gpu_reset = "GPU_RESET"
    """The reason if macOS reset a member's GPU during the step: it may have run for too long."""


class EpochEnded(Unavailable):
    """The ring's epoch ended while the work was under way."""

    default_reason = "EPOCH_ENDED"
    no_group = "NO_GROUP"
    """The reason if an engine could not join the group of its tensor ring."""


class HandshakeError(PermissionDenied):
    """A handshake, of a link or with a join code, failed a check. Nothing of this reaches the peer."""

    default_reason = "HANDSHAKE_FAILED"


class RecordError(PermissionDenied):
    """A record could not be sealed or opened; its link is poisoned."""

    default_reason = "RECORD_REFUSED"


class RosterError(PermissionDenied):
    """A roster or root metadata failed a check of the reader."""

    default_reason = "ROSTER_REFUSED"


class AttestationError(PermissionDenied):
    """Attestation or challenge evidence is missing, stale or wrong."""

    default_reason = "ATTESTATION_REFUSED"


class EnvelopeError(PermissionDenied):
    """A sealed prompt or reply could not be opened."""

    default_reason = "ENVELOPE_REFUSED"


class ReceiptError(PermissionDenied):
    """A receipt does not prove what it should."""

    default_reason = "RECEIPT_REFUSED"


class ReceiptUndecided(ReceiptError):
    """Nothing in a receipt is wrong, and what it was compared with cannot decide whether it holds."""

    default_reason = "RECEIPT_UNDECIDED"


class CertificateError(PermissionDenied):
    """A certificate or signing request failed a check."""

    default_reason = "CERTIFICATE_REFUSED"
