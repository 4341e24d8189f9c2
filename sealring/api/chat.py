"""`POST /v1/chat/completions`: OpenAI's, with what vLLM, mlx_lm.server and DeepSeek have beside it.

The other APIs' conversations are translated to this one's body first, so that there is one way to a prompt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from sealring.api.answers import (
    Asked,
    Choice,
    Logprobs,
    Renderer,
    call_id,
    event,
    receipt_of,
    usage_of,
    usage_so_far,
)
from sealring.api.fields import (
    BOOKKEEPING,
    MAX_STRING,
    Body,
    Rule,
    Rules,
    Translated,
    as_object,
    bad,
    check_body,
    only,
    path_of,
    same,
    table,
    unsupported,
)
from sealring.api.images import image_of
from sealring.api.logprobs import chat_logprobs
from sealring.api.sampling import OBFUSCATION, OPENAI, CommonBody, clean, make_request
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.images import SHOWN_BY, just_asked
from sealring.mesh.prompt.options import MAX_LOGPROBS, MAX_TOKENS
from sealring.mesh.prompt.tools import MAX_CALLS, MAX_JSON_DEPTH, MAX_TOOLS, too_deep
from sealring.mesh.prompt.validate import MAX_MESSAGES
from sealring.v1 import inference_pb2 as inference

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and the field that holds it."""

_KINDS = {
    "audio": "a sound",
    "audio_url": "a sound",
    "input_audio": "a sound",
    "video": "a video",
    "video_url": "a video",
    "document": "a document",
    "file": "a file",
    "input_file": "a file",
}
"""Kinds of parts that no model here reads, and the words that prompts have for them."""

_Part = dict[str, Any]


def _effort(said: Any) -> Any:
    return {"max": "xhigh", "default": None}.get(said, said) if isinstance(said, str) else said


_Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None, BeforeValidator(_effort)
]
"""`max` is the highest that templates know; `default` is not said."""

_Budget = Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None
"""Most tokens of thoughts."""

_MaxTokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None,
    BeforeValidator(lambda said: None if type(said) is int and said == -1 else said),
]
"""-1, as llama.cpp and LM Studio have it, is as many as the context holds."""


def _old_call(item: Any, param: str) -> list[dict[str, Any]]:
    return [{"function": as_object(item, param)}]


_MARKS: Rules = {"cache_control": BOOKKEEPING}
"""Fields of messages and tools: prefixes are cached without being asked."""

_MESSAGE: Rules = {
    **_MARKS,
    "annotations": BOOKKEEPING,  # this and the next ones are what SDKs pass back; no template reads them
    "id": BOOKKEEPING,
    "parsed": BOOKKEEPING,
    "provider_specific_fields": BOOKKEEPING,
    "reasoning_details": BOOKKEEPING,
    "thinking_blocks": BOOKKEEPING,
    "function_call": Rule("tool_calls", _old_call, ignored_when=({},)),  # OpenAI's before there were tools
}


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: Annotated[str, Field(max_length=MAX_STRING)] | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    rules: ClassVar[Rules] = _MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[_Part], Field(fail_fast=True, max_length=1024)] | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_STRING)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    prefix: bool | None = None  # DeepSeek's and Mistral's name for an answer that is to be continued
    partial: bool | None = None  # Kimi's
    images: list[Any] | None = (
        None  # what an assistant has made, as OpenRouter passes it back; no model sees it
    )


class Function(Body):
    rules: ClassVar[Rules] = _MARKS

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    rules: ClassVar[Rules] = _MARKS

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class Reasoning(Body):
    """OpenRouter's and the Responses API's."""

    rules: ClassVar[Rules] = {
        "exclude": BOOKKEEPING,
        "generate_summary": BOOKKEEPING,
    }

    effort: _Effort = None
    enabled: bool | None = None
    max_tokens: _Budget = None
    summary: str | None = None  # the answer has the whole reasoning


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # it is held to in any case


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    bare: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # llama.cpp's


class PredictedPart(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the answer will mostly be."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(fail_fast=True, max_length=1024)]

    @property
    def text(self) -> str:
        """All of it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return "".join(parts)


class ChatBody(CommonBody):
    """docs/sampling.md tells which fields are not OpenAI's."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: _MaxTokens = None
    max_completion_tokens: _MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: _Effort = None
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None
    thinking_budget: _Budget = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    prediction: Prediction | None = None

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


EVERY: Rules = {
    **OPENAI,
    **same(*ChatBody.model_fields.keys() - {"messages", "n", "stream_options"}),
    "messages": only([], because="send input"),
    "n": only(1, because="this API has one answer: ask again, or ask /v1/chat/completions"),
    "stream_options": Rule(
        parts={
            "continuous_usage_stats": BOOKKEEPING,
            "include_obfuscation": OBFUSCATION,
            "include_usage": BOOKKEEPING,
        }
    ),
}
"""The fields of every API that is translated to this one, unless it has a rule of its own: those of the chat,
and other servers' names of them."""

table("/v1/chat/completions", dict.fromkeys(ChatBody.model_fields, BOOKKEEPING))


def parse_chat(value: dict[str, Any]) -> ChatBody:
    """Raises InvalidInput with `param`: as check_body, BAD_FIELD."""
    for name in ("tools", "chat_template_kwargs", "response_format"):
        if too_deep(value.get(name), MAX_JSON_DEPTH + 4):
            raise InvalidInput(f"{name} is nested too deep", reason="BAD_FIELD", param=name)
    body = check_body(value, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs", reason="BAD_FIELD", param="top_logprobs")
    return body


def chat_request(
    body: ChatBody, request_id: str, names: dict[str, str] | None = None
) -> inference.GenerateRequest:
    """A developer message counts as a system message. `names` learns where in the body each image is.

    Raises InvalidInput: BAD_FIELD, UNSUPPORTED_CONTENT, and those of sealring.api.images.
    """
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise InvalidInput(
            "max_tokens and max_completion_tokens differ",
            hint="send one of them",
            reason="BAD_FIELD",
            param="max_completion_tokens",
        )
    prompt = inference.Prompt()
    asked = just_asked([_role(message) for message in body.messages])
    for index, message in enumerate(body.messages):
        places = _add_message(prompt.chat, message, f"messages[{index}]", asked=index in asked)
        if names is not None:
            names |= {
                f"messages[{index}].images[{number}]": path_of(place, names)
                for number, place in enumerate(places)
            }
    prompt.chat.begun = _begun(body)
    _add_tools(prompt.chat, body)
    prompt.schema = _schema(body.response_format)
    if arguments := _template_arguments(body):
        prompt.chat.template_arguments = json.dumps(arguments)
    request = make_request(body, prompt, max(limits, default=0), request_id)
    request.envelope.clear.prediction = _predicted(body, request.choices)
    return request


def _begun(body: ChatBody) -> bool:
    """Whether the last message is an answer that is to be continued. Raises InvalidInput (BAD_FIELD)."""
    named = [index for index, message in enumerate(body.messages) if message.prefix or message.partial]
    last = len(body.messages) - 1
    if [index for index in named if index != last]:
        raise bad(f"messages[{named[0]}].prefix", "only the last message can be continued")
    begun = bool(named or body.continue_final_message)
    if begun and (_role(body.messages[last]) != "assistant" or not body.messages[last].content):
        raise bad(f"messages[{last}]", "only a message of the assistant with a content can be continued")
    if body.add_generation_prompt is False and not begun:
        raise unsupported("add_generation_prompt", "it goes with continue_final_message alone")
    return begun


def _role(message: Message) -> str:
    return {"developer": "system", "function": "tool"}.get(message.role, message.role)


def _add_content(
    added: inference.ChatMessage, content: str | list[_Part], param: str, *, asked: bool
) -> list[str]:
    """Sets the text and the images of a message; returns where each image is.

    Neighbouring texts are joined by a line break. Of what is neither text nor an image, a word stands in the
    text, so that a sound in a tool's result does not end a conversation; in what the user has just `asked` it
    is refused. Raises InvalidInput: UNSUPPORTED_CONTENT, BAD_FIELD, BAD_UTF8.
    """
    if isinstance(content, str):
        added.content = clean(content, param)
        return []
    pieces, length, places = list[str](), 0, list[str]()
    joins = False
    for index, part in enumerate(content):
        place = f"{param}[{index}]"
        if (image := image_of(part, place)) is not None:
            if added.role not in SHOWN_BY:
                raise _unsupported(place, f"an image in a message of {added.role}")
            image.at = length
            added.images.append(image)
            places.append(place)
            joins = False
            continue
        text = ("\n" if joins else "") + clean(_text_of(part, place, asked=asked), place)
        pieces.append(text)
        length += len(text)
        joins = True
    added.content = "".join(pieces)
    return places


def _text_of(part: _Part, param: str, *, asked: bool) -> str:
    kind = part.get("type")
    if isinstance(kind, str) and kind in _TEXTS:
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            raise InvalidInput("a part has no text", reason="BAD_FIELD", param=f"{param}.text")
        return text
    if isinstance(kind, str) and kind in _KINDS and not asked:
        return f"[{_KINDS[kind]}; this model cannot read it]"
    raise _unsupported(param, "a part that is neither text nor an image")


def _unsupported(param: str, what: str) -> InvalidInput:
    return InvalidInput(
        f"{what} is not supported",
        hint='send parts as {"type": "text", "text": "..."}, and images in messages of user or tool',
        reason="UNSUPPORTED_CONTENT",
        param=param,
    )


def _add_message(chat: inference.Chat, message: Message, param: str, *, asked: bool) -> list[str]:
    """Adds a message; returns where each of its images is."""
    reasoning = message.reasoning_content or message.reasoning or ""
    role = _role(message)
    added = chat.messages.add(
        role=role,
        tool_call_id=clean(message.tool_call_id or "", f"{param}.tool_call_id"),
        reasoning=clean(reasoning, f"{param}.reasoning"),
        name=clean(message.name or "", f"{param}.name") if role == "tool" else "",
    )
    if message.images and role != "assistant":
        raise _unsupported(f"{param}.images", "an image beside the content")
    content = message.content or message.refusal or ""
    places = _add_content(added, content, f"{param}.content", asked=asked)
    for call in message.tool_calls or ():
        added.tool_calls.add(
            id=clean(call.id or "", f"{param}.tool_calls"),
            name=clean(call.function.name, f"{param}.tool_calls"),
            arguments=clean(call.function.arguments, f"{param}.tool_calls"),
        )
    return places


def _add_tools(chat: inference.Chat, body: ChatBody) -> None:
    chosen = body.tool_choice
    if chosen == "none":
        return
    for index, tool in enumerate(body.tools or ()):
        function = tool.function
        if isinstance(chosen, NamedTool) and function.name != chosen.function.name:
            continue
        chat.tools.add(
            name=clean(function.name, f"tools[{index}].function.name"),
            description=clean(function.description or "", f"tools[{index}].function.description"),
            parameters=json.dumps(function.parameters) if function.parameters else "",
            strict=bool(function.strict),
        )
    if isinstance(chosen, NamedTool) and not chat.tools:
        raise InvalidInput("tool_choice names none of the tools", reason="BAD_FIELD", param="tool_choice")
    chat.call_required = chosen not in (None, "auto")
    chat.one_call = isinstance(chosen, NamedTool) or body.parallel_tool_calls is False


def _schema(form: ResponseFormat | None) -> str:
    """The JSON schema of an answer in this form; empty for any text."""
    if form is None or form.type == "text":
        return ""
    if form.bare is not None:
        return json.dumps(form.bare)
    if form.type == "json_object":
        return '{"type": "object"}'
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise bad("response_format.json_schema.schema", "it is missing")
    return json.dumps(form.json_schema.json_schema)


def _template_arguments(body: ChatBody) -> dict[str, Any]:
    """The head knows these names of the switch, the effort and the budget, and what a template calls them."""
    asked = body.reasoning or Reasoning()
    effort = body.reasoning_effort or asked.effort
    arguments: dict[str, Any] = {}
    if effort is not None:
        arguments = {"reasoning_effort": effort, "enable_thinking": effort not in ("none", "minimal")}
    for thinking in (asked.enabled, body.enable_thinking):
        if thinking is not None:
            arguments["enable_thinking"] = thinking
    for budget in (asked.max_tokens, body.thinking_budget):
        if budget is not None:
            arguments["thinking_budget"] = budget
    return {**arguments, **(body.chat_template_kwargs or {})}


def _predicted(body: ChatBody, choices: int) -> str:
    """The prediction, which OpenAI does not take beside these either.

    Raises InvalidInput (UNSUPPORTED_FIELD, BAD_UTF8).
    """
    if body.prediction is None:
        return ""
    for name, unsuited in (("tools", body.tools), ("n", choices > 1)):
        if unsuited:
            raise unsupported("prediction", f"leave out prediction or {name}: they do not go together")
    return clean(body.prediction.text, "prediction")


def ask_as_chat(chat: Translated, request_id: str, render: Callable[[inference.Started], Renderer]) -> Asked:
    """What a body of another API asks. Raises InvalidInput with `param`, in that body's names."""
    with chat.naming():
        body = parse_chat(chat.fields)
        request = chat_request(body, request_id, chat.names)
        chat.fields.clear()  # images in base64, which the renderer may hold on to
    for tool in request.envelope.clear.chat.tools:
        tool.in_conversation = tool.name in chat.loaded
    return Asked(request, render, bool(body.stream), body.user or "", names=chat.names)


def loaded_tool(function: dict[str, Any]) -> str:
    """The text that defines a tool in the conversation, from where on the model may call it."""
    shown = {name: item for name, item in function.items() if name != "strict" and item is not None}
    return f"tool {shown['name']} is loaded\n{json.dumps({'type': 'function', 'function': shown})}"


def ask_chat(value: dict[str, Any], request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    names = Translated(names=ChatBody.names(value))
    with names.naming():
        body = parse_chat(value)
        request = chat_request(body, request_id, names.names)
    render = functools.partial(
        ChatRenderer,
        choices=request.choices,
        include_usage=body.include_usage,
        likeliest=body.likeliest,
        continuous_usage=body.continuous_usage,
    )
    return Asked(request, render, bool(body.stream), body.user or "", names=names.names)


class ChatRenderer(Renderer):
    """Answers in OpenAI's form. A delta of text is rendered without building a dictionary for it."""

    def __init__(
        self,
        started: inference.Started,
        choices: int,
        *,
        include_usage: bool,
        likeliest: int | None,
        continuous_usage: bool = False,
    ) -> None:
        super().__init__(started)
        self._prompt_tokens = started.prompt_tokens
        self._tokens = [0] * choices if continuous_usage else []
        self._common = self.common(started, "chatcmpl", "chat.completion")
        self._usage = include_usage
        self._logged = likeliest is not None
        self._thought = [0] * choices
        self._calls = [0] * choices
        self._around = [self._template(index) for index in range(choices)]

    def _template(self, index: int) -> tuple[str, str]:
        """What stands before and after the text of a delta."""
        whole = event(self._chunk(index, {"content": "\x00"}, None))
        before, after = whole.decode().split(json.dumps("\x00"))
        return before, after

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None, tokens: Logprobs = ()
    ) -> dict[str, Any]:
        logprobs = chat_logprobs(tokens) if self._logged and tokens else None
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        told = usage_so_far(self._prompt_tokens, self._tokens) if self._tokens else None
        usage = {"usage": told} if self._usage else {}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice], **usage}

    def first(self) -> bytes:
        opening = {"role": "assistant", "content": ""}
        return b"".join(event(self._chunk(index, opening, None)) for index in range(len(self._calls)))

    def delta(self, delta: inference.Delta) -> bytes:
        index = delta.choice
        if self._tokens:
            self._tokens[index] = delta.tokens
        elif not delta.logprobs and not delta.HasField("parsed"):
            before, after = self._around[index]
            return f"{before}{json.dumps(delta.text)}{after}".encode()
        told: dict[str, Any] = {}
        if delta.parsed.reasoning:
            self._thought[index] = delta.tokens
            told["reasoning_content"] = delta.parsed.reasoning
        if delta.text or not told:
            told["content"] = delta.text
        calls = [{"index": number, **call} for number, call in self._named(index, delta.parsed.tool_calls)]
        if calls:
            told["tool_calls"] = calls
        return event(self._chunk(index, told, None, delta.logprobs))

    def _named(self, index: int, calls: Any) -> list[tuple[int, dict[str, Any]]]:
        begin = self._calls[index]
        self._calls[index] += len(calls)
        return [
            (number, _call(call, call_id(self.request_id, index, number, call)))
            for number, call in enumerate(calls, begin)
        ]

    def last(self, finished: inference.Finished) -> bytes:
        """The finish reasons, the usage where it was asked for, and the end of the stream."""
        events = [
            event(self._chunk(index, {}, "tool_calls" if called and reason == "stop" else reason))
            for index, (called, reason) in enumerate(zip(self._calls, self.reasons(finished), strict=True))
        ]
        usage = {"usage": usage_of(finished, sum(self._thought))} if self._usage else {}
        more = {**usage, **receipt_of(finished)}
        if more:
            events.append(event({**self._chunk(0, {}, None), "choices": [], **more}))
        return b"".join(events) + b"data: [DONE]\n\n"

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        choices = []
        for index, (answer, reason) in enumerate(zip(answers, self.reasons(finished), strict=True)):
            calls = [call for _, call in self._named(index, answer.calls)]
            message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if calls:
                message |= {"content": answer.text or None, "tool_calls": calls}
                reason = "tool_calls" if reason == "stop" else reason
            logprobs = chat_logprobs(answer.logprobs) if self._logged else None
            choices.append(
                {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
            )
        usage = usage_of(finished, sum(answer.reasoning_tokens for answer in answers))
        told = {**self._common, "choices": choices, "usage": usage, **receipt_of(finished)}
        return json.dumps(told).encode()


def _call(call: inference.ToolCall, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments or "{}"},
    }
