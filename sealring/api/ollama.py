"""Ollama's `/api/chat` and `/api/generate`, and what its clients ask about models."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from sealring.api.answers import Asked, Choice, Logprobs, Renderer, pieces, receipt_of, state_of, told
from sealring.api.chat import EVERY, ask_as_chat
from sealring.api.errors import ollama_error
from sealring.api.fields import (
    BOOKKEEPING,
    Body,
    Rule,
    Rules,
    Translated,
    as_list,
    as_object,
    bad,
    check_body,
    only,
    own,
    table,
    taken_as,
    translate,
)
from sealring.api.images import base64_part
from sealring.api.keep_alive import KeepAlive
from sealring.api.logprobs import chat_logprobs
from sealring.api.sampling import OPENAI, OPTIONS, clean
from sealring.mesh.errors import SealringError
from sealring.mesh.prompt.options import MAX_REPETITION_CONTEXT_SIZE
from sealring.mesh.prompt.tools import EMBEDDING, RERANK
from sealring.v1 import inference_pb2 as inference

_LEVELS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Ollama's names of precisions; those of quantized weights are the same here."""

_NEVER = "9999-12-31T23:59:59Z"
VERSION = "0.12.0"
"""The version of Ollama's API that this is; clients compare it with what they need."""

_Object = dict[str, Any]


def _model(item: Any, param: str) -> Any:
    return item.removesuffix(":latest") if isinstance(item, str) else item


def _form(item: Any, param: str) -> _Object:
    schema = {"type": "object"} if item == "json" else as_object(item, param)
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _most(item: Any, param: str) -> Any:
    """The limit of tokens; None, for a number below 0, is all that there is room for."""
    return None if isinstance(item, int) and item < 0 else item


def _last(item: Any, param: str) -> _Object:
    """-1 looks at all that there is. 0 takes the penalty off, which is done when all fields are known."""
    size = MAX_REPETITION_CONTEXT_SIZE if item == -1 else item
    return {} if size == 0 else {"repetition_context_size": size}


_OPTIONS: Rules = {
    **OPENAI,
    **OPTIONS,
    "num_predict": taken_as("max_tokens", _most),
    "repeat_last_n": Rule(spread=_last),
    "penalize_newline": only(True),
    "f16_kv": BOOKKEEPING,  # what follows is the ring's own choice
    "low_vram": BOOKKEEPING,
    "main_gpu": BOOKKEEPING,
    "numa": BOOKKEEPING,
}
"""Ollama's names of options beside those that every API has."""

_BOTH: Rules = {
    **EVERY,
    "model": taken_as("model", _model, ""),
    "stream": own(type=["boolean", "null"]),
    "format": taken_as("response_format", _form, ""),
    "options": Rule(parts=_OPTIONS, ignored_when=([],)),
    "shift": BOOKKEEPING,  # a prompt that is too long is refused, whatever this one and the next one say
    "truncate": BOOKKEEPING,
}

CHAT = table(
    "/api/chat",
    {
        **_BOTH,
        "messages": own(type=["array", "null"], items={"type": "object", "required": ["role"]}),
    },
)
"""What becomes of the fields of `/api/chat`."""

GENERATE = table(
    "/api/generate",
    {
        **_BOTH,
        "messages": only([], because="send prompt, or ask /api/chat"),
        "prompt": own(type=["string", "null"]),
        "system": own(type=["string", "null"]),
        "context": only([]),
        "images": own(type=["array", "null"], items={"type": "string", "contentEncoding": "base64"}),
        "raw": only(False),
        "template": only(""),
    },
)
"""What becomes of the fields of `/api/generate`."""


class _Load(Body):
    """What a request without a prompt asks for."""

    model: str = ""
    keep_alive: KeepAlive = None


def ask_ollama_chat(value: _Object, request_id: str) -> Asked:
    """The request of `/api/chat`; one without messages loads the model. Raises InvalidInput with `param`,
    which names the field."""
    chat = translate(value, CHAT)
    messages = as_list(value.get("messages") or [], "messages")
    if not messages:
        return _loading(chat, value, request_id, "message")
    for at, one in enumerate(messages):
        _add_message(chat, one, f"messages[{at}]")
    chat.go_on()
    return _asked(chat, value, request_id, "message")


def ask_ollama_generate(value: _Object, request_id: str) -> Asked:
    """A prompt in the model's chat template, with `system` before it; without one, and without images, it
    loads the model.

    Raises InvalidInput with `param`, which names the field.
    """
    chat = translate(value, GENERATE)
    images = _images(value, "images")
    if not value.get("prompt") and not value.get("system") and not images:
        return _loading(chat, value, request_id, "response")
    if value.get("system"):
        chat.add_message({"role": "system", "content": value["system"]}, "system")
    content = _content(value.get("prompt") or "", images)
    chat.names["messages[0].content"] = "system"
    chat.add_message({"role": "user", "content": content}, "prompt", _places("prompt", "images", images))
    return _asked(chat, value, request_id, "response")


def _asked(chat: Translated, value: _Object, request_id: str, field: str) -> Asked:
    options = value.get("options")
    if isinstance(options, dict) and options.get("repeat_last_n") == 0:
        chat.fields["repetition_penalty"] = 0
    stream, now, logs = value.get("stream"), time.monotonic_ns(), bool(value.get("logprobs"))
    asked = ask_as_chat(chat, request_id, lambda started: OllamaRenderer(started, field, now, logs=logs))
    return dataclasses.replace(asked, stream=stream is None or bool(stream))


def _loading(chat: Translated, value: _Object, request_id: str, field: str) -> Asked:
    """A wish to load the model, or with a `keep_alive` of 0 to unload it."""
    fields = {name: item for name, item in chat.fields.items() if name in _Load.model_fields}
    body = check_body(fields, _Load)
    request = inference.GenerateRequest(
        model=clean(body.model, "model"), request_id=request_id, choices=1, keep_alive=body.keep_alive
    )
    stream, now = value.get("stream"), time.monotonic_ns()
    reason = "unload" if body.keep_alive == 0 else "load"

    def render(started: inference.Started) -> Renderer:
        return _LoadRenderer(started, field, now, reason)

    return Asked(request, render, stream is None or bool(stream), loads=True)


def _add_message(chat: Translated, message: Any, param: str) -> None:
    """A call has no id, and its arguments are an object; results name their tool; images are a field."""
    message = as_object(message, param)
    told = {name: message[name] for name in ("role", "content") if name in message}
    images = _images(message, f"{param}.images")
    if images:
        told["content"] = _content(message.get("content") or "", images)
    if message.get("thinking"):
        told["reasoning_content"] = message["thinking"]
    if message.get("role") == "tool":
        told["name"] = message.get("tool_name") or message.get("name")
        told["tool_call_id"] = message.get("tool_call_id")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise bad(f"{param}.tool_calls", "it is not a list of objects")
    if calls:
        told["tool_calls"] = [{"id": call.get("id"), "function": _function(call)} for call in calls]
    places = _places(f"{param}.content", f"{param}.images", images)
    chat.add_message(
        told, param, {"reasoning_content": f"{param}.thinking", "reasoning": f"{param}.thinking", **places}
    )


def _images(holder: _Object, param: str) -> list[Any]:
    return as_list(holder.get("images") or [], param)


def _content(text: Any, images: list[Any]) -> Any:
    """The images stand before the text, as Ollama has them."""
    if not images:
        return text
    return [*map(base64_part, images), {"type": "text", "text": text}]


def _places(text: str, images: str, shown: list[Any]) -> dict[str, str]:
    """The paths in the body of the parts of `_content`."""
    parts = {f"content[{at}]": f"{images}[{at}]" for at in range(len(shown))}
    return {"content": text, f"content[{len(shown)}]": text, **parts}


def _function(call: _Object) -> _Object:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return {"name": function.get("name"), "arguments": json.dumps(function.get("arguments") or {})}


class OllamaRenderer(Renderer):
    """One JSON object a line."""

    media_type = "application/x-ndjson"

    ping = b" "
    """A space before a line's object: clients parse each line as JSON, which may begin with spaces and is
    never empty."""

    def __init__(self, started: inference.Started, field: str, asked: int, *, logs: bool = False) -> None:
        """`asked` is when, in nanoseconds of the monotonic clock; `logs`: with log-probabilities."""
        super().__init__(started)
        self._field, self._logs = field, logs
        self._asked = self._begun = asked
        self._loaded = min(asked + started.load_ms * 1_000_000, time.monotonic_ns())
        self._model = started.model

    def _told(self, answer: _Object) -> _Object:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        told = {"model": self._model, "created_at": now}
        if self._field == "message":
            return {**told, "message": {"role": "assistant", "content": "", **answer}}
        return {**told, "response": answer.pop("content", ""), **answer}

    @staticmethod
    def _answer(delta: inference.Delta) -> _Object:
        answer: _Object = {}
        for kind, piece in pieces(delta):
            if isinstance(piece, inference.ToolCall):
                function = {"name": piece.name, "arguments": json.loads(piece.arguments or "{}")}
                answer.setdefault("tool_calls", []).append({"function": function})
            else:
                answer["thinking" if kind == "reasoning" else "content"] = piece
        return answer

    def _logged(self, tokens: Logprobs) -> _Object:
        """Beside the message, where log-probabilities were asked for."""
        return {"logprobs": chat_logprobs(tokens or ())["content"]} if self._logs else {}

    def delta(self, delta: inference.Delta) -> bytes:
        if self._begun == self._asked:
            self._begun = time.monotonic_ns()
        return _line({**self._told(self._answer(delta)), "done": False, **self._logged(delta.logprobs)})

    def _end(self, answer: _Object, finished: inference.Finished) -> _Object:
        now = time.monotonic_ns()
        self._begun = max(self._begun, self._loaded)
        return {
            **self._told(answer),
            "done": True,
            "done_reason": self.reasons(finished)[0],
            "total_duration": now - self._asked,
            "load_duration": self._loaded - self._asked,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": self._begun - self._loaded,
            "eval_count": finished.completion_tokens,
            "eval_duration": now - self._begun,
            **receipt_of(finished),
        }

    def last(self, finished: inference.Finished) -> bytes:
        return _line(self._end({}, finished))

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        (answer,) = answers
        self._begun = max(answer.begun, self._asked)
        delta = inference.Delta(text=answer.text)
        delta.parsed.reasoning = answer.reasoning
        delta.parsed.tool_calls.extend(answer.calls)
        return _line(self._end(self._answer(delta), finished) | self._logged(answer.logprobs))

    def error(self, error: SealringError) -> bytes:
        return _line(ollama_error(error))


def _line(value: _Object) -> bytes:
    return json.dumps(value).encode() + b"\n"


class _LoadRenderer(OllamaRenderer):
    """The answer to a request that asks for no more than the model."""

    def __init__(self, started: inference.Started, field: str, asked: int, reason: str) -> None:
        super().__init__(started, field, asked)
        self._reason = reason

    def _end(self, answer: _Object, finished: inference.Finished) -> _Object:
        return {**self._told(answer), "done": True, "done_reason": self._reason}


def tags(models: list[inference.Model]) -> _Object:
    """`GET /api/tags`: the models that can be asked for, loaded or not, each under all of its names, as
    Ollama lists a copy."""
    named = ((one, name) for one in models for name in (one.name, *one.aliases) if not name.endswith("*"))
    return {
        "models": [
            _listed(one, name) | {"state": state_of(one), "capabilities": _capabilities(one)}
            for one, name in named
        ]
    }


def loaded(models: list[inference.Model]) -> _Object:
    """`GET /api/ps`: the models that are loaded, each with the time at which it is unloaded, and as in Ollama
    those that are being loaded. That time has passed if a model is being unloaded."""
    return {"models": [_running(one) for one in models if state_of(one) in ("loaded", "loading")]}


def _running(model: inference.Model) -> _Object:
    state = state_of(model)
    share = 100 if state == "loaded" else model.progress
    return _listed(model, model.name) | {
        "expires_at": _time(model.expires) if model.expires else _NEVER,
        "size_vram": model.memory * share // 100,
        "state": state,
        **told(model),
    }


def _listed(model: inference.Model, name: str) -> _Object:
    digest = {"digest": model.digest} if model.digest else {}
    return {"name": name, "model": name, "size": model.memory, **digest, **_details(model)}


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _count(parameters: int) -> str:
    """A number of parameters as Ollama writes it: 1.2B, 768M, 99K; empty if it is not known."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.2f}".rstrip("0").rstrip(".") + letter
    return str(parameters or "")


def show(model: inference.Model) -> _Object:
    """`POST /api/show`."""
    kind = model.model_type
    information = {
        "general.architecture": kind,
        "general.basename": model.name,
        **({"general.parameter_count": model.card.parameters} if model.card.parameters else {}),
        f"{kind}.context_length": model.context,
    }
    return {**_details(model), "model_info": information, "capabilities": _capabilities(model)}


def _capabilities(model: inference.Model) -> list[str]:
    generates = not {EMBEDDING, RERANK} & set(model.capabilities)
    return [*["completion"] * generates, *model.capabilities]


def _details(model: inference.Model) -> _Object:
    kind = model.model_type
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": kind,
        "families": [kind] if kind else [],
        "parameter_size": _count(model.card.parameters),
        "quantization_level": _LEVELS.get(model.card.precision, model.card.precision),
        "context_length": model.context,
    }
    return {
        "modified_at": _time(model.created),
        "details": details,
        "context_length": model.context,
    }
