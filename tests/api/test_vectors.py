"""Bodies that ask for vectors, and the vectors in the forms of the APIs."""

from __future__ import annotations

import base64
import json
import math
from array import array
from typing import Any

import pytest

from sealring.api.answers import Asked, Choice
from sealring.api.vectors import (
    MAX_INPUTS,
    MAX_REPEATED,
    ask_embed,
    ask_embedding,
    ask_embeddings,
    ask_rerank,
)
from sealring.mesh.errors import InvalidInput, Unavailable
from sealring.mesh.prompt.validate import validate_request
from sealring.v1 import inference_pb2 as inference

STARTED = inference.Started(request_id="r", model="m")
FINISHED = inference.Finished(prompt_tokens=9)


def told(asked: Asked, *vectors: list[float]) -> Any:
    answers = [Choice(vector=array("f", one)) for one in vectors]
    return json.loads(asked.render(STARTED).whole(answers, FINISHED))


@pytest.mark.parametrize(
    ("given", "pooled"),
    [
        ("one", [{"text": "one"}]),
        (["one", "two"], [{"text": "one"}, {"text": "two"}]),
        ([3, 4], [{"tokens": {"ids": [3, 4]}}]),
        ([[3], [4, 5]], [{"tokens": {"ids": [3]}}, {"tokens": {"ids": [4, 5]}}]),
    ],
)
def test_each_input_is_a_prompt_of_one_token(given: Any, pooled: list[dict[str, Any]]) -> None:
    body = {"model": "m", "input": given, "dimensions": 2, "priority": 3}
    asked = ask_embeddings(body, "r")
    requests = [asked.request, *asked.others]
    expected = [inference.Pooled(**one, dimensions=2) for one in pooled]
    assert [one.envelope.clear.pooled for one in requests] == expected
    assert {(one.model, one.max_tokens, one.choices, one.priority) for one in requests} == {("m", 1, 1, 3)}
    assert len({one.request_id for one in requests}) == len(requests)
    for one in requests:
        validate_request(one)


def test_numbers_are_told_as_floats_or_in_base64() -> None:
    floats = told(ask_embeddings({"model": "m", "input": ["a", "b"]}, "r"), [0.5, -1.0], [2.0, 0.25])
    assert [one["embedding"] for one in floats["data"]] == [[0.5, -1.0], [2.0, 0.25]]
    assert [one["index"] for one in floats["data"]] == [0, 1]
    assert floats["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    packed = told(ask_embeddings({"model": "m", "input": "a", "encoding_format": "base64"}, "r"), [0.5, -1.0])
    found = array("f", base64.b64decode(packed["data"][0]["embedding"]))
    assert found.tolist() == [0.5, -1.0]


def test_ollamas_forms() -> None:
    asked = ask_embed({"model": "m:latest", "input": ["a", "b"], "truncate": True, "options": {"x": 1}}, "r")
    assert asked.request.model == "m"
    assert told(asked, [1.0], [2.0])["embeddings"] == [[1.0], [2.0]]
    assert told(ask_embedding({"model": "m", "prompt": "a"}, "r"), [1.0]) == {"embedding": [1.0]}
    for loading in (ask_embed({"model": "m"}, "r"), ask_embedding({"model": "m", "prompt": ""}, "r")):
        assert loading.loads
    assert told(ask_embed({"model": "m", "input": ""}, "r"))["embeddings"] == []


def test_documents_come_by_their_scores() -> None:
    body = {"model": "m", "query": "q", "documents": ["a", {"text": "b"}, "c"], "instruction": "i"}
    asked = ask_rerank(body, "r")
    pooled = [one.envelope.clear.pooled for one in (asked.request, *asked.others)]
    assert [(one.text, one.query, one.instruction) for one in pooled] == [(one, "q", "i") for one in "abc"]
    found = told(asked, [0.25], [0.75], [0.5])["results"]
    assert found == [
        {"index": at, "relevance_score": score} for at, score in ((1, 0.75), (2, 0.5), (0, 0.25))
    ]
    best = told(ask_rerank(body | {"top_n": 1, "return_documents": True}, "r"), [0.25], [0.75], [0.5])
    assert best["results"] == [{"index": 1, "relevance_score": 0.75, "document": {"text": "b"}}]


@pytest.mark.parametrize(
    ("ask", "body", "param"),
    [
        (ask_embeddings, {"model": "m"}, "input"),
        (ask_embeddings, {"model": "m", "input": []}, "input"),
        (ask_embeddings, {"model": "m", "input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        (ask_embeddings, {"model": "m", "input": "a", "dimensions": 0}, "dimensions"),
        (ask_embeddings, {"model": "m", "input": "a", "encoding_format": "int8"}, "encoding_format"),
        (ask_embeddings, {"model": "m", "input": "a", "temperature": 1}, "temperature"),
        (ask_rerank, {"model": "m", "query": "", "documents": ["a"]}, "query"),
        (ask_rerank, {"model": "m", "query": "q", "documents": []}, "documents"),
        (ask_rerank, {"model": "m", "query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        (ask_rerank, {"model": "m", "query": "q", "documents": ["a", {"text": 1}]}, "documents[1].text"),
        (ask_rerank, {"model": "m", "query": "q", "documents": [{"text": "a", "b": 1}]}, "documents[0].b"),
        (ask_embeddings, {"model": "m", "input": ""}, "input"),
        (ask_embeddings, {"model": "m", "input": ["a", ""]}, "input[1]"),
        (ask_embed, {"model": "m", "input": ["a", ""]}, "input[1]"),
        (ask_rerank, {"model": "m", "query": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(ask: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ask(body, "r")
    assert caught.value.metadata["param"].startswith(param)


BODIES: list[tuple[Any, dict[str, Any]]] = [
    (ask_embeddings, {"input": "a"}),
    (ask_embed, {"input": "a"}),
    (ask_embedding, {"prompt": "a"}),
    (ask_rerank, {"query": "q", "documents": ["d"]}),
]
FIELDS: dict[str, tuple[list[Any], list[Any]]] = {
    **{name: ([None], [True, False]) for name in ("normalize", "normalized")},
    **{name: ([None, True], [False]) for name in ("activation", "softmax", "use_activation")},
    "add_special_tokens": ([None, True], [False]),
    "truncate_prompt_tokens": ([None, -1], [0, 1, 512, False]),
    "truncation_side": ([None, "left", "right"], []),
    "embed_dtype": ([None], ["float16"]),
    "endianness": ([None], ["big"]),
    "embedding_type": ([None], ["binary"]),
    "output_dtype": ([None], ["int8"]),
    "input_type": ([None], ["query"]),
    "task": ([None], ["retrieval.query"]),
    "late_chunking": ([None, False], [True]),
    "return_embeddings": ([None, False], [True]),
    "rank_fields": ([None, []], [["title"]]),
    "max_chunks_per_doc": ([None], [3]),
    "max_doc_length": ([None], [512]),
    "overlap_tokens": ([None], [80]),
    "chat_template": ([None, ""], ["{{ 1 }}"]),
    "mm_processor_kwargs": ([None, {}], [{"a": 1}]),
}
"""Fields of vLLM's, Jina's, Cohere's and Voyage's bodies that are not used here: values that ask for nothing,
and values that would change the answer."""


@pytest.mark.parametrize(("ask", "body"), BODIES)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_used_or_refused_and_never_left_out(ask: Any, body: dict[str, Any], field: str) -> None:
    nothing, asks = FIELDS[field]
    for value in nothing:
        assert ask({"model": "m", **body, field: value}, "r").request.envelope.clear.HasField("pooled")
    for value in asks:
        with pytest.raises(InvalidInput) as caught:
            ask({"model": "m", **body, field: value}, "r")
        assert caught.value.metadata["param"] == field
        assert caught.value.hint


@pytest.mark.parametrize(
    ("field", "longest"), [("max_tokens_per_doc", "na\u00efve"), ("max_tokens_per_query", "query!")]
)
def test_a_bound_in_tokens_is_refused_where_a_text_may_exceed_it(field: str, longest: str) -> None:
    """Nothing cuts a text here. Bytes bound its tokens, also where characters are decomposed first."""
    body = {"query": "query!", "documents": ["na\u00efve", "a"]}
    bytes_of_it = len(longest.encode())
    for most in (bytes_of_it, bytes_of_it + 1, 4096):
        assert len(ask_rerank(body | {field: most}, "r").others) == 1
    for most in (1, bytes_of_it - 1):
        with pytest.raises(InvalidInput) as caught:
            ask_rerank(body | {field: most}, "r")
        assert (caught.value.reason, caught.value.metadata["param"]) == ("UNSUPPORTED_FIELD", field)
        assert f"at most {most} bytes" in caught.value.hint
    with pytest.raises(InvalidInput):
        ask_rerank(body | {field: 0}, "r")
    decomposed = "\u0958"  # three bytes, and six in the form that a tokenizer reads
    with pytest.raises(InvalidInput):
        ask_rerank({"query": decomposed, "documents": [decomposed], field: 3}, "r")


def test_a_query_is_bounded_over_all_documents() -> None:
    share = MAX_REPEATED // MAX_INPUTS
    body = {"model": "m", "query": "é" * (share // 4), "instruction": "i" * (share // 2)}
    many = ["a"] * MAX_INPUTS
    asked = ask_rerank(body | {"documents": many}, "r")
    sizes = [one.ByteSize() for one in (asked.request, *asked.others)]
    assert MAX_REPEATED <= sum(sizes) < 2 * MAX_REPEATED
    with pytest.raises(InvalidInput) as caught:
        ask_rerank(body | {"documents": many, "query": "é" * (share // 4 + 1)}, "r")
    assert caught.value.metadata["param"] == "query"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (ask_embeddings, {"model": "m", "input": ["a", "b"]}),
        (ask_embeddings, {"model": "m", "input": ["a", "b"], "encoding_format": "base64"}),
        (ask_embed, {"model": "m", "input": ["a", "b"]}),
        (ask_rerank, {"model": "m", "query": "q", "documents": ["a", "b"]}),
    ],
)
def test_numbers_that_json_has_not_are_no_answer(ask: Any, body: dict[str, Any], number: float) -> None:
    with pytest.raises(Unavailable) as caught:
        told(ask(body, "r"), [0.5, 1.0], [number, 1.0])
    assert caught.value.reason == "BAD_VECTOR"


@pytest.mark.parametrize(
    "prompt",
    [
        inference.Prompt(pooled=inference.Pooled(query="q")),
        inference.Prompt(pooled=inference.Pooled(text="a"), stop=["x"]),
        inference.Prompt(pooled=inference.Pooled(text="a"), sampling=inference.Sampling(temperature=1)),
        inference.Prompt(pooled=inference.Pooled(text="a", query="q", dimensions=3)),
        inference.Prompt(pooled=inference.Pooled(tokens=inference.TokenIds(ids=[1]), query="q")),
        inference.Prompt(pooled=inference.Pooled(tokens=inference.TokenIds(ids=[1]), text="a")),
        inference.Prompt(pooled=inference.Pooled(text="a" * (4 << 20), query="q")),
    ],
)
def test_a_prompt_for_a_vector_has_an_input_and_nothing_else(prompt: inference.Prompt) -> None:
    with pytest.raises(InvalidInput):
        validate_request(inference.GenerateRequest(envelope=inference.Envelope(clear=prompt)))
