"""`POST /v1/responses`: OpenAI's Responses, without memory between them, as Codex speaks them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from sealring.api.answers import Asked, Choice, Renderer, call_id, event, of_text, pieces, receipt_of
from sealring.api.chat import EVERY, ask_as_chat, loaded_tool
from sealring.api.errors import error_body
from sealring.api.fields import (
    BOOKKEEPING,
    Rule,
    Rules,
    Translated,
    as_list,
    as_object,
    as_text,
    bad,
    only,
    own,
    table,
    taken_as,
    translate,
    unsupported,
)
from sealring.api.logprobs import chat_logprobs
from sealring.api.patterns import pattern_of
from sealring.mesh.errors import InvalidInput, SealringError
from sealring.mesh.prompt.options import own_of
from sealring.mesh.prompt.tools import MAX_SCHEMA_BYTES, MAX_TOOLS
from sealring.v1 import inference_pb2 as inference

_Object = dict[str, Any]


def _format(item: Any, param: str) -> _Object:
    """As a chat completion has it: all but the type is one level deeper."""
    form = as_object(item, param)
    rest = {name: each for name, each in form.items() if name != "type"}
    return {"type": form.get("type"), **({"json_schema": rest} if rest else {})}


def _included(item: Any, param: str) -> _Object:
    """Log-probabilities have to be asked for; reasoning and the rest come in any case, or are not there."""
    return {"logprobs": True} if "message.output_text.logprobs" in as_list(item, param) else {}


def _likeliest(item: Any, param: str) -> _Object:
    return {"logprobs": True, "top_logprobs": item}


_CHOICE = dict.fromkeys(("type", "name", "namespace"), own())
_ALONE = "nothing is stored: send the whole conversation in input"

_OWN: Rules = {
    "input": own(type=["string", "array"]),
    "instructions": own(type=["string", "array", "null"]),
    "tools": own(type=["array", "null"]),
    "tool_choice": own(type=["string", "object", "null"]),
    "generate": own(type=["boolean", "null"]),
    "max_output_tokens": taken_as("max_tokens"),
    "text": Rule(parts={"format": taken_as("response_format", _format, {}), "verbosity": BOOKKEEPING}),
    "reasoning": Rule(
        parts={
            "effort": taken_as("reasoning_effort"),
            "context": BOOKKEEPING,
            "generate_summary": BOOKKEEPING,  # reasoning comes as it is
            "summary": BOOKKEEPING,
        }
    ),
    "background": only(False),
    "client_metadata": BOOKKEEPING,
    "conversation": only(because=_ALONE),
    "include": Rule(spread=_included),
    "max_tool_calls": BOOKKEEPING,  # of hosted tools, which are not there
    "previous_response_id": only(because=_ALONE),
    "top_logprobs": Rule(spread=_likeliest, ignored_when=(0,)),
    "truncation": only("disabled"),
}

RESPONSES = table("/v1/responses", {**EVERY, **_OWN})
"""What becomes of the fields of `/v1/responses`."""

ECHOED: dict[str, Any] = {
    "background": False,
    "completed_at": None,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
}
"""What a response has beside its answer, as openresponses.org requires it: the request's own, or this."""

_LONGEST_NAME = 64

_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "tool_search_call": "arguments",
}
"""Kinds of items that are calls, and the field that holds each one's arguments."""

_NAMELESS = {"local_shell_call": "local_shell", "tool_search_call": "tool_search"}
"""Calls whose items have no name, and what the model calls their tools."""

OpenSummary: TypeAlias = Callable[[str, str], str]
"""Opens the sealed summary of a conversation; the second argument is the name of its field. Raises
InvalidInput."""

_COMPACTION = ("compaction", "compaction_summary")

_SUMMARIZED = "What was said and done before, in summary:"

_HOSTED = frozenset({"web_search_call", "image_generation_call", "ghost_snapshot"})
"""Items of what its maker's servers did or Codex notes for itself: nothing of them was said."""


class _Tools:
    """The tools of one request: under which name the model knows each, and what its client calls it."""

    def __init__(self, chat: Translated) -> None:
        self._chat = chat
        self._names = set[str]()
        self.custom: set[str] = set()
        self.spaces: dict[str, tuple[str, str]] = {}
        self._definitions = 0  # characters

    def add(self, tools: Any, param: str, space: str = "") -> list[_Object]:
        """Adds to the chat's tools, and returns those that are new.

        Hosted tools, as web_search, are not there, and the model is not shown them. Raises InvalidInput:
        BAD_FIELD, TOO_MANY_TOOLS, GRAMMARS_TOO_LONG.
        """
        added = []
        for index, tool in enumerate(as_list(tools, param)):
            path = f"{param}[{index}]"
            kind, name = as_object(tool, path).get("type"), tool.get("name")
            if kind not in ("function", "custom", "namespace"):
                continue
            if not isinstance(name, str):
                raise bad(f"{path}.name", "it is missing")
            if kind != "namespace":
                added += self._add(tool, kind, self._named(space, name), path)
            elif space:
                raise bad(f"{path}.type", "a namespace holds no other one")
            else:
                added += self.add(tool.get("tools"), f"{path}.tools", name)
        return added

    def _add(self, tool: _Object, kind: str, name: str, path: str) -> list[_Object]:
        if name in self._names:  # found by a search, and declared
            return []
        if len(self._names) >= MAX_TOOLS:
            raise InvalidInput(
                f"there are more than {MAX_TOOLS} tools", reason="TOO_MANY_TOOLS", param=path, limit=MAX_TOOLS
            )
        self._names.add(name)
        function = {"name": name, "description": tool.get("description")}
        function |= {"parameters": tool.get("parameters"), "strict": tool.get("strict")}
        if kind == "custom":
            self.custom.add(name)
            form = as_object(tool.get("format") or {}, f"{path}.format")
            self._count(form.get("definition"), f"{path}.format.definition")
            pattern = pattern_of(form, f"{path}.format")
            told = f"\n\n{form['definition']}" if pattern else ""
            function["description"] = f"{function['description'] or ''}{told}"
            function |= {"parameters": _custom(pattern), "strict": bool(pattern)}
        self._chat.add_tool(function, path, {})
        return [function]

    def _count(self, definition: Any, param: str) -> None:
        """Bounds all grammars of a request before one is translated: that holds the event loop for about
        2 s a megabyte."""
        self._definitions += len(definition) if isinstance(definition, str) else 0
        if self._definitions > MAX_SCHEMA_BYTES:
            raise InvalidInput(
                f"the grammars of the tools are longer than {MAX_SCHEMA_BYTES} characters together",
                hint="send shorter ones, or fewer",
                reason="GRAMMARS_TOO_LONG",
                param=param,
                limit=MAX_SCHEMA_BYTES,
            )

    def load(self, tools: Any, param: str) -> str:
        """Adds tools that a search has found, and returns the text that defines them from here on."""
        found = self.add(tools, param)
        self._chat.loaded |= {function["name"] for function in found}
        return "\n".join(map(loaded_tool, found)) or "no tools found"

    def known(self, space: Any, name: Any) -> str:
        """The model's name for a tool that a client names."""
        return _flat(space, name) if isinstance(space, str) and space else str(name)

    def _named(self, space: str, name: str) -> str:
        if not space:
            return name
        known = _flat(space, name)
        if self.spaces.setdefault(known, (space, name)) != (space, name):
            raise bad("tools", "two tools have one name")
        return known


def _flat(space: str, name: Any) -> str:
    flat = f"{space}__{name}"
    if len(flat) <= _LONGEST_NAME:
        return flat
    digest = hashlib.blake2b(flat.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"{flat[: _LONGEST_NAME - 9]}_{digest}"


def ask_responses(
    value: _Object, request_id: str, open_summary: OpenSummary | None = None, continued: str | None = None
) -> Asked:
    """Raises InvalidInput with `param`, which names the field. Without `open_summary`, items of compaction
    are refused. `continued` is the id of the response whose conversation `input` begins with."""
    chat = translate(value, RESPONSES)
    if chat.names.get("response_format") == "text.format":
        chat.names["response_format.json_schema"] = "text.format"
    tools = _Tools(chat)
    tools.add(value.get("tools") or [], "tools")
    _add_choice(chat, value.get("tool_choice"), tools)
    _add_messages(chat, value, tools, open_summary)
    given = {name: item for name, item in value.items() if name in ECHOED and item is not None}
    echoed = {**ECHOED, **given, "tools": [_whole_tool(tool) for tool in value.get("tools") or []]}
    echoed["previous_response_id"] = continued

    def render(started: inference.Started) -> Renderer:
        own = {name: one for name, one in own_of(started.own).items() if name in ECHOED.keys() - given.keys()}
        return ResponseRenderer(started, tools, echoed | own)

    asked = ask_as_chat(chat, request_id, render)
    # Codex's: a response without output, to go on with over the same WebSocket
    return replace(asked, loads=True) if value.get("generate") is False else asked


def called_names(value: _Object) -> dict[tuple[str, str], str]:
    """The model's names for the tools of a request that its client calls otherwise, by namespace and name.

    Raises InvalidInput, as `ask_responses`.
    """
    chat = translate(value, RESPONSES)
    tools = _Tools(chat)
    tools.add(value.get("tools") or [], "tools")
    _add_messages(chat, value, tools, None)  # which may have found more
    return {named: known for known, named in tools.spaces.items()}


def _custom(pattern: str) -> _Object:
    """The arguments of a function that stands for a custom tool."""
    text = {"type": "string", **({"pattern": pattern} if pattern else {})}
    return {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }


def _whole_tool(tool: _Object) -> _Object:
    """The tool with the fields that functions always have in answers."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": None, **tool}


def _add_choice(chat: Translated, choice: Any, tools: _Tools) -> None:
    if isinstance(choice, dict):
        if choice.get("type") not in ("function", "custom"):
            raise unsupported("tool_choice")
        translate(choice, _CHOICE, "tool_choice.")
        name = tools.known(choice.get("namespace"), choice.get("name"))
        choice = {"type": "function", "function": {"name": name}}
    chat.put("tool_choice", choice or "auto", "tool_choice")


def _add_messages(chat: Translated, value: _Object, tools: _Tools, open_summary: OpenSummary | None) -> None:
    """The system's messages at the beginning are one."""
    given = value.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise bad("input", "it is neither text nor a list of items")
    system = [value["instructions"]] if value.get("instructions") else []
    found: list[tuple[_Object, str]] = []
    for index, each in enumerate(items):
        param = f"input[{index}]"
        item = as_object(each, param)
        role = item.get("role")
        if str(item.get("type") or "message") == "message" and role in ("system", "developer") and not found:
            content = item.get("content")
            system += content if isinstance(content, list) else [content]
        elif item.get("type") in _COMPACTION and open_summary is not None:
            sealed = f"{param}.encrypted_content"
            summary = open_summary(as_text(item.get("encrypted_content"), sealed), sealed)
            found.append(({"role": "user", "content": f"{_SUMMARIZED}\n\n{summary}"}, param))
        else:
            _add_item(found, item, param, tools)
    if system:
        said = [part if isinstance(part, dict) else {"type": "input_text", "text": part} for part in system]
        source = "instructions" if value.get("instructions") else "input"
        chat.add_message({"role": "system", "content": said}, source, {"content": source})
    for message, param in _joined(found):
        chat.add_message(message, param, {"content": f"{param}.output"} if message["role"] == "tool" else {})
    chat.fields.setdefault("messages", [])
    chat.names["messages"] = "input"
    last = items[-1] if items else {}
    if last.get("role") == "assistant" and last.get("status") in ("in_progress", "incomplete"):
        chat.go_on()


def _add_item(found: list[tuple[_Object, str]], item: _Object, param: str, tools: _Tools) -> None:
    """Adds what an item of the input says to the messages that were `found`, each with where it is."""
    kind = str(item.get("type") or "message")
    before = found[-1][0] if found else {}
    if kind == "message" and item.get("role") == "assistant" and set(before) == {"role", "tool_calls"}:
        before["content"] = item.get("content")  # templates take nothing between calls and their results
    elif kind == "message":
        found.append(({"role": item.get("role"), "content": item.get("content")}, param))
    elif kind == "agent_message":  # what another agent of the same conversation says
        found.append(({"role": "user", "content": item.get("content")}, param))
    elif kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        found.append((_result(item, item.get("output") or ""), param))
    elif kind == "additional_tools":
        tools.add(item.get("tools") or [], f"{param}.tools")
    elif kind == "tool_search_output":
        found.append((_result(item, tools.load(item.get("tools") or [], f"{param}.tools")), param))
    elif kind in _CALLS:
        if before.get("role") != "assistant":
            found.append(({"role": "assistant"}, param))
        found[-1][0].setdefault("tool_calls", []).append(_call_of(item, kind, param, tools))
    elif kind == "reasoning":
        parts = as_list(item.get("content") or item.get("summary") or [], f"{param}.content")
        told = [str(as_object(part, param).get("text", "")) for part in parts]
        found.append(({"role": "assistant", "reasoning_content": "\n".join(told)}, param))
    elif kind not in _HOSTED:
        raise unsupported(f"{param}.type", "send messages, reasoning, calls and their outputs")


def _result(item: _Object, content: Any) -> _Object:
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


def _call_of(item: _Object, kind: str, param: str, tools: _Tools) -> _Object:
    arguments = item.get(_CALLS[kind]) or {}
    if kind == "custom_tool_call":
        arguments = {"input": arguments or ""}
    name = item.get("name") or _NAMELESS.get(kind)
    if not isinstance(name, str):
        raise bad(f"{param}.name", "it is missing")
    function = {
        "name": tools.known(item.get("namespace"), name),
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
    }
    return {"id": item.get("call_id"), "function": function}


def _joined(found: list[tuple[_Object, str]]) -> list[tuple[_Object, str]]:
    """Reasoning and what came of it are one message; of reasoning alone nothing is left."""
    joined: list[tuple[_Object, str]] = []
    for message, param in found:
        before = joined[-1][0] if joined else {}
        if message["role"] == "assistant" and set(before) == {"role", "reasoning_content"}:
            joined[-1] = {**before, **message}, param
        else:
            joined.append((message, param))
    return [one for one in joined if set(one[0]) != {"role", "reasoning_content"}]


_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ResponseRenderer(Renderer):
    """One item is open at a time; the last event holds the very items that were streamed."""

    def __init__(self, started: inference.Started, tools: _Tools, echoed: _Object) -> None:
        super().__init__(started)
        self._tools = tools
        self._response: _Object = {
            "id": f"resp_{started.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": started.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **echoed,
            "store": False,
            "output": [],
        }
        self._items: list[_Object] = []
        self._open = self._text = self._id = ""
        self._logged: list[_Object] = []
        self._unsaid: list[_Object] = []
        """Log-probabilities of tokens whose text has not come yet."""
        self._sequence = self._calls = self._thought = 0

    def first(self) -> bytes:
        started = self._event("response.created", response=self._response)
        return started + self._event("response.in_progress", response=self._response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        told = event({"type": name, "sequence_number": self._sequence, **fields}, name)
        self._sequence += 1
        return told

    def _of_item(self, name: str, /, **fields: Any) -> bytes:
        return self._event(f"response.{name}", output_index=len(self._items), item_id=self._id, **fields)

    def _identified(self, kind: str, /, **fields: Any) -> _Object:
        """The item that is open; programs tell kinds by the beginnings of ids."""
        self._id = f"{_IDS[kind]}_{self.request_id}_{len(self._items)}"
        return {"id": self._id, "type": kind, **fields}

    def delta(self, delta: inference.Delta) -> bytes:
        if delta.parsed.reasoning:
            self._thought = delta.tokens
        if of_text(delta):
            self._unsaid += chat_logprobs(delta.logprobs)["content"]
        return b"".join(self._piece(kind, piece) for kind, piece in pieces(delta))

    def _piece(self, kind: str, piece: str | inference.ToolCall) -> bytes:
        return self._call(piece) if isinstance(piece, inference.ToolCall) else self._say(kind, piece)

    def _say(self, kind: str, text: str) -> bytes:
        told = b""
        if kind != self._open:
            told = self._close()
            self._open = kind
            told += self._added(self._item(kind, "in_progress", []))
            part, place = self._part(kind, "")
            name = "content_part" if kind == "text" else "reasoning_summary_part"
            told += self._of_item(f"{name}.added", part=part, **place)
        self._text += text
        _, place = self._part(kind, "")
        logprobs: _Object = {"logprobs": self._say_logged()} if kind == "text" else {}
        return told + self._of_item(f"{_TEXT[kind]}.delta", delta=text, **place, **logprobs)

    def _say_logged(self) -> list[_Object]:
        said, self._unsaid = self._unsaid, []
        self._logged += said
        return said

    def _part(self, kind: str, text: str) -> tuple[_Object, _Object]:
        """A part of an item, and where in it that is."""
        if kind == "text":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logged}, {
                "content_index": 0
            }
        return {"type": "summary_text", "text": text}, {"summary_index": 0}

    def _item(self, kind: str, status: str, parts: list[_Object]) -> _Object:
        if kind == "text":
            return self._identified("message", role="assistant", status=status, content=parts)
        return self._identified("reasoning", summary=parts, status=status)

    def _added(self, item: _Object) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: _Object) -> bytes:
        told = self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return told

    def _close(self, status: str = "completed") -> bytes:
        """Ends the item of text or reasoning that is open."""
        if not self._open:
            return b""
        kind, text = self._open, self._text
        self._open = self._text = ""
        if kind == "text":
            self._say_logged()
        part, place = self._part(kind, text)
        logprobs: _Object = {"logprobs": self._logged} if kind == "text" else {}
        self._logged = []
        told = self._of_item(f"{_TEXT[kind]}.done", text=text, **place, **logprobs)
        name = "content_part" if kind == "text" else "reasoning_summary_part"
        told += self._of_item(f"{name}.done", part=part, **place)
        return told + self._done(self._item(kind, status, [part]))

    def _call(self, call: inference.ToolCall) -> bytes:
        told = self._close()
        self._unsaid = []
        item, field, said = self._called(call)
        told += self._added({**item, "status": "in_progress", field: ""})
        name = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
        told += self._of_item(f"{name}.delta", delta=said)
        named = {"name": item["name"]} if field == "arguments" else {}
        told += self._of_item(f"{name}.done", **{field: said}, **named)
        return told + self._done({**item, field: said})

    def _called(self, call: inference.ToolCall) -> tuple[_Object, str, str]:
        """A call's item, the name of what it says, and that."""
        custom = call.name in self._tools.custom
        item = self._identified(
            "custom_tool_call" if custom else "function_call",
            call_id=call_id(self.request_id, 0, self._calls, call),
            name=call.name,
            status="completed",
        )
        self._calls += 1
        if call.name in self._tools.spaces:
            item["namespace"], item["name"] = self._tools.spaces[call.name]
        if not custom:
            return item, "arguments", call.arguments or "{}"
        said = json.loads(call.arguments or "{}").get("input", "")
        return item, "input", said if isinstance(said, str) else json.dumps(said)

    def last(self, finished: inference.Finished) -> bytes:
        (reason,) = self.reasons(finished)
        status = "completed" if reason == "stop" else "incomplete"
        told = self._close(status)
        self._response |= {
            "status": status,
            "output": self._items,
            "usage": response_usage(finished, self._thought),
        }
        self._response |= receipt_of(finished)
        if reason == "stop":
            self._response["completed_at"] = int(time.time())
        else:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return told + self._event(f"response.{status}", response=self._response)

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        (answer,) = answers
        self._thought = answer.reasoning_tokens
        for kind, piece, logged in answer.parts():
            self._unsaid += chat_logprobs(logged or ())["content"]
            self._piece(kind, piece)
        self.last(finished)
        return json.dumps(self._response).encode()

    def error(self, error: SealringError) -> bytes:
        told = b"" if self._sequence else self.first()
        self._response |= {"status": "failed", "error": error_body(error)["error"], "output": self._items}
        return told + self._event("response.failed", response=self._response)


_TEXT = {"text": "output_text", "reasoning": "reasoning_summary_text"}


def response_usage(finished: inference.Finished, thought: int) -> _Object:
    """Usage in the form of Responses; `thought` counts the tokens of reasoning."""
    return {
        "input_tokens": finished.prompt_tokens,
        "output_tokens": finished.completion_tokens,
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": thought},
    }
