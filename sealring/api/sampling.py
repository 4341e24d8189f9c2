"""What the APIs' requests have in common: the model, sampling, and where the request waits."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from sealring.api.fields import MAX_STRING, Body
from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.composition import MAX_CHOICES
from sealring.mesh.prompt.validate import (
    MAX_DEADLINE_MS,
    MAX_DRAFT_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_PROMPT_CACHE_KEY,
    MAX_REPETITION_CONTEXT_SIZE,
    MAX_TOKEN_ID,
    MAX_TOKENS,
)
from sealring.v1 import inference_pb2 as inference

_INT64 = 1 << 63
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class CommonBody(Body):
    """Fields of every API, by the names that OpenAI, vLLM or mlx_lm.server have for them."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    num_draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None
    repetition_context_size: Annotated[int, Field(ge=1, le=MAX_REPETITION_CONTEXT_SIZE)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=16)] | None = None
    user: Annotated[str, Field(max_length=MAX_STRING)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_PROMPT_CACHE_KEY)] | None = None
    min_trust: Annotated[int, Field(ge=0, le=100)] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def likeliest(self) -> int | None:
        """How many tokens are to be told beside each one; None for no log-probabilities."""
        raise NotImplementedError


def make_request(
    body: CommonBody, prompt: inference.Prompt, max_tokens: int, request_id: str
) -> inference.GenerateRequest:
    """The request for a prompt, whose sampling is filled in. Raises InvalidInput (BAD_FIELD, BAD_UTF8)."""
    sampling = prompt.sampling
    sampling.temperature = 1.0 if body.temperature is None else body.temperature
    if body.top_p is not None:
        sampling.top_p = body.top_p
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)
    if body.min_p is not None:
        sampling.min_p = body.min_p
    if body.num_draft_tokens is not None:
        sampling.num_draft_tokens = body.num_draft_tokens
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
    prompt.stop.extend(clean(stop, "stop") for stop in stops)
    return inference.GenerateRequest(
        model=clean(body.model, "model"),
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


def clean(text: str, param: str) -> str:
    """Half a surrogate pair is valid in JSON and not in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{param} holds half a surrogate pair", reason="BAD_UTF8", param=param) from None
    return text
