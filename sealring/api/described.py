"""What the HTTP edge serves, as OpenAPI 3.1 describes it, and the same as a page."""

from __future__ import annotations

import functools
import html
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sealring.api.chat import ChatBody
from sealring.api.completions import CompletionBody

_BODIES: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}

_SERVED = (
    ("post", "/v1/chat/completions", "OpenAI's chat completions"),
    ("post", "/v1/completions", "OpenAI's completions"),
    ("post", "/v1/responses", "OpenAI's Responses, without memory between them"),
    ("post", "/v1/messages", "Anthropic's Messages"),
    ("post", "/v1/messages/count_tokens", "how many tokens such a message has"),
    ("post", "/api/chat", "Ollama's chat"),
    ("post", "/api/generate", "Ollama's generate"),
    ("post", "/api/show", "Ollama's: what a model can do"),
    ("get", "/api/tags", "Ollama's list of models"),
    ("get", "/api/ps", "the same"),
    ("get", "/api/version", "of Ollama's API"),
    ("get", "/v1/models", "what is served"),
    ("get", "/v1/models/{model}", "one of these"),
    ("get", "/ping", "as /health"),
    ("get", "/version", "of this software"),
    ("get", "/health", "200 while some model is served"),
    ("get", "/health/live", "200 while this process answers"),
    ("get", "/metrics", "for Prometheus"),
)


@functools.cache
def openapi(version: str) -> dict[str, Any]:
    """The description. Bodies of other makers' APIs are objects: their own documentation has the fields."""
    refs, defined = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Any] = {}
    for method, path, summary in _SERVED:
        told: dict[str, Any] = {
            "summary": summary,
            "responses": {"default": {"description": "JSON or events"}},
        }
        if "{model}" in path:
            told["parameters"] = [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        if method == "post":
            body = _BODIES.get(path)
            schema = refs[body, "validation"] if body else {"type": "object"}
            told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})[method] = told
    return {
        "openapi": "3.1.0",
        "info": {"title": "sealring", "version": version},
        "paths": paths,
        "components": {
            "schemas": defined["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def page() -> str:
    """The same to read: no script, nothing from elsewhere."""
    rows = "".join(
        f"<tr><td>{method.upper()}<td><code>{html.escape(path)}</code><td>{html.escape(summary)}"
        for method, path, summary in _SERVED
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>sealring: what is served</title>
<body style="font: 1rem/1.5 system-ui; max-width: 45rem; margin: 2rem auto; padding: 0 1rem">
<h1>What is served</h1>
<table style="border-spacing: .8rem .2rem">{rows}</table>
<p>Fields of bodies: <a href="/openapi.json">openapi.json</a>, in OpenAPI 3.1.
A key, where one is asked for, goes into <code>authorization: Bearer</code> or <code>x-api-key</code>.</p>
"""
