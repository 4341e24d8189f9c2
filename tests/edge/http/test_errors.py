"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from sealring.api.answers import Renderer
from sealring.api.errors import error_body, error_of, error_status
from sealring.edge.http.answers import error_response
from sealring.mesh import errors
from sealring.mesh.errors import SealringError
from sealring.v1 import inference_pb2 as inference


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidInput("x"), 400, "invalid_request_error"),
        (errors.Unauthenticated("x"), 401, "authentication_error"),
        (errors.PermissionDenied("x"), 403, "permission_error"),
        (errors.NotFound("x"), 404, "invalid_request_error"),
        (errors.AlreadyExists("x"), 409, "invalid_request_error"),
        (errors.Conflict("x"), 409, "conflict_error"),
        (errors.FailedPrecondition("x"), 422, "invalid_request_error"),
        (errors.ResourceExhausted("x"), 429, "rate_limit_error"),
        (errors.Cancelled("x"), 499, "cancelled_error"),
        (errors.Unavailable("x"), 503, "server_error"),
        (errors.DeadlineExceeded("x"), 504, "server_error"),
        (errors.Internal("x"), 500, "server_error"),
        (errors.InvalidInput("x", reason="BODY_TOO_LARGE"), 413, "invalid_request_error"),
        (errors.InvalidInput("x", reason="BAD_CONTENT_TYPE"), 415, "invalid_request_error"),
        (errors.InvalidInput("x", reason="BODY_ENCODED"), 415, "invalid_request_error"),
        (errors.InvalidInput("x", reason="METHOD_NOT_ALLOWED"), 405, "invalid_request_error"),
        (errors.DeadlineExceeded("x", reason="BODY_TOO_SLOW"), 408, "server_error"),
        (errors.PermissionDenied("x", reason="HOST_NOT_ALLOWED"), 403, "permission_error"),
    ],
    ids=lambda value: str(getattr(value, "reason", value)),
)
def test_an_error_has_its_status_and_kind(error: SealringError, status: int, kind: str) -> None:
    assert error_status(error) == error_response(error).status_code == status
    assert error_body(error)["error"]["type"] == kind
    assert (
        Renderer(inference.Started()).error(error)
        == b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"
    )


LONG = {"reason": "CONTEXT_TOO_LONG", "prompt_tokens": 2100, "context": 2048, "param": "messages"}
LARGE = {"reason": "TOO_LARGE_FOR_RING", "prompt_tokens": 900, "max_tokens": 200, "capacity_tokens": 1000}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LONG, "prompt is too long: 2100 tokens > 2048 maximum"),
        ({**LARGE, "param": "messages"}, "prompt is too long: 900 tokens > 1000 maximum"),
        (
            {**LARGE, "param": "max_tokens"},
            "input length and max_tokens exceed context limit: 900 + 200 > 1000",
        ),
        ({"reason": "CONTEXT_TOO_LONG"}, "too long (hint: shorten it)"),
        ({"reason": "BAD_FIELD", "prompt_tokens": 1, "context": 1}, "too long (hint: shorten it)"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(error: dict[str, Any], words: str) -> None:
    """By these words Claude Code summarizes its conversation, or asks for a shorter answer."""
    shown = error_of("/v1/messages", errors.InvalidInput("too long", hint="shorten it", **error))
    assert shown["error"]["message"] == words


def test_what_an_error_names_is_told() -> None:
    error = errors.ResourceExhausted(
        "full", hint="wait", reason="TOO_LARGE_FOR_RING", retry_after=3, param="n"
    )
    assert error_body(error)["error"] == {
        "message": str(error),
        "type": "rate_limit_error",
        "param": "n",
        "code": "context_length_exceeded",
    }
    assert error_response(error).headers["retry-after"] == "3"
    assert error_body(errors.NotFound("x", reason="NO_SUCH_PATH"))["error"]["code"] == "no_such_path"
    plain = error_response(errors.InvalidInput("x"))
    assert not {"retry-after", "www-authenticate", "allow"} & set(plain.headers)
    assert plain.headers["content-type"] == "application/json"
    assert error_response(errors.Unauthenticated("x")).headers["www-authenticate"] == "Bearer"
    assert error_response(errors.InvalidInput("x", allow="GET")).headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.InvalidInput("x"), "false"),
        (errors.Unauthenticated("x"), "false"),
        (errors.PermissionDenied("x"), "false"),
        (errors.NotFound("x"), "false"),
        (errors.InvalidInput("x", reason="BODY_TOO_LARGE"), "false"),
        (errors.FailedPrecondition("x"), "false"),
        (errors.ResourceExhausted("x", retry_after=3), "true"),
        (errors.Unavailable("x"), "true"),
        (errors.Conflict("x"), None),
        (errors.Internal("x"), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_sdks_are_told_whether_to_ask_again(error: SealringError, expected: str | None) -> None:
    answer = error_response(error)
    assert answer.headers.get("x-should-retry") == expected
    asked = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(answer.status_code, headers={**answer.headers, "retry-after-ms": "1"})

    http = httpx.Client(transport=httpx.MockTransport(reply))
    client = openai.OpenAI(api_key="x", base_url="http://localhost", max_retries=1, http_client=http)
    with client, pytest.raises(openai.APIStatusError):
        client.models.list()
    assert len(asked) == (1 if expected == "false" else 2)
