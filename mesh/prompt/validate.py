"""Validation of requests: at the gateway's edge for prompts in clear, and always at the head.

Error messages hold no content: they name fields by their place (`messages[3].content`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sealring.mesh.errors import InvalidInput
from sealring.mesh.prompt.images import MAX_IMAGES_BYTES, check_images
from sealring.mesh.prompt.numbers import numbers_of, validate_numbers
from sealring.mesh.prompt.options import BOUNDS, MAX_LOGPROBS
from sealring.mesh.prompt.tools import check_calls, check_schema, check_tools, tools_size
from sealring.mesh.receipt.digests import HASH_BYTES
from sealring.mesh.receipt.statement import check_nonce
from sealring.v1 import inference_pb2 as inference

ROLES = ("system", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_CONTENT_BYTES = 4 << 20
"""UTF-8 bytes of all contents of one prompt together."""

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIASES = 300
MAX_BIAS = 100.0
MAX_TOKEN_ID = (1 << 31) - 1
MAX_SCORED = 1 << 14
"""Log-probabilities in the answer for a prompt: its tokens times (1 + the alternatives of each)."""

MAX_PREDICTION_BYTES = 256 << 10
"""UTF-8 bytes of what an answer is expected to be: some 64,000 tokens, more than answers have."""

MAX_TEXT_ENVELOPE_BYTES = 8 << 20
MAX_ENVELOPE_BYTES = MAX_TEXT_ENVELOPE_BYTES + MAX_IMAGES_BYTES
"""Size of a sealed prompt, without and with images. Whoever cannot open it knows of no image in it."""

MAX_PROMPT_CACHE_KEY = 256
"""Characters."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")


def validate_prompt(prompt: inference.Prompt) -> None:
    """Checks everything that can be checked without the model.

    Raises InvalidInput with `param` in its metadata: EMPTY_PROMPT, TOO_MANY_MESSAGES, BAD_ROLE,
    CONTENT_TOO_LONG, PREDICTION_TOO_LONG, BAD_SAMPLING, BAD_STOP, and those of mesh.prompt.tools and
    mesh.prompt.images.
    """
    if prompt.HasField("chat"):
        _check_messages(prompt.chat)
    elif prompt.text:
        _check_length(len(prompt.text.encode()), "prompt")
    elif prompt.tokens.ids:
        _check_length(4 * len(prompt.tokens.ids), "prompt")
    elif prompt.HasField("pooled"):
        _check_pooled(prompt)
    else:
        raise InvalidInput("the prompt is empty", reason="EMPTY_PROMPT", param="prompt")
    if prompt.schema:
        check_schema(prompt.schema, "response_format")
    if len(prompt.prediction.encode()) > MAX_PREDICTION_BYTES:
        raise InvalidInput(
            "the prediction is too long",
            hint=f"predict at most {MAX_PREDICTION_BYTES >> 10} KiB of the answer",
            reason="PREDICTION_TOO_LONG",
            param="prediction",
            limit=MAX_PREDICTION_BYTES,
        )
    _check_sampling(prompt.sampling)
    _check_stops(prompt.stop)


def validate_request_id(request_id: str) -> None:
    """Raises InvalidInput (BAD_REQUEST_ID) unless it is 1 to 64 of [A-Za-z0-9_-]."""
    if _REQUEST_ID.match(request_id) is None:
        raise InvalidInput(
            "the request id is malformed",
            hint="use 1 to 64 of A-Z, a-z, 0-9, _ and -",
            reason="BAD_REQUEST_ID",
            param="request_id",
        )


def validate_request(request: inference.GenerateRequest) -> None:
    """Checks a request as a gateway may see it: clear prompts wholly, sealed ones by their size.

    Raises InvalidInput: BAD_REQUEST_ID, EMPTY_ENVELOPE, ENVELOPE_TOO_LONG, BAD_PROMPT_CACHE_KEY, BAD_RESUME,
    BAD_NONCE, BAD_ROSTER_HASH,
    and those of `validate_numbers` and `validate_prompt`. An empty request id and an empty model name pass.
    """
    if request.request_id:
        validate_request_id(request.request_id)
    validate_numbers(**numbers_of(request))
    kind = request.envelope.WhichOneof("content")
    if request.HasField("receipt"):
        _check_receipt(request.receipt, sealed=kind == "sealed")
    validate_prompt_cache_key(request.prompt_cache_key, sealed=kind == "sealed")
    if kind == "clear":
        validate_prompt(request.envelope.clear)
        if request.envelope.clear.HasField("resume"):
            raise InvalidInput(
                "the gateway itself goes on with answers to prompts in clear",
                reason="BAD_RESUME",
                param="envelope.clear.resume",
            )
    elif not request.envelope.sealed:
        raise InvalidInput("the envelope is empty", reason="EMPTY_ENVELOPE", param="envelope")
    _check_envelope(MAX_ENVELOPE_BYTES, request.envelope.sealed)


def check_text_envelope(sealed: bytes) -> None:
    """Checks the size of a sealed prompt for a model that cannot see. Raises InvalidInput
    (ENVELOPE_TOO_LONG)."""
    _check_envelope(MAX_TEXT_ENVELOPE_BYTES, sealed)


def _check_envelope(limit: int, sealed: bytes) -> None:
    long = f"the envelope is longer than {limit} bytes"
    _at_most(limit, len(sealed), long, "ENVELOPE_TOO_LONG", "envelope")


def _check_receipt(receipt: inference.ReceiptRequest, *, sealed: bool) -> None:
    if sealed and receipt.nonce:
        raise InvalidInput(
            "the nonce of a sealed prompt's receipt is sent in clear",
            hint="put it inside the sealed prompt",
            reason="BAD_NONCE",
            param="receipt",
        )
    if not sealed:
        check_nonce(receipt.nonce)
    if len(receipt.roster_hash) not in (0, HASH_BYTES):
        raise InvalidInput("a roster's hash has 32 bytes", reason="BAD_ROSTER_HASH", param="receipt")


def validate_prompt_cache_key(key: str, *, sealed: bool) -> None:
    """Raises InvalidInput (BAD_PROMPT_CACHE_KEY): a gateway has no use for one with a sealed prompt."""
    if key and sealed:
        raise InvalidInput(
            "a sealed prompt goes to the ring that it names; a key in clear would only reveal more",
            hint="leave prompt_cache_key out",
            reason="BAD_PROMPT_CACHE_KEY",
            param="prompt_cache_key",
        )
    long = f"prompt_cache_key is longer than {MAX_PROMPT_CACHE_KEY} characters"
    _at_most(MAX_PROMPT_CACHE_KEY, len(key), long, "BAD_PROMPT_CACHE_KEY", "prompt_cache_key")


def _at_most(limit: int, found: int, said: str, reason: str, param: str, hint: str = "") -> None:
    """Raises InvalidInput if `found` exceeds `limit`."""
    if found > limit:
        raise InvalidInput(said, hint=hint, reason=reason, param=param, limit=limit)


def _check_messages(chat: inference.Chat) -> None:
    many = f"there are more than {MAX_MESSAGES} messages"
    _at_most(MAX_MESSAGES, len(chat.messages), many, "TOO_MANY_MESSAGES", "messages")
    check_images(chat.messages)
    said = False
    total = tools_size(chat)
    _check_length(total, "tools")  # before any of them is read
    check_tools(chat)
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidInput(
                "a message has an unknown role",
                hint=f"use one of {', '.join(ROLES)}",
                reason="BAD_ROLE",
                param=f"messages[{index}].role",
            )
        said = said or bool(message.content or message.tool_calls or message.images)
        total += sum(
            len(text.encode())
            for text in (message.content, message.reasoning, message.name, message.tool_call_id)
        )
        total += check_calls(message, f"messages[{index}]")
        _check_length(total, f"messages[{index}].content")
    if not said:
        raise InvalidInput(
            "there are no messages, or every one is empty",
            hint="send at least one message with role user",
            reason="EMPTY_PROMPT",
            param="messages",
        )


def _check_pooled(prompt: inference.Prompt) -> None:
    asked = prompt.pooled
    if bool(asked.text) == bool(asked.tokens.ids):
        raise InvalidInput("the input is empty, or text and tokens", reason="EMPTY_PROMPT", param="input")
    texts = (asked.text, asked.query, asked.instruction)
    _check_length(4 * len(asked.tokens.ids) + sum(len(text.encode()) for text in texts), "input")
    others = {field.name for field, _ in prompt.ListFields()} - {"pooled"}
    if asked.query:
        others |= {field.name for field, _ in asked.ListFields()} & {"tokens", "dimensions"}
    for name in sorted(others):
        raise InvalidInput(f"{name} has no use beside a vector", reason="BAD_FIELD", param=name)


def _check_length(total: int, param: str) -> None:
    long = f"the prompt is longer than {MAX_CONTENT_BYTES} bytes"
    _at_most(MAX_CONTENT_BYTES, total, long, "CONTENT_TOO_LONG", param, "send a shorter prompt")


def _check_sampling(sampling: inference.Sampling) -> None:
    asked = {field.name: value for field, value in sampling.ListFields()}
    for name, bounds in BOUNDS.items():
        if name in asked and not bounds.hold(asked[name]):
            raise _bad_sampling(name, str(bounds))
    if sampling.prompt_logprobs and not sampling.HasField("logprobs"):
        raise _bad_sampling("logprobs", f"from 0 to {MAX_LOGPROBS}, where those of the prompt are wanted")
    many = f"there are more than {MAX_STOPS} stop_token_ids"
    _at_most(MAX_STOPS, len(sampling.stop_token_ids), many, "BAD_SAMPLING", "stop_token_ids")
    if max(sampling.stop_token_ids, default=0) > MAX_TOKEN_ID:
        raise _bad_sampling("stop_token_ids", f"from 0 to {MAX_TOKEN_ID}")
    _check_biases(sampling)


def _check_biases(sampling: inference.Sampling) -> None:
    biases = sampling.logit_bias
    many = f"logit_bias has more than {MAX_LOGIT_BIASES} entries"
    _at_most(MAX_LOGIT_BIASES, len(biases), many, "BAD_SAMPLING", "logit_bias")
    if not all(abs(bias) <= MAX_BIAS for bias in biases.values()):
        raise _bad_sampling("logit_bias", f"from -{MAX_BIAS:g} to {MAX_BIAS:g} for each token")
    if any(token > MAX_TOKEN_ID for token in biases):
        raise _bad_sampling("logit_bias", f"from 0 to {MAX_TOKEN_ID} as a token id")


def _bad_sampling(param: str, allowed: str) -> InvalidInput:
    return InvalidInput(
        f"{param} is out of bounds", hint=f"use a number {allowed}", reason="BAD_SAMPLING", param=param
    )


def _check_stops(stops: Sequence[str]) -> None:
    _at_most(MAX_STOPS, len(stops), f"there are more than {MAX_STOPS} stop strings", "BAD_STOP", "stop")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidInput(
                f"a stop string has not 1 to {MAX_STOP_CHARACTERS} characters",
                reason="BAD_STOP",
                param=f"stop[{index}]",
                limit=MAX_STOP_CHARACTERS,
            )
