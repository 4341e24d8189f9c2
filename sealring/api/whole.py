"""Whole answers as their readers see them: what each says, and that it is all that it says.

What was signed is taken out of an answer and rendered again by the code that gateways render it with. The
answer has to be that, member by member, but for what no receipt covers: `Form.unsigned` lists it. So an
answer can say nothing to its reader that was not compared or listed, whatever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sealring.api.answers import Asked, Choice
from sealring.api.anthropic import ask_messages
from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ECHOED, ask_responses, called_names
from sealring.mesh.errors import InvalidInput, ReceiptError
from sealring.mesh.prompt.options import MODELS_OWN
from sealring.mesh.receipt.form import NAME
from sealring.v1 import inference_pb2 as inference

_Object = dict[str, Any]

_FINISHES: dict[str, inference.FinishReason.ValueType] = {
    **dict.fromkeys(
        ("length", "max_tokens", "max_output_tokens", "incomplete"), inference.FINISH_REASON_LENGTH
    ),
    **dict.fromkeys(
        ("stop", "stop_sequence", "end_turn", "tool_calls", "tool_use", "completed"),
        inference.FINISH_REASON_STOP,
    ),
}
"""Words of the APIs for the end of an answer."""

_ANY = object()
"""The shape of what may be anything."""

_NUMBER = (int, float)
_NAMED = {"token": str, "logprob": _NUMBER, "bytes": [int]}
TOKENS = [{**_NAMED, "top_logprobs": [_NAMED]}]
_OF_COMPLETIONS = {
    "tokens": [str],
    "token_logprobs": [(*_NUMBER, None)],
    "top_logprobs": ([({str: _NUMBER}, None)], None),
    "text_offset": [int],
}


@dataclass(frozen=True)
class Said:
    """One choice as an answer has it. `calls` have the names that the model knows."""

    choice: Choice
    finish: inference.FinishReason.ValueType


@dataclass(frozen=True)
class Form:
    """One API: how a body is read, what an answer says, and what of it no receipt covers.

    `stub` makes a body from an answer whose request is not known: the shortest that asks for as much.
    `unsigned` are paths of parts that have the kinds which the renderer gives them; `logprobs` have shapes,
    and are there where they were asked for. Parts in `asked` are the request's, and are compared with it.
    """

    ask: Callable[[_Object, str], Asked]
    said: Callable[[_Object, Mapping[tuple[str, str], str]], list[Said]]
    stub: Callable[[_Object], _Object]
    unsigned: frozenset[str]
    logprobs: Mapping[str, Any] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    ordered: bool = False
    """Whether its answers tell the order of text, reasoning and calls."""


@dataclass(frozen=True)
class Whole:
    """What an answer says, what it was asked with, and the paths in it that no receipt covers.

    `plain`: its calls have the names that the model knows. Other names are those of the request. `ordered` as
    in Form.
    """

    said: list[Said]
    asked: Asked
    unsigned: tuple[str, ...]
    plain: bool
    ordered: bool


def read_whole(value: _Object, api: str, body: _Object | None) -> Whole:
    """Reads an answer of one API, which `body` has asked for. `api` is a key of FORMS.

    Raises ReceiptError (RECEIPT_MALFORMED) for an answer that says anything else than what is returned,
    InvalidInput for a malformed body.
    """
    form = FORMS[api]
    asked = None if body is None else form.ask(body, "")
    try:
        given = form.stub(value) if body is None else body
        names = called_names(given) if form.ask is ask_responses else {}
        said = form.said(value, names)
        asked = asked or form.ask(given, "")
        for one in said:
            (one.choice.text + one.choice.reasoning + one.choice.stop).encode()
        expected = json.loads(_rendered(asked, said, value["model"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, InvalidInput):
        raise _refused(
            api, "it has not the form of that API, or not as many choices as were asked for"
        ) from None
    prompt, stops = asked.request.envelope.clear, {one.choice.stop for one in said} - {""}
    unsigned: dict[str, Any] = dict.fromkeys(form.unsigned)
    if body is None:
        unsigned |= dict.fromkeys(form.asked, _ANY)
    else:  # the model's own options, where the request names none, are the gateway's word
        unsigned |= dict.fromkeys(one for one in form.asked & MODELS_OWN.keys() if body.get(one) is None)
    if body is not None and not stops.issubset(prompt.stop):
        raise _refused(api, "it names a stop string that the request has not")
    if body is None or prompt.sampling.HasField("logprobs"):
        unsigned |= form.logprobs
    comparison = _Comparison(api, unsigned)
    try:
        comparison.compare({name: part for name, part in value.items() if name != NAME}, expected, "")
    except RecursionError:
        raise _refused(api, "it is nested too deep") from None
    met = comparison.met | ({"stop_sequence"} if stops else set())
    custom = any(tool.get("type") == "custom" for tool in given.get("tools") or [])
    plain = body is not None or not (names or custom)
    return Whole(said, asked, tuple(sorted(met)), plain, form.ordered)


def _rendered(asked: Asked, said: Sequence[Said], model: Any) -> bytes:
    if not isinstance(model, str) or len(said) != asked.choices:
        raise TypeError
    ends = [inference.FinishedChoice(reason=one.finish) for one in said]
    finished = inference.Finished(reason=ends[0].reason, choices=ends)
    renderer = asked.render(inference.Started(model=model))
    return renderer.whole([one.choice for one in said], finished)


class _Comparison:
    """Holds an answer against what it should be, and notes which paths it met that no receipt covers."""

    def __init__(self, api: str, unsigned: Mapping[str, Any]) -> None:
        self._api, self._unsigned = api, unsigned
        self.met: set[str] = set()

    def compare(self, found: Any, expected: Any, path: str) -> None:
        if found is None and expected is None:
            return
        if path in self._unsigned:
            shape = self._unsigned[path]
            self.met.add(path)
            if not fits(found, _kinds(expected) if shape is None else shape):
                raise self._differs(path)
        elif isinstance(expected, dict):
            self._compare_members(found, expected, path)
        elif isinstance(expected, list):
            if not isinstance(found, list) or len(found) != len(expected):
                raise self._differs(path)
            for one, other in zip(found, expected, strict=True):
                self.compare(one, other, f"{path}[]")
        elif found != expected or not fits(found, _kinds(expected)):
            raise self._differs(path)

    def _compare_members(self, found: Any, expected: _Object, path: str) -> None:
        if not isinstance(found, dict):
            raise self._differs(path)
        for name, part in found.items():
            if name not in expected and part is not None:
                raise self._differs(_inside(path, name))
        for name, part in expected.items():
            inside = _inside(path, name)
            if name in found:
                self.compare(found[name], part, inside)
            elif part is not None and inside not in self._unsigned:
                raise self._differs(inside)

    def _differs(self, path: str) -> ReceiptError:
        return _refused(self._api, f"no receipt covers its {path[-80:]!r}")


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _kinds(value: Any) -> Any:
    """The shape of what is of the same kinds as `value`."""
    if isinstance(value, dict):
        return {name: (_kinds(part), None) for name, part in value.items()}
    if type(value) in _NUMBER:
        return _NUMBER
    return None if value is None else type(value)


def fits(value: Any, shape: Any) -> bool:
    """Whether a value has a shape: a type, None, a list's or an object's, or any of several."""
    if shape is _ANY or value is shape:
        return True
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if isinstance(shape, type):
        return type(value) is shape
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(one, shape[0]) for one in value)
    if not isinstance(shape, dict) or not isinstance(value, dict):
        return False
    if str in shape:
        return all(fits(part, shape[str]) for part in value.values())
    return all(part is None or (name in shape and fits(part, shape[name])) for name, part in value.items())


def _chat(value: _Object, names: Mapping[tuple[str, str], str]) -> list[Said]:
    said = []
    for one in value["choices"]:
        message = one["message"]
        calls = [
            _function(call["function"], call["function"]["arguments"], call["id"])
            for call in message.get("tool_calls") or []
        ]
        choice = Choice(message.get("content") or "", message.get("reasoning_content") or "", calls=calls)
        said.append(Said(choice, _FINISHES[one["finish_reason"]]))
    return said


def _function(named: _Object, arguments: str, name: str = "") -> inference.ToolCall:
    return inference.ToolCall(id=name, name=named["name"], arguments=arguments)


def _completions(value: _Object, names: Mapping[tuple[str, str], str]) -> list[Said]:
    return [Said(Choice(one["text"]), _FINISHES[one["finish_reason"]]) for one in value["choices"]]


def _response(value: _Object, names: Mapping[tuple[str, str], str]) -> list[Said]:
    """`names` are those that the model has for tools which the client calls otherwise."""
    choice = Choice()
    for item in value["output"]:
        if item["type"] == "message":
            choice.say("text", "".join(part["text"] for part in item["content"]))
        elif item["type"] == "reasoning":
            choice.say("reasoning", "".join(part["text"] for part in item["summary"]))
        else:
            plain = item["type"] == "function_call"
            said = item["arguments"] if plain else json.dumps({"input": item["input"]})
            name = names.get((item.get("namespace") or "", item["name"]), item["name"])
            choice.say("call", inference.ToolCall(id=item["call_id"], name=name, arguments=said))
    return [Said(choice, _FINISHES[value["status"]])]


def _message(value: _Object, names: Mapping[tuple[str, str], str]) -> list[Said]:
    choice = Choice(stop=value.get("stop_sequence") or "")
    for block in value["content"]:
        if block["type"] == "text":
            choice.say("text", block["text"])
        elif block["type"] == "thinking":
            choice.say("reasoning", block["thinking"])
        else:
            choice.say("call", _function(block, json.dumps(block["input"]), block["id"]))
    return [Said(choice, _FINISHES[value["stop_reason"]])]


def _ollama(value: _Object, message: _Object, text: str) -> list[Said]:
    functions = [one["function"] for one in message.get("tool_calls") or []]
    calls = [_function(one, json.dumps(one["arguments"])) for one in functions]
    choice = Choice(message.get(text) or "", message.get("thinking") or "", calls=calls)
    return [Said(choice, _FINISHES[value["done_reason"]])]


def _of_calls(value: _Object) -> list[_Object]:
    """Tools of which the calls of a response may be."""
    items = [one for one in value["output"] if one["type"] in ("function_call", "custom_tool_call")]
    tools = []
    for item in items:
        tool = {"type": item["type"].removesuffix("_call").removesuffix("_tool"), "name": item["name"]}
        if item.get("namespace"):
            tools.append({"type": "namespace", "name": item["namespace"], "tools": [tool]})
        elif tool["type"] == "custom":
            tools.append(tool)
    return tools


_ASKED = {"messages": [{"role": "user", "content": "?"}]}
_OPENAI = frozenset({"id", "created", "system_fingerprint", "usage"})
_OLLAMA = frozenset(
    {"created_at", "total_duration", "load_duration", "prompt_eval_count"}
    | {"prompt_eval_duration", "eval_count", "eval_duration"}
)

FORMS: Mapping[str, Form] = {
    "/v1/chat/completions": Form(
        ask_chat,
        _chat,
        lambda value: {
            **_ASKED,
            "n": len(value["choices"]),
            "logprobs": any(one.get("logprobs") is not None for one in value["choices"]),
        },
        _OPENAI | {"choices[].message.tool_calls[].id"},
        {"choices[].logprobs": {"content": TOKENS, "refusal": None}},
    ),
    "/v1/responses": Form(
        ask_responses,
        _response,
        lambda value: {"input": "?", "tools": _of_calls(value)},
        frozenset({"id", "created_at", "completed_at", "usage", "output[].id", "output[].call_id"}),
        {"output[].content[].logprobs": TOKENS},
        frozenset({"tools", *ECHOED} - {"completed_at", "store", "usage"}),
        ordered=True,
    ),
    "/v1/messages": Form(
        ask_messages,
        _message,
        lambda value: {**_ASKED, "max_tokens": 1},
        frozenset({"id", "usage", "content[].id"}),
        ordered=True,
    ),
    "/v1/completions": Form(
        ask_completion,
        _completions,
        lambda value: {
            "prompt": ["?"] * len(value["choices"]),
            **({"logprobs": 1} if any(one.get("logprobs") for one in value["choices"]) else {}),
        },
        _OPENAI,
        {"choices[].logprobs": _OF_COMPLETIONS},
    ),
    "/api/chat": Form(
        ask_ollama_chat,
        lambda value, names: _ollama(value, value["message"], "content"),
        lambda value: {**_ASKED, "logprobs": "logprobs" in value},
        _OLLAMA,
        {"logprobs": TOKENS},
    ),
    "/api/generate": Form(
        ask_ollama_generate,
        lambda value, names: _ollama(value, value, "response"),
        lambda value: {"prompt": "?", "logprobs": "logprobs" in value},
        _OLLAMA,
        {"logprobs": TOKENS},
    ),
}
"""Every API whose answers have receipts, by its path."""


def _refused(api: str, why: str) -> ReceiptError:
    return ReceiptError(
        f"this is not what {api} answers: {why}",
        hint="name the API that was asked with --api, and give the answer as it came; of a stream the value "
        "of sealring_receipt alone",
        reason="RECEIPT_MALFORMED",
    )
