"""What the HTTP edge serves, as OpenAPI 3.1 describes it, and the same as a page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from sealring.api import anthropic, compaction, ollama, responses
from sealring.api.chat import ChatBody
from sealring.api.completions import CompletionBody
from sealring.api.errors import form_of
from sealring.api.fields import NOTHING, Body, Rule, Rules
from sealring.api.vectors import EmbedBody, EmbeddingBody, EmbeddingsBody, RerankBody

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

_COMPLETION_SCHEMA = _object("id", "object", "created", "model", "choices", "usage", choices=_LIST)
_MESSAGE_SCHEMA = _object("id", "type", "role", "model", "content", "stop_reason", "usage", content=_LIST)
_RESPONSE_SCHEMA = _object("id", "object", "created_at", "model", "output", "status", output=_LIST)
_OLLAMA_SCHEMA = _object("model", "created_at", "done", done={"type": "boolean"})
_MODEL_SCHEMA = _object("id", "object", "created", "owned_by", "context_length", context_length=_COUNT)
_MODELS_SCHEMA = _object("object", "data", data={"type": "array", "items": _MODEL_SCHEMA})
_HEALTH_SCHEMA = _object("status", status={"enum": ["serving", "unavailable"]})
_TAGS_SCHEMA = _object("models", models=_LIST)
_SHOWN_SCHEMA = _object("details", "model_info", "capabilities", capabilities=_LIST)
_VERSION_SCHEMA = _object("version", version=_TEXT)

_EVENTS = "text/event-stream"
_LINES = "application/x-ndjson"


@dataclass(frozen=True)
class Operation:
    """The description of one path. `body` is a class, or a table of fields with those that are required."""

    summary: str
    answer: _Schema
    body: type[Body] | tuple[Rules, tuple[str, ...]] | None = None
    streams: str = ""
    """The media type of a streamed answer."""
    media_type: str = "application/json"


_SHOW: Rules = {"model": Rule(own=True, schema=_TEXT), "name": Rule(own=True, schema=_TEXT)}

CHAT = Operation("OpenAI's chat completions", _COMPLETION_SCHEMA, ChatBody, _EVENTS)
COMPLETIONS = Operation("OpenAI's completions", _COMPLETION_SCHEMA, CompletionBody, _EVENTS)
RESPONSES = Operation(
    "OpenAI's Responses, without memory between them",
    _RESPONSE_SCHEMA,
    (responses.RESPONSES, ("input",)),
    _EVENTS,
)
COMPACT = Operation(
    "a summary of a conversation, which only this API opens",
    _object("id", "object", "created_at", "output", "usage", output=_LIST),
    (compaction.COMPACT, ("model",)),
)
MESSAGES = Operation(
    "Anthropic's Messages", _MESSAGE_SCHEMA, (anthropic.MESSAGES, ("messages", "max_tokens")), _EVENTS
)
COUNT_TOKENS = Operation(
    "how many tokens such a message has",
    _object("input_tokens", input_tokens=_COUNT),
    (anthropic.MESSAGES, ("messages",)),
)
EMBEDDINGS = Operation(
    "OpenAI's embeddings", _object("object", "data", "model", "usage", data=_LIST), EmbeddingsBody
)
RERANK = Operation(
    "scores of documents for a query", _object("id", "model", "results", results=_LIST), RerankBody
)
OLLAMA_EMBED = Operation("Ollama's embeddings", _object("embeddings", embeddings=_LIST), EmbedBody)
OLLAMA_EMBEDDINGS = Operation("one of these", _object("embedding", embedding=_LIST), EmbeddingBody)
OLLAMA_CHAT = Operation("Ollama's chat", _OLLAMA_SCHEMA, (ollama.CHAT, ()), _LINES)
OLLAMA_GENERATE = Operation("Ollama's generate", _OLLAMA_SCHEMA, (ollama.GENERATE, ()), _LINES)
OLLAMA_SHOW = Operation("Ollama's: what a model can do", _SHOWN_SCHEMA, (_SHOW, ()))
OLLAMA_TAGS = Operation("Ollama's list of models", _TAGS_SCHEMA)
OLLAMA_VERSION = Operation("of Ollama's API", _VERSION_SCHEMA)
MODELS = Operation("models that are served", _MODELS_SCHEMA)
MODEL = Operation("one of these", _MODEL_SCHEMA)
VERSION = Operation("of this software", _VERSION_SCHEMA)
HEALTH = Operation("200 while some model is served", _HEALTH_SCHEMA)
LIVE = Operation("200 while this process answers", _object("status", status=_TEXT))
METRICS = Operation("for Prometheus", _TEXT, media_type="text/plain")

Operations = Sequence[tuple[str, str, Operation]]
"""Method, path and description of each operation."""


def openapi(version: str, operations: Operations) -> dict[str, Any]:
    """The description of all paths: bodies by the tables that read them, answers, and errors of each API."""
    classes = [one.body for _, _, one in operations if isinstance(one.body, type)]
    _, defined = models_json_schema(
        [(body, "validation") for body in classes], ref_template="#/components/schemas/{model}"
    )
    schemas = {**defined["$defs"], **_ERRORS}
    for body in _subclasses(Body):
        if body.__name__ in schemas:
            schemas[body.__name__] = _with_rules(schemas[body.__name__], body.rules)
    known = schemas["ChatBody"]["properties"]
    paths: dict[str, Any] = {}
    for method, path, one in operations:
        paths.setdefault(path, {})[method.lower()] = _described(path, one, known)
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


def _described(path: str, one: Operation, known: _Schema) -> dict[str, Any]:
    content = {one.media_type: {"schema": one.answer}}
    if one.streams:
        content[one.streams] = {"schema": _TEXT}
    failed = {
        "description": "an error, in this API's form",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{form_of(path).schema}"}}},
    }
    shown: dict[str, Any] = {
        "summary": one.summary,
        "responses": {
            "200": {"description": "the answer", "content": content},
            "4XX": failed,
            "5XX": failed,
        },
    }
    if one.answer is _HEALTH_SCHEMA:
        shown["responses"]["503"] = {"description": "nothing is served", "content": content}
    if "{model}" in path:
        shown["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}]
    if one.body is not None:
        schema = _body(one.body, known)
        shown["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return shown


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


def page(operations: Operations) -> str:
    """The description as a page for people, without scripts and without anything from elsewhere."""
    rows = "".join(
        f"<tr><td>{method}<td><code>{html.escape(path)}</code><td>{html.escape(one.summary)}"
        for method, path, one in operations
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
