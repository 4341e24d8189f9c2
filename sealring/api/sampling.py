"""What the APIs' requests have in common: the model, sampling, and where the request waits."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, create_model

from sealring.api.fields import BOOKKEEPING, MAX_STRING, Body, Rule, Rules, bad, only, same, taken_as
from sealring.api.keep_alive import KeepAlive
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt import numbers, options
from sealring.mesh.prompt.numbers import MAX_DEADLINE_MS
from sealring.mesh.prompt.options import MAX_REPETITION_PENALTY, MAX_TOKENS, MAX_TOP_K, Bounds
from sealring.mesh.prompt.tools import parse_json_object, too_deep
from sealring.mesh.prompt.validate import (
    MAX_LOGIT_BIASES,
    MAX_PROMPT_CACHE_KEY,
    MAX_STOPS,
    MAX_TOKEN_ID,
)
from sealring.v1 import inference_pb2 as inference

_INT64 = 1 << 63
_DEFAULT = "default_model"
"""What mlx_lm.server calls the model that it has."""

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Repetition = Annotated[float, Field(ge=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)]

_LEAST_TOP_P = 2.0**-20
"""Leaves the most probable token alone, as OpenAI reads a `top_p` of 0."""


def held_to(schema: Any, param: str) -> dict[str, Any]:
    """The fields of a chat that is answered by an instance of a schema, which may be a text."""
    if isinstance(schema, str):
        schema = parse_json_object(schema, param)
    if too_deep(schema):
        raise bad(param, "it is nested too deep")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def _thought(item: Any, param: str) -> dict[str, Any]:
    """Ollama's `think`: whether, or how much."""
    return {
        "enable_thinking": item is not False,
        **({"reasoning_effort": item} if isinstance(item, str) else {}),
    }


def _kind_of_thinking(item: Any, param: str) -> dict[str, Any]:
    """DeepSeek's, GLM's and Kimi's `thinking`, which Anthropic's is like."""
    return thinking_of(item) if isinstance(item, dict) else {}


def thinking_of(item: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat for `{"type": "enabled", "budget_tokens": 2048}`."""
    kind, budget = item.get("type"), item.get("budget_tokens")
    found: dict[str, Any] = {"enable_thinking": kind == "enabled"} if kind in ("enabled", "disabled") else {}
    if kind == "enabled" and type(budget) is int:
        found["thinking_budget"] = budget
    return found


THINK = Rule(spread=_thought)
THINKING = Rule(spread=_kind_of_thinking)

_SCHEMA = Rule(spread=held_to)
_AS_SCHEMA = only(because="answers are held to JSON Schema: send one with enum or pattern in response_format")

OPENAI: Rules = {
    # OpenAI's
    "audio": only(),
    "best_of": only(1),
    "echo": only(False),  # of chats
    "function_call": only("none", "auto"),
    "functions": only([]),
    "metadata": BOOKKEEPING,
    "modalities": only(["text"]),
    "moderation": BOOKKEEPING,
    "prediction": BOOKKEEPING,
    "prompt_cache_options": BOOKKEEPING,
    "prompt_cache_retention": BOOKKEEPING,
    "response_format": only({"type": "text"}),  # of completions
    "safety_identifier": BOOKKEEPING,
    "service_tier": BOOKKEEPING,
    "store": BOOKKEEPING,  # nothing is stored
    "suffix": only(""),
    "top_logprobs": only(0),
    "verbosity": BOOKKEEPING,  # a hint that no open model knows
    "web_search_options": only(),
    # OpenRouter's
    "include_reasoning": BOOKKEEPING,
    "provider": BOOKKEEPING,
    "transforms": BOOKKEEPING,
    "usage": BOOKKEEPING,
    # the Vercel AI SDK's
    "promptCacheKey": taken_as("prompt_cache_key"),
    # DeepSeek's, GLM's, Kimi's
    "thinking": THINKING,
    # vLLM's and SGLang's
    "add_special_tokens": only(),
    "allowed_token_ids": only(),
    "bad_words": only([]),
    "cache_salt": only("", because="prefixes are shared within one API key only: use a key of its own"),
    "chat_template": only(),
    "guided_choice": _AS_SCHEMA,
    "guided_grammar": _AS_SCHEMA,
    "guided_json": _SCHEMA,
    "guided_regex": _AS_SCHEMA,
    "include_stop_str_in_output": only(False),
    "length_penalty": only(1),
    "logits_processors": only([]),
    "prompt_logprobs": only(),
    "request_id": BOOKKEEPING,
    "return_token_ids": BOOKKEEPING,  # llama-benchy counts by the usage where there are none
    "return_tokens_as_token_ids": only(False),
    "separate_reasoning": only(True),
    "skip_special_tokens": only(True),
    "spaces_between_special_tokens": only(True),
    "stream_reasoning": only(True),
    "structured_outputs": Rule(
        parts={
            "json": _SCHEMA,
            "choice": _AS_SCHEMA,
            "grammar": _AS_SCHEMA,
            "regex": _AS_SCHEMA,
            "structural_tag": only(),
        }
    ),
    "truncate_prompt_tokens": only(),
    "use_beam_search": only(False),
    # llama.cpp's and LM Studio's
    "cache_prompt": BOOKKEEPING,
    "dry_multiplier": only(0),
    "dynatemp_range": only(0),
    "grammar": only(""),
    "id_slot": BOOKKEEPING,
    "json_schema": _SCHEMA,
    "lora": only([]),
    "n_keep": BOOKKEEPING,
    "n_predict": taken_as("max_tokens"),
    "n_probs": only(0),
    "post_sampling_probs": only(False),
    "response_fields": only([]),
    "return_progress": BOOKKEEPING,  # beside the answer, like the next one
    "return_tokens": only(False),
    "samplers": only(),
    "timings_per_token": BOOKKEEPING,
    "top_n_sigma": only(-1),
    "ttl": taken_as("keep_alive"),
    # Ollama's, as Open WebUI sends them
    "mirostat": only(0),
    "mirostat_eta": BOOKKEEPING,  # means something with mirostat only, like the next one
    "mirostat_tau": BOOKKEEPING,
    "num_batch": BOOKKEEPING,  # the ring's own choice, like the next ones
    "num_ctx": BOOKKEEPING,
    "num_gpu": BOOKKEEPING,
    "num_keep": BOOKKEEPING,
    "num_thread": BOOKKEEPING,
    "repeat_last_n": taken_as("repetition_context_size"),
    "repeat_penalty": taken_as("repetition_penalty"),
    "tfs_z": only(1),
    "think": THINK,
    "typical_p": only(1),
    "use_mlock": BOOKKEEPING,
    "use_mmap": BOOKKEEPING,
    # mlx_lm.server's
    "adapters": only(),
    "draft_model": only(),
    "frequency_context_size": only(),
    "presence_context_size": only(),
    "role_mapping": only(),
    "xtc_probability": only(0),
    "xtc_threshold": only(0.1),
}
"""Rules for fields of chats and completions that their classes below do not have."""


OBFUSCATION = only(
    False, because="events are not padded: over TLS their lengths show; seal prompts, whose pieces are padded"
)
"""The rule of `include_obfuscation`, which pads the events of a stream."""


class StreamOptions(Body):
    rules: ClassVar[Rules] = {"include_obfuscation": OBFUSCATION}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


OPTIONS: Rules = same(*options.SamplingOptions.__annotations__.keys() - {"logprobs"})
"""All options of sampling, for bodies that are translated to the chat's. Each API has its own form of
log-probabilities."""


def _field(kind: Any, bounds: Bounds | None) -> Any:
    """Type and default of a field, as pydantic has them."""
    if bounds is not None:
        low: dict[str, Any] = {"gt" if bounds.above else "ge": bounds.least}
        finite = False if kind is float else None
        kind = Annotated[kind, Field(**low, le=bounds.most, allow_inf_nan=finite)]
    return kind | None, None


_OWN_FORM = {"logprobs"}
"""What each API has a form of its own for."""

if TYPE_CHECKING:
    _Tables = Body
else:
    _Tables = create_model(
        "_Tables",
        __base__=Body,
        **{
            name: _field(kind, table.BOUNDS.get(name))
            for table in (options, numbers)
            for name, kind in table.PLAIN.items()
            if name not in _OWN_FORM
        },
    )


class CommonBody(_Tables):
    """Fields of every API, by the names that OpenAI, vLLM or mlx_lm.server have for them.

    The tables of mesh/prompt/options.py and numbers.py are fields too; those here take other values than
    the contract does.
    """

    rules: ClassVar[Rules] = OPENAI

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    repetition_penalty: _Repetition | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    user: Annotated[str, Field(max_length=MAX_STRING)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_PROMPT_CACHE_KEY)] | None = None
    keep_alive: KeepAlive = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each event of a stream has the usage up to it."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest tokens to report beside each token; None: no log-probabilities."""
        raise NotImplementedError


_SAMPLING = tuple(
    field.name for field in inference.Sampling.DESCRIPTOR.fields if field.name in CommonBody.model_fields
)
"""Fields with the same name in bodies and in the contract: all but `logprobs`."""

_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "top_p": lambda mass: mass or _LEAST_TOP_P,
    "top_k": lambda count: max(0, count),
    "seed": lambda seed: seed % (2 * _INT64),
    "repetition_penalty": lambda penalty: penalty or 1.0,  # mlx_lm.server's default is 0, which is off
    "logit_bias": lambda biases: {_token_id(token): bias for token, bias in biases.items()},
}


def _set(sampling: inference.Sampling, name: str, value: Any) -> None:
    if isinstance(value, dict):
        getattr(sampling, name).update(value)
    elif isinstance(value, list):
        getattr(sampling, name).extend(value)
    else:
        setattr(sampling, name, value)


def make_request(
    body: CommonBody, prompt: inference.Prompt, max_tokens: int, request_id: str
) -> inference.GenerateRequest:
    """The request for a prompt, whose sampling is filled in. Raises InvalidInput (BAD_FIELD, BAD_UTF8)."""
    sampling = prompt.sampling
    sampling.temperature = 1.0
    sampling.unnamed = sum(bit for name, bit in options.MODELS_OWN.items() if getattr(body, name) is None)
    for name in _SAMPLING:
        value = getattr(body, name)
        if value is not None and name in _CONVERTED:
            value = _CONVERTED[name](value)
        if value is not None:
            _set(sampling, name, value)
    if body.likeliest is not None:
        sampling.logprobs = body.likeliest
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    prompt.stop.extend(clean(stop, "stop") for stop in stops)
    asked: Any = {name: getattr(body, name) for name in numbers.PLAIN}
    request = numbers.request_of(asked | {"max_tokens": max_tokens})
    request.MergeFrom(
        inference.GenerateRequest(
            model=clean("" if body.model in (None, _DEFAULT) else body.model, "model"),
            request_id=request_id,
            prompt_cache_key=body.prompt_cache_key,
        )
    )
    request.envelope.clear.CopyFrom(prompt)  # the only copy of its images
    return request


def _token_id(name: str) -> int:
    if _TOKEN_ID.fullmatch(name) is None or int(name) > MAX_TOKEN_ID:
        raise InvalidInput(
            "logit_bias names something that is no token id",
            hint=f"use whole numbers from 0 to {MAX_TOKEN_ID}",
            reason="BAD_FIELD",
            param="logit_bias",
        )
    return int(name)


def clean(text: str, param: str) -> str:
    """Half a surrogate pair is valid in JSON and not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{param} holds half a surrogate pair", reason="BAD_UTF8", param=param) from None
    return text
