"""OpenAI's request bodies into GenerateRequest. What is not supported is refused, never ignored."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.composition import MAX_CHOICES
from sealring.mesh.prompt.validate import (
    MAX_DEADLINE_MS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_PROMPT_CACHE_KEY,
    MAX_REPETITION_CONTEXT_SIZE,
    MAX_TOKEN_ID,
)
from sealring.v1 import inference_pb2 as inference

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
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
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # mlx_lm.server's
    "adapters": (),
    "draft_model": (),
    "frequency_context_size": (),
    "num_draft_tokens": (),
    "presence_context_size": (),
    "role_mapping": (),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
"""Fields that other servers know, accepted where they ask for nothing: with one of these values, or null."""

_IGNORED = ("safety_identifier",)
"""Strings that change no answer."""

_MAX_STRING = 256
_INT64 = 1 << 63
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=1024)]
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
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    repetition_context_size: Annotated[int, Field(ge=1, le=MAX_REPETITION_CONTEXT_SIZE)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    user: Annotated[str, Field(max_length=_MAX_STRING)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_PROMPT_CACHE_KEY)] | None = None
    min_trust: Annotated[int, Field(ge=0, le=100)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def likeliest(self) -> int | None:
        """How many tokens are to be told beside each one; None for no log-probabilities."""
        raise NotImplementedError


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`. docs/sampling.md tells which fields are not OpenAI's."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=(1 << 31) - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(CommonBody):
    """`POST /v1/completions` with one prompt of text."""

    prompt: str | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


B = TypeVar("B", bound=CommonBody)


def parse_body(value: dict[str, Any], model: type[B]) -> B:
    """Raises InvalidInput with `param`: UNSUPPORTED_FIELD, UNKNOWN_FIELD, BAD_FIELD, MISSING_FIELD."""
    rest = {name: item for name, item in value.items() if not _neutral(name, item, model)}
    try:
        body = model.model_validate(rest)
    except ValidationError as error:
        raise _first_error(error) from None
    if body.stream_options is not None and not body.stream:
        raise InvalidInput("stream_options needs stream", reason="BAD_FIELD", param="stream_options")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs needs logprobs", reason="BAD_FIELD", param="top_logprobs")
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
    """`messages[0].content`; the names of a union's branches and token ids are left out."""
    param = ""
    if location[0] == "logit_bias":
        return "logit_bias"
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
    if body.repetition_penalty:  # 0 is off, too: mlx_lm.server's default
        sampling.repetition_penalty = body.repetition_penalty
    if body.repetition_context_size is not None:
        sampling.repetition_context_size = body.repetition_context_size
    sampling.presence_penalty = body.presence_penalty or 0.0
    sampling.frequency_penalty = body.frequency_penalty or 0.0
    for token, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[_token_id(token)] = bias
    if body.likeliest is not None:
        sampling.logprobs = body.likeliest
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
        priority=body.priority or 0,
        deadline_ms=body.deadline_ms or 0,
        choices=body.n or 1,
        prompt_cache_key=body.prompt_cache_key,
    )


def _token_id(name: str) -> int:
    if _TOKEN_ID.fullmatch(name) is None or int(name) > MAX_TOKEN_ID:
        raise InvalidInput(
            "logit_bias names something that is no token id",
            hint=f"use whole numbers from 0 to {MAX_TOKEN_ID}",
            reason="BAD_FIELD",
            param="logit_bias",
        )
    return int(name)


def _clean(text: str, param: str) -> str:
    """Half a surrogate pair is valid in JSON and not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{param} holds half a surrogate pair", reason="BAD_UTF8", param=param) from None
    return text
