"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages, as Claude Code speaks them."""

from __future__ import annotations

import json
from typing import Any

from sealring.api.answers import Asked, Choice, Renderer, call_id, event, pieces
from sealring.api.chat import chat_request, parse_chat
from sealring.api.errors import anthropic_error
from sealring.api.fields import as_list, as_object, bad, unsupported
from sealring.mesh.errors import SealringError
from sealring.v1 import inference_pb2 as inference

_SAME = ("max_tokens", "temperature", "top_p", "top_k", "stream")
"""Fields that mean what OpenAI's of the same name do."""

_IGNORED = frozenset(
    {"cache_control", "context_management", "inference_geo", "metadata", "service_tier", "speed"}
)
"""Bookkeeping: no answer depends on it here."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens"}


def ask_messages(value: dict[str, Any], request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    if "max_tokens" not in value:
        raise bad("max_tokens", "it is missing")
    body = parse_chat(_chat(value))
    return Asked(chat_request(body, request_id), MessageRenderer, bool(body.stream))


def ask_count(value: dict[str, Any], request_id: str) -> Asked:
    """The shortest answer to the same: its start, or else its end, tells how long the prompt is."""
    body = parse_chat({**_chat(value), "max_tokens": 1, "stream": False})
    return Asked(chat_request(body, request_id), MessageRenderer)


def _chat(value: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks the same."""
    chat: dict[str, Any] = {}
    thinking: Any = {}
    for name, item in value.items():
        if item is None or name in _IGNORED:
            continue
        if name in _SAME:
            chat[name] = item
        elif name == "model":
            # Claude Code asks in the background for models that are served nowhere but at its maker's
            chat["model"] = "" if isinstance(item, str) and item.startswith("claude-") else item
        elif name == "stop_sequences":
            chat["stop"] = item
        elif name == "thinking":
            thinking = as_object(item, name)
        elif name == "output_config":
            if unknown := set(as_object(item, name)) - {"effort", "format"}:
                raise unsupported(f"output_config.{min(unknown)[:64]}")
            if item.get("format") is not None:
                form = as_object(item["format"], "output_config.format")
                chat["response_format"] = {
                    "type": form.get("type"),
                    "json_schema": {"schema": form.get("schema")},
                }
            effort = item.get("effort")
            chat["reasoning_effort"] = "xhigh" if effort == "max" else effort
        elif name not in ("messages", "system", "tools", "tool_choice"):
            raise unsupported(name[:64])
    if thinking.get("type") in ("enabled", "disabled"):
        chat["enable_thinking"] = thinking["type"] == "enabled"
    chat["messages"] = _messages(value)
    chat["tools"] = [
        _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(as_list(value.get("tools") or [], "tools"))
    ]
    choice = as_object(value.get("tool_choice") or {"type": "auto"}, "tool_choice")
    chosen = str(choice.get("type"))
    if chosen == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif chosen in _CHOICES:
        chat["tool_choice"] = _CHOICES[chosen]
    else:
        raise bad("tool_choice.type", "it is none of auto, any, tool and none")
    chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return chat


def _messages(value: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if value.get("system"):
        found.append({"role": "system", "content": _texts(value["system"], "system")})
    for index, item in enumerate(as_list(value.get("messages") or [], "messages")):
        param = f"messages[{index}]"
        message = as_object(item, param)
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad(f"{param}.role", "it is none of user, assistant and system")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif isinstance(content, list):
            blocks = [as_object(block, f"{param}.content[{at}]") for at, block in enumerate(content)]
            found += _assistant(blocks) if role == "assistant" else _user(role, blocks, param)
        else:
            raise bad(f"{param}.content", "it is neither text nor a list of blocks")
    return found


def _user(role: str, blocks: list[dict[str, Any]], param: str) -> list[dict[str, Any]]:
    """The results of tools come first, each as a message of its own."""
    results: list[dict[str, Any]] = []
    rest = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _texts(block.get("content") or "", f"{param}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        else:
            rest.append(_part(block))
    return [*results, *([{"role": role, "content": rest}] if rest else [])]


def _assistant(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant"}
    texts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(_part(block))
    if texts:
        message["content"] = texts
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return [message]


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """A text without what else may stand beside it; anything else is refused by who reads the chat."""
    return {name: item for name, item in block.items() if name in ("type", "text")}


def _texts(content: Any, param: str) -> Any:
    if isinstance(content, list):
        return [_part(as_object(block, f"{param}[{at}]")) for at, block in enumerate(content)]
    return content


def _tool(tool: Any, param: str) -> dict[str, Any]:
    tool = as_object(tool, param)
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{param}.type", "only tools with an input_schema are")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function |= {"parameters": tool.get("input_schema"), "strict": tool.get("strict")}
    return {"type": "function", "function": function}


class MessageRenderer(Renderer):
    """One content block is open at a time; their indices have no gaps."""

    ping = event({"type": "ping"}, "ping")

    def __init__(self, started: inference.Started) -> None:
        super().__init__(started)
        self._message: dict[str, Any] = {
            "id": f"msg_{started.request_id}",
            "type": "message",
            "role": "assistant",
            "model": started.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": started.prompt_tokens, "output_tokens": 0},
        }
        self._blocks = self._calls = 0
        self._open = self._matched = ""

    def first(self) -> bytes:
        return event({"type": "message_start", "message": self._message}, "message_start")

    def delta(self, delta: inference.Delta) -> bytes:
        self._matched = delta.parsed.stop
        return b"".join(self._piece(kind, piece) for kind, piece in pieces(delta))

    def _piece(self, kind: str, piece: str | inference.ToolCall) -> bytes:
        told = b""
        if kind != self._open or kind == "call":
            told = self._close()
            self._open = kind
            told += self._event(
                "content_block_start", content_block={**self._block(kind, piece), **_EMPTY[kind]}
            )
        if isinstance(piece, inference.ToolCall):
            change = {"type": "input_json_delta", "partial_json": piece.arguments or "{}"}
        elif kind == "text":
            change = {"type": "text_delta", "text": piece}
        else:
            change = {"type": "thinking_delta", "thinking": piece}
        return told + self._event("content_block_delta", delta=change)

    def _block(self, kind: str, piece: str | inference.ToolCall) -> dict[str, Any]:
        if isinstance(piece, inference.ToolCall):
            name = call_id(self.request_id, 0, self._calls, piece)
            self._calls += 1
            return {
                "type": "tool_use",
                "id": name,
                "name": piece.name,
                "input": json.loads(piece.arguments or "{}"),
            }
        return {"type": "text", "text": piece} if kind == "text" else {"type": "thinking", "thinking": piece}

    def _close(self) -> bytes:
        if not self._open:
            return b""
        told = self._event("content_block_stop")
        self._blocks += 1
        self._open = ""
        return told

    def _event(self, name: str, **fields: Any) -> bytes:
        return event({"type": name, "index": self._blocks, **fields}, name)

    def last(self, finished: inference.Finished) -> bytes:
        told = self._close()
        told += event(
            {"type": "message_delta", "delta": self._stop(finished), "usage": _usage(finished)},
            "message_delta",
        )
        return told + event({"type": "message_stop"}, "message_stop")

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        (answer,) = answers
        whole = inference.Delta(text=answer.text)
        whole.parsed.reasoning = answer.reasoning
        whole.parsed.tool_calls.extend(answer.calls)
        content = [{**_EMPTY[kind], **self._block(kind, piece)} for kind, piece in pieces(whole)]
        self._matched = answer.stop
        told = {"content": content, **self._stop(finished), "usage": _usage(finished)}
        return json.dumps({**self._message, **told}).encode()

    def _stop(self, finished: inference.Finished) -> dict[str, str | None]:
        """Calls come first: clients make them only where they are what the answer ended with."""
        (reason,) = self.reasons(finished)
        if self._calls and reason == "stop":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self._matched:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._matched}
        return {"stop_reason": _STOPS[reason], "stop_sequence": None}

    def error(self, error: SealringError) -> bytes:
        return event(anthropic_error(error), "error")


_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "reasoning": {"thinking": "", "signature": ""},
    "call": {"input": {}},
}


def _usage(finished: inference.Finished) -> dict[str, int]:
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_read_input_tokens": finished.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": finished.completion_tokens,
    }
