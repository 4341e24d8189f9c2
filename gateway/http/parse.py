"""OpenAI's request bodies into GenerateRequest. What is not supported is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mesh.errors import InvalidInput
from sealring.v1 import inference_pb2 as inference

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
}
"""Fields of OpenAI's API that are accepted where they ask for nothing: with one of these values, or null."""

_IGNORED = ("safety_identifier", "prompt_cache_key")
"""Strings that change no answer."""

_MAX_STRING = 256
_INT64 = 1 << 63


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=1024)]
    name: Annotated[str, Field(max_length=64)] | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None

    def text(self) -> str:
        """The content as one string; parts are joined by a line break, as chat templates do."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class CommonBody(_Body):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    user: Annotated[str, Field(max_length=_MAX_STRING)] | None = None
    min_trust: Annotated[int, Field(ge=0, le=100)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`. `top_k`, `min_p` and `min_trust` are additions to OpenAI's API."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None


class CompletionBody(CommonBody):
    """`POST /v1/completions` with one prompt of text."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]


B = TypeVar("B", bound=CommonBody)


def parse_body(value: dict[str, Any], model: type[B]) -> B:
    """Raises InvalidInput with `param`: UNSUPPORTED_FIELD, UNKNOWN_FIELD, BAD_FIELD, MISSING_FIELD."""
    rest = {name: item for name, item in value.items() if not _neutral(name, item, model)}
    try:
        body = model.model_validate(rest)
    except ValidationError as error:
        raise _first_error(error) from None
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options goes with stream only", reason="BAD_FIELD", param="stream_options")
    return body


def _neutral(name: str, item: Any, model: type[CommonBody]) -> bool:
    if name in model.model_fields:
        return False
    if name in _IGNORED and isinstance(item, str) and len(item) <= _MAX_STRING:
        return True
    if name not in _NEUTRAL:
        return False
    if item is None or any(type(item) in _alike(value) and item == value for value in _NEUTRAL[name]):
        return True
    raise InvalidInput(
        f"{name} is not supported", hint=f"leave {name} out", reason="UNSUPPORTED_FIELD", param=name
    )


def _alike(value: Any) -> tuple[type, ...]:
    return (int, float) if type(value) in (int, float) else (type(value),)


def _first_error(error: ValidationError) -> InvalidInput:
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = max(errors, key=lambda each: len(each["loc"]))
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidInput(
            f"unknown field {param!r}", hint="check its spelling", reason="UNKNOWN_FIELD", param=param
        )
    if first["type"] == "missing":
        return InvalidInput(f"{param} is missing", reason="MISSING_FIELD", param=param)
    said = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidInput(f"{param} is refused: {said}", reason="BAD_FIELD", param=param)


def _param(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the names of a union's branches are left out."""
    param = ""
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        elif "[" not in part and part not in ("str", "constrained-str"):
            param += f".{part[:64]}" if param else part[:64]
    return param[:128]


def chat_request(body: ChatBody, request_id: str) -> inference.GenerateRequest:
    """A developer message counts as a system message. Raises InvalidInput (BAD_FIELD)."""
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise InvalidInput(
            "max_tokens and max_completion_tokens differ",
            hint="send one of them",
            reason="BAD_FIELD",
            param="max_completion_tokens",
        )
    prompt = inference.Prompt()
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        prompt.chat.messages.add(role=role, content=_clean(message.text(), "messages"))
    return _request(body, prompt, max(limits, default=0), request_id)


def completion_request(body: CompletionBody, request_id: str) -> inference.GenerateRequest:
    text = body.prompt if isinstance(body.prompt, str) else body.prompt[0]
    prompt = inference.Prompt(text=_clean(text, "prompt"))
    # OpenAI's own default for this endpoint
    return _request(body, prompt, body.max_tokens or 16, request_id)


def _request(
    body: CommonBody, prompt: inference.Prompt, max_tokens: int, request_id: str
) -> inference.GenerateRequest:
    sampling = prompt.sampling
    sampling.temperature = 1.0 if body.temperature is None else body.temperature
    if body.top_p is not None:
        sampling.top_p = body.top_p
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.min_p is not None:
        sampling.min_p = body.min_p
    if body.seed is not None:
        sampling.seed = body.seed % (2 * _INT64)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    prompt.stop.extend(_clean(stop, "stop") for stop in stops)
    return inference.GenerateRequest(
        model=_clean(body.model, "model"),
        request_id=request_id,
        envelope=inference.Envelope(clear=prompt),
        max_tokens=max_tokens,
        min_trust=body.min_trust or 0,
    )


def _clean(text: str, param: str) -> str:
    """Half a surrogate pair is valid in JSON and not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{param} holds half a surrogate pair", reason="BAD_UTF8", param=param) from None
    return text
