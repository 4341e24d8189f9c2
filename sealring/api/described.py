"""What the HTTP edge serves, as OpenAPI 3.1 describes it, and the same as a page."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from sealring.api import anthropic, ollama, responses
from sealring.api.chat import ChatBody
from sealring.api.completions import CompletionBody
from sealring.api.fields import NOTHING, Body, Rule, Rules

_Schema = dict[str, Any]


def _object(*required: str, **properties: _Schema) -> _Schema:
    return {"type": "object", "required": list(required), "properties": properties}


_TEXT: _Schema = {"type": "string"}
_COUNT: _Schema = {"type": "integer", "minimum": 0}
_LIST: _Schema = {"type": "array"}

_ERRORS: dict[str, _Schema] = {
    "Error": _object(
        "error",
        error={
            **_object("message", "type", "param", "code", message=_TEXT, type=_TEXT, code=_TEXT),
            "description": "`param` names the field that is wrong, as the body has it",
        },
    ),
    "AnthropicError": _object(
        "type", "error", type={"const": "error"}, error=_object("type", "message", type=_TEXT, message=_TEXT)
    ),
    "OllamaError": _object("error", error=_TEXT),
}
"""What all of 4XX and 5XX answer, by API."""

_COMPLETION = _object("id", "object", "created", "model", "choices", "usage", choices=_LIST)
_MESSAGE = _object("id", "type", "role", "model", "content", "stop_reason", "usage", content=_LIST)
_RESPONSE = _object("id", "object", "created_at", "model", "output", "status", output=_LIST)
_OLLAMA = _object("model", "created_at", "done", done={"type": "boolean"})
_MODEL = _object("id", "object", "created", "owned_by", "context_length", context_length=_COUNT)
_MODELS = _object("object", "data", data={"type": "array", "items": _MODEL})
_HEALTH = _object("status", status={"enum": ["serving", "unavailable"]})
_TAGS = _object("models", models=_LIST)
_SHOWN = _object("details", "model_info", "capabilities", capabilities=_LIST)
_VERSION = _object("version", version=_TEXT)

_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"


@dataclass(frozen=True)
class _Operation:
    """One path. `body` is a class, or a table of fields with those that have to be there."""

    method: str
    path: str
    summary: str
    answer: _Schema
    body: type[Body] | tuple[Rules, tuple[str, ...]] | None = None
    streams: str = ""
    """The media type of a streamed answer."""
    media_type: str = "application/json"

    @property
    def error(self) -> str:
        """The name of the schema of its errors."""
        if self.path.startswith("/v1/messages"):
            return "AnthropicError"
        return "OllamaError" if self.path.startswith("/api/") else "Error"


_SHOW: Rules = {"model": Rule(own=True, schema=_TEXT), "name": Rule(own=True, schema=_TEXT)}

_SERVED = (
    _Operation("post", "/v1/chat/completions", "OpenAI's chat completions", _COMPLETION, ChatBody, _EVENTS),
    _Operation("post", "/v1/completions", "OpenAI's completions", _COMPLETION, CompletionBody, _EVENTS),
    _Operation(
        "post",
        "/v1/responses",
        "OpenAI's Responses, without memory between them",
        _RESPONSE,
        (responses.RESPONSES, ("input",)),
        _EVENTS,
    ),
    _Operation(
        "post",
        "/v1/messages",
        "Anthropic's Messages",
        _MESSAGE,
        (anthropic.MESSAGES, ("messages", "max_tokens")),
        _EVENTS,
    ),
    _Operation(
        "post",
        "/v1/messages/count_tokens",
        "how many tokens such a message has",
        _object("input_tokens", input_tokens=_COUNT),
        (anthropic.MESSAGES, ("messages",)),
    ),
    _Operation("post", "/api/chat", "Ollama's chat", _OLLAMA, (ollama.CHAT, ()), _LINES),
    _Operation("post", "/api/generate", "Ollama's generate", _OLLAMA, (ollama.GENERATE, ()), _LINES),
    _Operation("post", "/api/show", "Ollama's: what a model can do", _SHOWN, (_SHOW, ())),
    _Operation("get", "/api/tags", "Ollama's list of models", _TAGS),
    _Operation("get", "/api/ps", "the same", _TAGS),
    _Operation("get", "/api/version", "of Ollama's API", _VERSION),
    _Operation("get", "/v1/models", "what is served", _MODELS),
    _Operation("get", "/v1/models/{model}", "one of these", _MODEL),
    _Operation("get", "/ping", "as /health", _HEALTH),
    _Operation("get", "/version", "of this software", _VERSION),
    _Operation("get", "/health", "200 while some model is served", _HEALTH),
    _Operation("get", "/health/live", "200 while this process answers", _object("status", status=_TEXT)),
    _Operation("get", "/metrics", "for Prometheus", _TEXT, media_type="text/plain"),
)


@functools.cache
def openapi(version: str) -> dict[str, Any]:
    """The description of all paths: bodies by the tables that read them, answers, and errors of each API."""
    classes = [one.body for one in _SERVED if isinstance(one.body, type)]
    _, defined = models_json_schema(
        [(body, "validation") for body in classes], ref_template="#/components/schemas/{model}"
    )
    schemas = {**defined["$defs"], **_ERRORS}
    for body in _subclasses(Body):
        if body.__name__ in schemas:
            schemas[body.__name__] = _with_rules(schemas[body.__name__], body.rules)
    known = schemas["ChatBody"]["properties"]
    paths: dict[str, Any] = {}
    for one in _SERVED:
        paths.setdefault(one.path, {})[one.method] = _described(one, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sealring", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _subclasses(body: type[Body]) -> Iterator[type[Body]]:
    for each in body.__subclasses__():
        yield each
        yield from _subclasses(each)


def _described(one: _Operation, known: _Schema) -> dict[str, Any]:
    content = {one.media_type: {"schema": one.answer}}
    if one.streams:
        content[one.streams] = {"schema": _TEXT}
    failed = {
        "description": "an error, in this API's form",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{one.error}"}}},
    }
    told: dict[str, Any] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": "the answer", "content": content},
            "4XX": failed,
            "5XX": failed,
        },
    }
    if one.answer is _HEALTH:
        told["responses"]["503"] = {"description": "nothing is served", "content": content}
    if "{model}" in one.path:
        told["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    if one.body is not None:
        schema = _body(one.body, known)
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return told


def _body(body: type[Body] | tuple[Rules, tuple[str, ...]], known: _Schema) -> _Schema:
    if isinstance(body, type):
        return {"$ref": f"#/components/schemas/{body.__name__}"}
    rules, required = body
    properties = {name: _of_rule(rule, known) for name, rule in rules.items()}
    return {**_object(*required, **properties), "additionalProperties": {"enum": list(NOTHING)}}


def _with_rules(schema: _Schema, rules: Rules) -> _Schema:
    """The schema of a class with the fields that it takes by its table."""
    known = schema["properties"]
    more = {name: _of_rule(rule, known) for name, rule in rules.items() if name not in known}
    return {**schema, "properties": {**known, **more}, "additionalProperties": {"enum": list(NOTHING)}}


def _of_rule(rule: Rule, known: _Schema) -> _Schema:
    if rule.schema is not None:
        return dict(rule.schema)
    if rule.ignored_when is None:
        return {"description": "bookkeeping: no answer depends on it"}
    if rule.taken_as and rule.convert is None and not rule.ignored_when:
        return dict(known.get(rule.taken_as, {}))
    if rule.refuses:
        return {"enum": [None, *rule.ignored_when]}
    return {"type": ["object", "null"]} if rule.parts is not None else {}


def page() -> str:
    """The same to read: no script, nothing from elsewhere."""
    rows = "".join(
        f"<tr><td>{one.method.upper()}<td><code>{html.escape(one.path)}</code><td>{html.escape(one.summary)}"
        for one in _SERVED
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
