"""True answers of every API beside receipts, what their readers see of them, and forged ones."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from sealring.api.answers import Asked, Choice
from sealring.api.anthropic import ask_messages
from sealring.api.chat import ask_chat
from sealring.api.completions import ask_completion
from sealring.api.ollama import ask_ollama_chat, ask_ollama_generate
from sealring.api.responses import ask_responses
from sealring.mesh.receipt.form import NAME, receipts_json
from sealring.v1 import inference_pb2 as inference

Object = dict[str, Any]
SIGNED = inference.Receipt(
    head=inference.HeadReceipt(statement=b"s", signature=b"h"), roster=b"roster", root_metadata=b"root"
)
ASKED = [{"role": "user", "content": "Where is it?"}]
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
TOKEN = inference.TokenLogprob(spelling=b"Here", logprob=-0.25)
STOP, LENGTH = inference.FINISH_REASON_STOP, inference.FINISH_REASON_LENGTH
_STOP = {"model": "demo", "max_tokens": 9, "stop_sequences": ["\n\n"]}


def choice(calls: bool = False, **more: Any) -> Choice:
    """What a model said."""
    made = [inference.ToolCall(name="look", arguments='{"at": [1, {"b": null}]}')] if calls else []
    return Choice("Here.", "It is here.", calls=made, **more)


def mixed() -> Choice:
    """What a model said between two calls, and behind them."""
    made, call = Choice(), inference.ToolCall(name="look", arguments='{"at": "x"}')
    for kind, piece in (("reasoning", "It is"), ("text", "Be"), ("text", "fore."), ("call", call)):
        made.say(kind, piece)
    for kind, piece in (("reasoning", " here."), ("call", call), ("text", "After.")):
        made.say(kind, piece)
    return made


@dataclass(frozen=True)
class Case:
    """An API, a body, and the choices that answer it."""

    api: str
    body: Object
    choices: tuple[Choice, ...]
    finish: inference.FinishReason.ValueType = STOP


CASES = {
    "chat": Case("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS}, (choice(True),)),
    "chats": Case(
        "/v1/chat/completions",
        {"messages": ASKED, "n": 2, "logprobs": True},
        (choice(logprobs=[TOKEN]), choice()),
        LENGTH,
    ),
    "responses": Case(
        "/v1/responses",
        {
            "input": "Where?",
            "instructions": "Look.",
            "include": ["message.output_text.logprobs"],
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "namespace", "name": "disk", "tools": [{"type": "function", "name": "seek"}]},
                {"type": "custom", "name": "patch"},
            ],
        },
        (
            Choice(
                "Here.",
                "It is here.",
                calls=[
                    inference.ToolCall(name="look", arguments='{"a": 1}'),
                    inference.ToolCall(name="disk__seek", arguments='{"a":1}'),
                    inference.ToolCall(name="patch", arguments='{"input": "+x"}'),
                ],
                logprobs_of_text=[TOKEN],
            ),
        ),
    ),
    "response": Case("/v1/responses", {"input": "Where?"}, (choice(),), LENGTH),
    "messages": Case(
        "/v1/messages",
        {"messages": ASKED, **_STOP, "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        (choice(True),),
    ),
    "messages between calls": Case(
        "/v1/messages",
        {"messages": ASKED, **_STOP, "tools": [{"name": "look", "input_schema": {"type": "object"}}]},
        (mixed(),),
    ),
    "response between calls": Case(
        "/v1/responses", {"input": "Where?", "tools": [{"type": "function", **FUNCTION}]}, (mixed(),)
    ),
    "message": Case("/v1/messages", {"messages": ASKED, **_STOP}, (choice(stop="\n\n"),)),
    "completions": Case(
        "/v1/completions",
        {"prompt": ["It is", "It was"], "logprobs": 1},
        (Choice("here", logprobs=[TOKEN]), Choice("there", logprobs=[TOKEN])),
    ),
    "ollama": Case("/api/chat", {"messages": ASKED, "stream": False, "tools": TOOLS}, (choice(True),)),
    "ollamas": Case(
        "/api/chat",
        {"messages": ASKED, "stream": False, "logprobs": True, "top_logprobs": 1},
        (choice(logprobs=[TOKEN]),),
    ),
    "generate": Case("/api/generate", {"prompt": "Where?", "stream": False}, (choice(),), LENGTH),
}
ASK = {
    "/v1/chat/completions": ask_chat,
    "/v1/responses": ask_responses,
    "/v1/messages": ask_messages,
    "/v1/completions": ask_completion,
    "/api/chat": ask_ollama_chat,
    "/api/generate": ask_ollama_generate,
}


def asked(case: Case) -> Asked:
    """The request of a case."""
    return ASK[case.api]({"model": "demo", **case.body}, "r1")


def answer(case: Case, receipts: list[inference.Receipt] | None = None) -> Object:
    """The answer as the API gives it whole."""
    finished = inference.Finished(
        reason=case.finish,
        prompt_tokens=5,
        completion_tokens=7,
        choices=[inference.FinishedChoice(reason=case.finish) for _ in case.choices],
    )
    renderer = asked(case).render(inference.Started(request_id="r1", model="demo"))
    whole: Object = json.loads(renderer.whole(list(case.choices), finished))
    return whole | {NAME: receipts_json(receipts or [SIGNED] * len(case.choices))}


_OPENAI = ("id", "created", "system_fingerprint", "usage", "choices.logprobs")
_OLLAMA = (
    *("created_at", "total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
    "logprobs",
)
_FREE = {
    "/v1/chat/completions": (*_OPENAI, "choices.message.tool_calls.id"),
    "/v1/completions": _OPENAI,
    "/v1/responses": (
        *("id", "created_at", "completed_at", "usage", "output.id", "output.call_id"),
        "output.content.logprobs",
    ),
    "/v1/messages": ("id", "usage", "content.id"),
}


def seen(api: str, value: Object) -> str:
    """What a reader sees of an answer, but for what docs/receipts.md says is signed by nobody."""
    free = {NAME, "model", *_FREE.get(api, (*_OLLAMA, "eval_count", "eval_duration"))}

    def without(part: Any, at: str) -> Any:
        if isinstance(part, list):
            return [without(item, at) for item in part]
        if not isinstance(part, dict):  # JSON has one kind of number (RFC 8259 section 6)
            return int(part) if isinstance(part, float) and part.is_integer() else part
        told = {f"{at}.{name}".lstrip("."): item for name, item in part.items() if item is not None}
        return {path: without(item, path) for path, item in told.items() if path not in free}

    return json.dumps(without(value, ""), sort_keys=True)


NAMES = re.findall(
    r"\w+",
    "answer annotations arguments audio choices citations content Content delta done done_reason error "
    "finish_reason function function_call id image images index input logprobs message model name namespace "
    "object output output_text parsed reasoning reasoning_content reasoning_details refusal response role "
    "signature status stop_reason stop_sequence summary text thinking tool_calls type usage",
)
"""Members that readers of one API or another look for."""

LEAVES: list[Any] = [
    *("", "Here.", "Gone.", "stop", "length", "assistant", "system", "message", "response", "text"),
    *(0, 1, 0.0, True, False, None, [], {}, [{"type": "text", "text": "Gone."}], {"content": "Gone."}),
    [{"message": {"role": "assistant", "content": "Gone."}, "finish_reason": "stop", "index": 0}],
    [{"function": {"name": "rm", "arguments": "{}"}}],
    [{"type": "message", "content": [{"text": "Gone."}]}],
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        if name != NAME:
            yield from places(part, (*at, name))


def part_of(value: Any, at: tuple[Any, ...]) -> Any:
    for name in at:
        value = value[name]
    return value


def _exchange(value: Object, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Has two parts change places; of one and the same it makes two, as of a text in a list of parts."""
    holder, second = part_of(value, one[:-1]), part_of(value, other[:-1])
    if one != other:
        found = copy.deepcopy((holder[one[-1]], second[other[-1]]))
        second[other[-1]], holder[one[-1]] = found
    elif len(one) > 1 and isinstance(one[-2], int) and isinstance(found := holder[one[-1]], str):
        holder[one[-1]] = found[:1]
        part_of(value, one[:-2]).insert(one[-2] + 1, {**holder, one[-1]: found[1:]})


@st.composite
def forged(draw: st.DrawFn, true: Object) -> Object:
    """An answer with parts that were inserted, renamed, doubled, moved, dropped or replaced, at any level."""
    value = copy.deepcopy(true)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(value))
        holder = part_of(value, draw(st.sampled_from(found)))
        other = part_of(value, draw(st.sampled_from(found)))
        new = copy.deepcopy(draw(st.sampled_from([*LEAVES, other])))
        name = draw(st.sampled_from(NAMES))
        if draw(st.booleans()):
            _exchange(value, draw(st.sampled_from(found[1:])), draw(st.sampled_from(found[1:])))
        elif isinstance(holder, dict):
            own = [one for one in holder if one != NAME]
            old = draw(st.sampled_from(own)) if own else name
            match draw(st.sampled_from(["insert", "rename", "drop", "replace"])):
                case "insert":
                    holder[name] = new
                case "rename" if old in holder:
                    holder[name] = holder.pop(old)
                case "drop":
                    holder.pop(old, None)
                case _:
                    holder[old] = new
        elif isinstance(holder, list):
            at = draw(st.integers(0, len(holder)))
            match draw(st.sampled_from(["insert", "double", "drop", "turn"])):
                case "insert":
                    holder.insert(at, new)
                case "double":
                    holder[at:at] = copy.deepcopy(holder[:1])
                case "drop":
                    del holder[at:]
                case _:
                    holder.reverse()
    return value
