"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages, as Claude Code speaks them."""

from __future__ import annotations

import json
from typing import Any

from sealring.api.answers import Asked, Choice, Renderer, call_id, event, pieces, receipt_of
from sealring.api.chat import EVERY, ask_as_chat, loaded_tool
from sealring.api.errors import anthropic_error
from sealring.api.fields import (
    BOOKKEEPING,
    Rule,
    Rules,
    Translated,
    as_list,
    as_object,
    bad,
    only,
    own,
    table,
    taken_as,
    translate,
    unsupported,
)
from sealring.api.sampling import thinking_of
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.v1 import inference_pb2 as inference

_Object = dict[str, Any]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOPS = {"stop": "end_turn", "length": "max_tokens"}

_HOSTED = frozenset(
    {
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "mcp_tool_result",
        "mcp_tool_use",
        "redacted_thinking",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)
"""Blocks of an assistant that its maker's servers made: nothing of them was said."""


def _no_thread(item: Any, param: str) -> _Object:
    """A thread is a conversation that the server keeps, and continues by its last messages alone.

    Anthropic's helpers then send the whole conversation, if the error names what it does not support.
    """
    raise InvalidInput(
        "conversations are not kept here",
        hint="send all of the conversation: with tool_runner, thread=False",
        reason="THREADS_UNSUPPORTED",
        param=param,
    )


def _format(item: Any, param: str) -> _Object:
    form = as_object(item, param)
    return {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}


_FORMAT = taken_as("response_format", _format)
_CHOICE = dict.fromkeys(("type", "name", "disable_parallel_tool_use"), own())

_OWN: Rules = {
    "messages": own(type="array", minItems=1, items={"type": "object", "required": ["role", "content"]}),
    "system": own(type=["string", "array", "null"]),
    "stop_sequences": taken_as("stop"),
    "tools": own(type=["array", "null"]),
    "tool_choice": own(type=["object", "null"]),
    "thinking": Rule(spread=lambda item, param: thinking_of(as_object(item, param))),
    "output_config": Rule(
        parts={"effort": taken_as("reasoning_effort"), "format": _FORMAT, "task_budget": BOOKKEEPING}
    ),
    "output_format": _FORMAT,
    "betas": BOOKKEEPING,
    "cache_control": BOOKKEEPING,  # prefixes are cached without being asked
    "container": only({}, because="no code is run here"),
    "context_management": BOOKKEEPING,
    "diagnostics": BOOKKEEPING,
    "fallbacks": only([]),
    "inference_geo": BOOKKEEPING,
    "mcp_servers": only([], because="call the tools of these servers yourself"),
    "safeguards": BOOKKEEPING,
    "speed": BOOKKEEPING,
    "thread": Rule(spread=_no_thread),
    "user_profile_id": BOOKKEEPING,
    "logprobs": only(False, because="answers of this API have none: ask /v1/chat/completions"),
    "top_logprobs": only(0),
}

MESSAGES = table("/v1/messages", {**EVERY, **_OWN})
"""What becomes of the fields of `/v1/messages`."""


def ask_messages(value: _Object, request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    if value.get("max_tokens") is None:
        raise bad("max_tokens", "it is missing")
    return ask_as_chat(_chat(value), request_id, MessageRenderer)


def ask_count(value: _Object, request_id: str) -> Asked:
    """The shortest answer to the same: its start, or else its end, tells how long the prompt is."""
    chat = _chat(value)
    chat.fields |= {"max_tokens": 1, "stream": False}
    return ask_as_chat(chat, request_id, MessageRenderer)


def _chat(value: _Object) -> Translated:
    """The body of a chat completion that asks the same."""
    chat = translate(value, MESSAGES)
    _add_choice(chat, value.get("tool_choice"))
    tools = _tools(value.get("tools"))
    if value.get("system"):
        chat.add_message(
            {"role": "system", "content": _texts(value["system"], "system")}, "system", {"content": "system"}
        )
    for index, item in enumerate(as_list(value.get("messages") or [], "messages")):
        _add_message(chat, as_object(item, f"messages[{index}]"), f"messages[{index}]", tools)
    _add_tools(chat, tools)
    chat.go_on()
    return chat


def _add_choice(chat: Translated, item: Any) -> None:
    choice = as_object({"type": "auto"} if item is None else item, "tool_choice")
    translate(choice, _CHOICE, "tool_choice.")
    chosen = str(choice.get("type"))
    if chosen == "tool":
        called = {"type": "function", "function": {"name": choice.get("name")}}
        chat.put("tool_choice", called, "tool_choice")
    elif chosen in _CHOICES:
        chat.put("tool_choice", _CHOICES[chosen], "tool_choice")
    else:
        raise bad("tool_choice.type", "it is none of auto, any, tool and none")
    chat.put("parallel_tool_calls", not choice.get("disable_parallel_tool_use"), "tool_choice")


def _tools(given: Any) -> dict[str, tuple[str, _Object]]:
    """The tools by name: where in the body each is, and what it says.

    Those that its maker's servers run are not there, and the model is not shown them beside others. Raises
    InvalidInput (BAD_FIELD), UNSUPPORTED_FIELD where there are no others.
    """
    found: dict[str, tuple[str, _Object]] = {}
    hosted = ""
    for index, item in enumerate(as_list([] if given is None else given, "tools")):
        param = f"tools[{index}]"
        tool = as_object(item, param)
        if tool.get("type") not in (None, "custom"):
            hosted = hosted or f"{param}.type"
            continue
        if not isinstance(name := tool.get("name"), str):
            raise bad(f"{param}.name", "it is not a text")
        if name in found:
            raise bad(f"{param}.name", "another tool has it")
        found[name] = param, tool
    if hosted and not found:
        raise unsupported(hosted, "only tools with an input_schema are")
    return found


def _function(tool: _Object) -> _Object:
    return {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
        "strict": tool.get("strict"),
    }


def _add_tools(chat: Translated, tools: dict[str, tuple[str, _Object]]) -> None:
    """A tool whose loading is deferred is left out until a message refers to it, where it is then defined."""
    chosen = chat.fields.get("tool_choice")
    called = chosen["function"]["name"] if isinstance(chosen, dict) else ""
    for name, (param, tool) in tools.items():
        if tool.get("defer_loading") and name not in chat.loaded and name != called:
            continue
        chat.add_tool(_function(tool), param, {"parameters": "input_schema"})


def _add_message(
    chat: Translated, message: _Object, param: str, tools: dict[str, tuple[str, _Object]]
) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f"{param}.role", "it is none of user, assistant and system")
    if isinstance(content, str):
        chat.add_message({"role": role, "content": content}, param)
    elif isinstance(content, list):
        blocks = [(f"{param}.content[{at}]", block) for at, block in enumerate(content)]
        for path, block in blocks:
            as_object(block, path)
        if role == "assistant":
            _add_assistant(chat, blocks, param)
        else:
            _add_user(chat, role, blocks, param, tools)
    else:
        raise bad(f"{param}.content", "it is neither text nor a list of blocks")


_KEPT = ("type", "text", "tool_name", "source")
"""Fields of a block that the chat's reader knows."""

_Blocks = list[tuple[str, _Object]]
"""Each with where it is."""


def _add_user(
    chat: Translated, role: str, blocks: _Blocks, param: str, tools: dict[str, tuple[str, _Object]]
) -> None:
    """The results of tools come first, each as a message of its own."""
    rest, places = list[_Object](), dict[str, str]()
    for path, block in blocks:
        if block.get("type") != "tool_result":
            places[f"content[{len(rest)}]"] = path
            rest.append(_part(block))
            continue
        content = _texts(block.get("content") or "", f"{path}.content")
        if isinstance(content, list):
            content = [_referred(chat, part, tools) for part in content]
        within = dict[str, str]()
        if block.get("is_error"):
            said = content if isinstance(content, list) else [{"type": "text", "text": content}]
            content = [{"type": "text", "text": "the tool failed:"}, *said]
            within = {f"content[{at + 1}]": f"{path}.content[{at}]" for at in range(len(said))}
        result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
        chat.add_message(result, path, within)
    if rest:
        chat.add_message({"role": role, "content": rest}, param, places)


def _referred(chat: Translated, part: _Object, tools: dict[str, tuple[str, _Object]]) -> _Object:
    """A reference to a tool is its definition: the prompt goes on with it, and its beginning stays."""
    if part.get("type") != "tool_reference":
        return part
    name = str(part.get("tool_name"))
    if name not in tools:
        return {"type": "text", "text": f"there is no tool {name}"}
    _, tool = tools[name]
    if not tool.get("defer_loading") or name in chat.loaded:  # its definition is there already
        return {"type": "text", "text": f"tool {name} is loaded"}
    chat.loaded.add(name)
    return {"type": "text", "text": loaded_tool(_function(tool))}


def _add_assistant(chat: Translated, blocks: _Blocks, param: str) -> None:
    message: _Object = {"role": "assistant"}
    texts, calls, thoughts = list[_Object](), list[_Object](), list[str]()
    places = dict[str, str]()
    for path, block in blocks:
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            at = f"tool_calls[{len(calls)}]"
            places |= {f"{at}.function": path, at: path}
            places |= dict.fromkeys((f"{at}.function.arguments", f"{at}.arguments"), f"{path}.input")
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in _HOSTED:
            places[f"content[{len(texts)}]"] = path
            texts.append(_part(block))
    if texts:
        message["content"] = texts
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    chat.add_message(message, param, places)


def _part(block: _Object) -> _Object:
    """A block as a part of a chat's message: a text without what else may stand beside it.

    Documents and search results of plain text are texts; anything else is for the chat's reader to judge.
    """
    kind, source = block.get("type"), block.get("source")
    texts = [block.get("title")]
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        texts += [block.get("context"), *_strings(source.get("data") or source.get("content"))]
    elif kind == "search_result":
        texts += [source, *_strings(block.get("content"))]
    else:
        return {name: item for name, item in block.items() if name in _KEPT}
    return {"type": "text", "text": "\n".join(text for text in texts if isinstance(text, str) and text)}


def _strings(content: Any) -> list[Any]:
    """The texts of a text, or of a list of blocks."""
    if isinstance(content, list):
        return [part.get("text") if isinstance(part, dict) else None for part in content]
    return [content]


def _texts(content: Any, param: str) -> Any:
    if isinstance(content, list):
        return [_part(as_object(block, f"{param}[{at}]")) for at, block in enumerate(content)]
    return content


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
            # what of the prompt is cached is known later, and told with `message_delta`, which replaces this
            "usage": {
                "input_tokens": started.prompt_tokens,
                "cache_read_input_tokens": 0,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
            },
        }
        self._blocks = self._calls = self._thought = 0
        self._open = self._matched = ""

    def first(self) -> bytes:
        return event({"type": "message_start", "message": self._message}, "message_start")

    def delta(self, delta: inference.Delta) -> bytes:
        self._matched = delta.parsed.stop
        if delta.parsed.reasoning:
            self._thought = delta.tokens
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
            {
                "type": "message_delta",
                "delta": self._stop(finished),
                "usage": _usage(finished, self._thought),
                **receipt_of(finished),
            },
            "message_delta",
        )
        return told + event({"type": "message_stop"}, "message_stop")

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        (answer,) = answers
        content = [{**_EMPTY[kind], **self._block(kind, piece)} for kind, piece, _ in answer.parts()]
        self._matched = answer.stop
        usage = _usage(finished, answer.reasoning_tokens)
        told = {"content": content, **self._stop(finished), "usage": usage}
        return json.dumps({**self._message, **told, **receipt_of(finished)}).encode()

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


def _usage(finished: inference.Finished, thought: int) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens - finished.cached_tokens,
        "cache_read_input_tokens": finished.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thought},
    }
