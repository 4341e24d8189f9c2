"""The exception tree in the APIs' forms. Nothing else makes error bodies of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sealring.mesh.errors import SealringError

_STATUS = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "ALREADY_EXISTS": (409, "invalid_request_error"),
    "ABORTED": (409, "conflict_error"),
    "FAILED_PRECONDITION": (422, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "UNAVAILABLE": (503, "server_error"),
    "DEADLINE_EXCEEDED": (504, "server_error"),
}
_BY_REASON = {
    "BODY_TOO_LARGE": 413,
    "BAD_CONTENT_TYPE": 415,
    "BODY_ENCODED": 415,
    "METHOD_NOT_ALLOWED": 405,
    "BODY_TOO_SLOW": 408,
    "HOST_NOT_ALLOWED": 403,
}
_CODES = {
    "CONTEXT_TOO_LONG": "context_length_exceeded",
    "TOO_LARGE_FOR_RING": "context_length_exceeded",
    "DAILY_TOKENS_USED": "insufficient_quota",
}
"""Codes that OpenAI's clients know under another name than ours."""


_DETAILS = {"THREADS_UNSUPPORTED": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""What Anthropic's clients read of an error, and act on: by these words they send whole conversations."""

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: SealringError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    _, kind = _STATUS.get(error.code, (500, "server_error"))
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": error.metadata.get("param"),
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def anthropic_error(error: SealringError) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}}`, and `details` where a client acts on them."""
    kind = _ANTHROPIC.get(
        error_status(error), "invalid_request_error" if error_status(error) < 500 else "api_error"
    )
    told = {"type": kind, "message": _length_words(error) or str(error)}
    details = {"details": _DETAILS[error.reason]} if error.reason in _DETAILS else {}
    return {"type": "error", "error": {**told, **details}}


def _length_words(error: SealringError) -> str:
    """What is too long, in the words of Anthropic's own servers: by them Claude Code knows when to summarize
    the conversation, and when to ask for a shorter answer. Empty for other errors."""
    told = error.metadata
    prompt, most = told.get("prompt_tokens", ""), told.get("context") or told.get("capacity_tokens")
    if error.reason not in _CODES or not prompt or most is None:
        return ""
    if told.get("param") == "max_tokens":
        answer = told.get("max_tokens", "")
        return f"input length and max_tokens exceed context limit: {prompt} + {answer} > {most}"
    return f"prompt is too long: {prompt} tokens > {most} maximum"


def ollama_error(error: SealringError) -> dict[str, Any]:
    """`{"error": message}`."""
    return {"error": str(error)}


class ErrorForm(NamedTuple):
    """How one API writes errors: the name of its schema, and what makes the body."""

    schema: str
    body: Callable[[SealringError], dict[str, Any]]


def form_of(path: str) -> ErrorForm:
    """The form of the API that the path belongs to, whether it is served or not; OpenAI's for others."""
    if path.startswith("/v1/messages"):
        return ErrorForm("AnthropicError", anthropic_error)
    if path.startswith("/api/"):
        return ErrorForm("OllamaError", ollama_error)
    return ErrorForm("Error", error_body)


def error_of(path: str, error: SealringError) -> dict[str, Any]:
    """The body of an error in the form of the path's API."""
    return form_of(path).body(error)


def error_status(error: SealringError) -> int:
    """The HTTP status of an error (RFC 9110)."""
    return _BY_REASON.get(error.reason) or _STATUS.get(error.code, (500, ""))[0]
