"""Ollama's `/api/chat` and `/api/generate`, and what its clients ask about models."""

from __future__ import annotations

import json
import time
from typing import Any

from sealring.api.answers import Asked, Choice, Renderer, pieces
from sealring.api.chat import chat_request, parse_chat
from sealring.api.errors import ollama_error
from sealring.api.fields import as_list, as_object, bad, unsupported
from sealring.mesh.errors import SealringError
from sealring.v1 import inference_pb2 as inference

VERSION = "0.12.0"
"""Of Ollama, whose API this is; clients compare versions."""

_OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""What the options are called in a chat completion."""

_MACHINE = frozenset(
    {"low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "use_mmap"}
)
"""Options of one machine's runner, which a ring sets by itself."""

_Object = dict[str, Any]


def ask_ollama_chat(value: _Object, request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    chat = _common(value, {"messages", "tools"})
    messages = as_list(value.get("messages"), "messages")
    chat["messages"] = [_message(one, f"messages[{at}]") for at, one in enumerate(messages)]
    chat["tools"] = value.get("tools")
    return _asked(chat, value, request_id, "message")


def ask_ollama_generate(value: _Object, request_id: str) -> Asked:
    """A prompt in the model's chat template, with `system` before it. Raises InvalidInput with `param`."""
    chat = _common(value, {"prompt", "system"})
    system = [{"role": "system", "content": value["system"]}] if value.get("system") else []
    chat["messages"] = [*system, {"role": "user", "content": value.get("prompt") or ""}]
    return _asked(chat, value, request_id, "response")


def _asked(chat: _Object, value: _Object, request_id: str, field: str) -> Asked:
    request = chat_request(parse_chat(chat), request_id)
    stream, now = value.get("stream"), time.monotonic_ns()
    return Asked(request, lambda started: OllamaRenderer(started, field, now), stream is None or bool(stream))


def _common(value: _Object, own: set[str]) -> _Object:
    chat: _Object = {"model": value.get("model")}
    for name, item in value.items():
        if item in (None, "", [], {}) or name in {"model", "stream", "keep_alive", *own}:
            continue
        if name == "think":
            chat["enable_thinking"] = item is not False
            if isinstance(item, str):
                chat["reasoning_effort"] = item
        elif name == "format":
            schema = {"type": "object"} if item == "json" else as_object(item, name)
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        elif name == "options" and isinstance(item, dict):
            for option, number in item.items():
                if option in _OPTIONS:
                    chat[_OPTIONS[option]] = number
                elif option not in _MACHINE:
                    raise unsupported(f"options.{option[:64]}")
        else:
            raise unsupported(name[:64])
    if isinstance(chat.get("max_tokens"), int) and chat["max_tokens"] < 0:  # as many as there is room for
        del chat["max_tokens"]
    if isinstance(name := chat["model"], str):
        chat["model"] = name.removesuffix(":latest")
    return chat


def _message(message: Any, param: str) -> _Object:
    """A call has no id, and its arguments are an object; results name their tool."""
    message = as_object(message, param)
    if message.get("images"):
        raise unsupported(f"{param}.images")
    told = {name: message[name] for name in ("role", "content") if name in message}
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
    return told


def _function(call: _Object) -> _Object:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return {"name": function.get("name"), "arguments": json.dumps(function.get("arguments") or {})}


class OllamaRenderer(Renderer):
    """One JSON object a line. There is none that tells nothing, so a silent stream is not kept alive."""

    media_type = "application/x-ndjson"
    ping = b""

    def __init__(self, started: inference.Started, field: str, asked: int) -> None:
        """`asked` is when, in nanoseconds of the monotonic clock."""
        super().__init__(started)
        self._field = field
        self._asked = self._begun = asked
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

    def delta(self, delta: inference.Delta) -> bytes:
        if self._begun == self._asked:
            self._begun = time.monotonic_ns()
        return _line({**self._told(self._answer(delta)), "done": False})

    def _end(self, answer: _Object, finished: inference.Finished) -> _Object:
        now = time.monotonic_ns()
        return {
            **self._told(answer),
            "done": True,
            "done_reason": self.reasons(finished)[0],
            "total_duration": now - self._asked,
            "load_duration": 0,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": self._begun - self._asked,
            "eval_count": finished.completion_tokens,
            "eval_duration": now - self._begun,
        }

    def last(self, finished: inference.Finished) -> bytes:
        return _line(self._end({}, finished))

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        (answer,) = answers
        delta = inference.Delta(text=answer.text)
        delta.parsed.reasoning = answer.reasoning
        delta.parsed.tool_calls.extend(answer.calls)
        return _line(self._end(self._answer(delta), finished))

    def error(self, error: SealringError) -> bytes:
        return _line(ollama_error(error))


def _line(value: _Object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def tags(models: list[inference.Model]) -> _Object:
    """`GET /api/tags`, and `/api/ps`: what is served is loaded."""
    return {"models": [{"name": one.name, "model": one.name, **_details(one)} for one in models]}


def show(model: inference.Model) -> _Object:
    """`POST /api/show`."""
    kind = model.model_type
    information = {"general.architecture": kind, f"{kind}.context_length": model.context}
    return {**_details(model), "model_info": information, "capabilities": ["completion", "tools", "thinking"]}


def _details(model: inference.Model) -> _Object:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(model.created))
    family = {"format": "safetensors", "family": model.model_type, "context_length": model.context}
    return {
        "modified_at": created,
        "details": family,
        "context_length": model.context,
    }
