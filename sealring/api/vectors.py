"""Embeddings and scores: `/v1/embeddings`, Ollama's `/api/embed` and `/api/embeddings`, `/v1/rerank`.

Each input is a prompt of its own, so that inputs of one body take turns with those of others; their vectors
come back together.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast
from unicodedata import normalize

from pydantic import Field

from sealring.api.answers import Asked, Choice, Renderer, receipt_of
from sealring.api.fields import BOOKKEEPING, Body, Rules, bad, check_body, only, table, unsupported
from sealring.api.keep_alive import KeepAlive
from sealring.api.sampling import clean
from sealring.mesh.errors import Unavailable
from sealring.mesh.prompt import numbers
from sealring.mesh.prompt.validate import MAX_CONTENT_BYTES, MAX_TOKEN_ID
from sealring.v1 import inference_pb2 as inference

MAX_INPUTS = 2048
"""Inputs of one body: OpenAI's own limit, and a thousand is what LangChain sends."""

AT_ONCE = 8
"""Inputs of one body that are prompts at the same time."""

MAX_REPEATED = 16 << 20
"""Bytes that a body's query and instruction may have together over all of its documents, which are each asked
with both."""

MAX_DIMENSIONS = 1 << 16

_Id = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
_Ids = Annotated[list[_Id], Field(fail_fast=True, min_length=1, max_length=MAX_CONTENT_BYTES // 4)]
_SOME = Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)


_OWN = "each model's own folder says how its vectors are made"
_RULES: Rules = {
    "add_special_tokens": only(True, because=_OWN),
    **{name: only(because=_OWN) for name in ("normalize", "normalized")},
    **{name: only(True, because=_OWN) for name in ("activation", "softmax", "use_activation")},
    "truncate_prompt_tokens": only(
        -1, because="send less: an input that is longer than the context is refused"
    ),
    "truncation_side": BOOKKEEPING,
}
"""Fields of vLLM's and Jina's whose value false asks for something, and those of cutting inputs."""


class _VectorBody(Body):
    rules: ClassVar[Rules] = _RULES

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    min_trust: int | None = None
    deadline_ms: int | None = None
    keep_alive: KeepAlive = None


class EmbeddingsBody(_VectorBody):
    input: str | Annotated[list[str], _SOME] | _Ids | Annotated[list[_Ids], _SOME]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None


class EmbedBody(_VectorBody):
    rules: ClassVar[Rules] = {**_RULES, "truncate": BOOKKEEPING, "options": BOOKKEEPING}

    input: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)] = ""
    dimensions: Annotated[int, Field(ge=0, le=MAX_DIMENSIONS)] | None = None


class EmbeddingBody(_VectorBody):
    rules: ClassVar[Rules] = {**_RULES, "options": BOOKKEEPING}

    prompt: str = ""


class Document(Body):
    text: str


class RerankBody(_VectorBody):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], _SOME]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    max_tokens_per_query: Annotated[int, Field(ge=1)] | None = None


_BODIES: dict[str, type[Body]] = {
    "/v1/embeddings": EmbeddingsBody,
    "/api/embed": EmbedBody,
    "/v1/rerank": RerankBody,
}
for _api, _body in _BODIES.items():
    table(_api, dict.fromkeys(_body.model_fields, BOOKKEEPING))


def ask_embeddings(value: dict[str, Any], request_id: str) -> Asked:
    """Raises InvalidInput with `param`, which names the field."""
    body = _checked(value, EmbeddingsBody)
    given: Any = body.input
    single = isinstance(given, str) or (given and isinstance(given[0], int))
    inputs = [given] if single else given
    pooled = [_embedded(each, f"input[{at}]" if not single else "input") for at, each in enumerate(inputs)]
    form = _base64 if body.encoding_format == "base64" else None

    def whole(started: inference.Started, vectors: list[array[float]], tokens: int) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": at, "embedding": form(one) if form else one}
            for at, one in enumerate(vectors)
        ]
        return {"object": "list", "data": data, "model": started.model, "usage": _usage(tokens)}

    return _asked(body, pooled, body.dimensions, request_id, whole, "input")


def ask_embed(value: dict[str, Any], request_id: str) -> Asked:
    """Ollama's; without input it loads the model. Raises InvalidInput with `param`."""
    body, begun = _checked(value, EmbedBody), time.monotonic_ns()
    inputs = [body.input] if isinstance(body.input, str) else body.input
    pooled = [_embedded(each, f"input[{at}]") for at, each in enumerate(inputs) if each or len(inputs) > 1]

    def whole(started: inference.Started, vectors: list[array[float]], tokens: int) -> dict[str, Any]:
        times = {"total_duration": time.monotonic_ns() - begun, "load_duration": started.load_ms * 1_000_000}
        return {"model": started.model, "embeddings": vectors, **times, "prompt_eval_count": tokens}

    return _asked(body, pooled, body.dimensions, request_id, whole, "input")


def ask_embedding(value: dict[str, Any], request_id: str) -> Asked:
    """Ollama's older one, of one prompt; without it, it loads the model. Raises InvalidInput with `param`."""
    body = _checked(value, EmbeddingBody)
    pooled = [_embedded(body.prompt, "prompt")] if body.prompt else []

    def whole(started: inference.Started, vectors: list[array[float]], tokens: int) -> dict[str, Any]:
        return {"embedding": vectors[0] if vectors else []}

    return _asked(body, pooled, None, request_id, whole, "prompt")


def ask_rerank(value: dict[str, Any], request_id: str) -> Asked:
    """In the form that Jina, Cohere and vLLM share. Raises InvalidInput with `param`."""
    body = _checked(value, RerankBody)
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    query, instruction = clean(body.query, "query"), clean(body.instruction or "", "instruction")
    if len(texts) * len((query + instruction).encode()) > MAX_REPEATED:
        raise bad(
            "query", f"it has more than {MAX_REPEATED >> 20} MiB, with its instruction, over all documents"
        )
    _check_uncut([query], body.max_tokens_per_query, "max_tokens_per_query")
    _check_uncut(texts, body.max_tokens_per_doc, "max_tokens_per_doc")
    pooled = [
        inference.Pooled(text=clean(text, f"documents[{at}]"), query=query, instruction=instruction)
        for at, text in enumerate(texts)
    ]

    def whole(started: inference.Started, vectors: list[array[float]], tokens: int) -> dict[str, Any]:
        ranked = sorted(range(len(texts)), key=lambda at: -vectors[at][0])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": at, "relevance_score": vectors[at][0]} for at in ranked]
        for one in results if body.return_documents else ():
            one["document"] = {"text": texts[one["index"]]}
        name = f"rerank-{started.request_id}"
        return {"id": name, "model": started.model, "results": results, "usage": _usage(tokens)}

    return _asked(body, pooled, None, request_id, whole, "documents")


_Whole = Callable[[inference.Started, "list[array[float]]", int], dict[str, Any]]


class VectorRenderer(Renderer):
    """The vectors of all inputs, in one piece."""

    media_type = "application/json"

    def __init__(self, started: inference.Started, whole: _Whole, inputs: int) -> None:
        super().__init__(started)
        self._started, self._whole, self._inputs = started, whole, inputs

    def whole(self, answers: list[Choice], finished: inference.Finished) -> bytes:
        """Each vector becomes numbers of Python's by itself, and other threads have turns between them.

        Raises Unavailable: NO_VECTOR where a head has made none, BAD_VECTOR for numbers that JSON has not.
        """
        vectors = [one.vector for one in answers if one.vector]
        if len(vectors) != self._inputs:
            raise Unavailable("an input has no vector", hint="send the request again", reason="NO_VECTOR")
        if not all(math.isfinite(sum(one)) for one in vectors):
            raise Unavailable(
                "the model has made a vector that is not of finite numbers",
                hint="send other inputs, or see whether the model is whole: sealring model check",
                reason="BAD_VECTOR",
            )
        told = self._whole(self._started, vectors, finished.prompt_tokens)
        return json.dumps(told | receipt_of(finished), default=_floats).encode()


def _asked(
    body: _VectorBody,
    pooled: Sequence[inference.Pooled],
    dimensions: int | None,
    request_id: str,
    whole: _Whole,
    param: str,
) -> Asked:
    given = {name: getattr(body, name) for name in ("priority", "min_trust", "deadline_ms", "keep_alive")}
    name = clean(body.model or "", "model")
    requests = []
    empty = next((at for at, one in enumerate(pooled) if not (one.text or one.tokens.ids)), None)
    if empty is not None:
        raise bad(f"{param}[{empty}]" if len(pooled) > 1 else param, "it is empty")
    for at, one in enumerate(pooled or [None]):
        request = numbers.request_of(cast(numbers.RequestNumbers, given | {"max_tokens": 1}))
        request.model, request.request_id = name, f"{request_id}-{at}" if at else request_id
        if one is not None:
            request.envelope.clear.pooled.CopyFrom(one)
            request.envelope.clear.pooled.dimensions = dimensions or 0
        requests.append(request)
    return Asked(
        requests[0],
        lambda started: VectorRenderer(started, whole, len(pooled)),
        user=body.user or "",
        others=tuple(requests[1:]),
        names={"input": param},
        loads=not pooled,
        at_once=AT_ONCE,
    )


def _check_uncut(texts: Sequence[str], most: int | None, name: str) -> None:
    """Refuses a bound in tokens that a text may exceed: no token has less than a byte of it, and nothing here
    cuts texts. Raises InvalidInput (UNSUPPORTED_FIELD)."""
    if most is not None and any(len(normalize("NFC", text).encode()) > most for text in texts):
        raise unsupported(name, f"send texts of at most {most} bytes with it, or leave {name} out")


def _checked(value: dict[str, Any], body: type[Any]) -> Any:
    made = check_body(value, body)
    if isinstance(made.model, str) and body in (EmbedBody, EmbeddingBody):
        made.model = made.model.removesuffix(":latest")
    return made


def _embedded(given: str | list[int], param: str) -> inference.Pooled:
    if isinstance(given, str):
        return inference.Pooled(text=clean(given, param))
    return inference.Pooled(tokens=inference.TokenIds(ids=given))


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _floats(vector: array[float]) -> list[float]:
    return vector.tolist()


def _base64(vector: array[float]) -> str:
    """Little-endian float32, as OpenAI's client reads it."""
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
