"""Answers are instances of their schemas, whatever they are and whoever comes and goes beside them."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from schedules import make_steps
from stagering import compute_thread, run_on

from sealring.mesh.errors import FailedPrecondition, InvalidInput
from sealring.node.engine import Grammars, RowParameters, load_stage, params, trial
from sealring.node.engine.grammar import Follower, Masks
from sealring.node.engine.staging import Stage
from sealring.node.engine.text import Delimiters, Tokenizer, grammar_of, load_tokenizer
from sealring.v1 import inference_pb2 as inference

MODEL = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
VOCABULARY, LONGEST, TOGETHER = 1536, 130, 8

Schema = dict[str, Any]


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer, VOCABULARY)


@cache
def stages(size: int) -> list[Stage]:
    edges = [9 * rank // size for rank in range(size + 1)]
    made = [
        compute_thread(rank).submit(load_stage, MODEL, *edges[rank : rank + 2], kv_bits=0)
        for rank in range(size)
    ]
    return [stage.result(200) for stage in made]


def grammar_for(schema: Schema, form: Delimiters | None = None) -> str:
    prompt = inference.Prompt(text="x", schema=json.dumps(schema))
    return grammar_of(prompt, form or Delimiters(), dict, "")


def some_schema(choices: random.Random, levels: int = 2) -> Schema:
    """Any schema whose longest instance is not long."""
    kinds = ["string", "integer", "boolean", "enum", "pattern", "number", "null"]
    kind = choices.choice(kinds + ["object", "array", "anyOf"] * 2 * bool(levels))
    if kind == "object":
        names = choices.sample(["a", "name", "x y", 'q"', "ü", "nested"], choices.randint(0, 3))
        wanted = [name for name in names if choices.random() < 0.7]
        inner = {name: some_schema(choices, levels - 1) for name in names}
        return {"type": kind, "properties": inner, "required": wanted, "additionalProperties": False}
    if kind == "array":
        least = choices.randint(0, 1)
        items = some_schema(choices, levels - 1)
        return {"type": kind, "items": items, "minItems": least, "maxItems": least + 1}
    if kind == "anyOf":
        return {"anyOf": [some_schema(choices, levels - 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": choices.sample([1, 2.5, "one", "", None, True, "\n", [1], {"a": 1}], 3)}
    if kind == "pattern":
        return {"type": "string", "pattern": choices.choice(["^[a-c]{1,3}$", "^(no|yes)$", r"^\d{2}-\d{2}$"])}
    if kind == "string":
        return {"type": kind, "minLength": choices.randint(0, 2), "maxLength": choices.randint(2, 5)}
    if kind in ("integer", "number"):
        low = choices.randint(-50, 50)
        whole = {"type": "integer", "minimum": low, "maximum": low + choices.randint(0, 500)}
        return whole if kind == "integer" else {"enum": [0.5, -1.25, 3]}
    return {"type": kind}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 100))]
)
def test_answers_are_instances_of_their_schemas(seed: int) -> None:
    """Six random schemas a seed, 600 in all, and two rows without one, which get what they always get."""
    choices = random.Random(seed)
    schemas = {row: some_schema(choices) for row in range(1, TOGETHER + 1)}
    free = choices.sample(sorted(schemas), 2)
    rows, lengths, sizes = {}, {}, {}
    for row, schema in schemas.items():
        grammar = "" if row in free else grammar_for({**schema, "x-guidance": {"whitespace_flexible": True}})
        temperature = choices.choice([0.0, 0.7, 1.5])
        sampled = RowParameters(
            temperature=temperature, top_k=choices.choice([0, 40]), seed=row, grammar=grammar
        )
        prompt = [choices.randrange(6, VOCABULARY) for _ in range(choices.randint(1, 12))]
        rows[row], lengths[row] = (prompt, sampled), (len(prompt), 8 if row in free else LONGEST)
        sizes[row] = len(params.encode(sampled))
    size = 1 + seed % 2
    answers = run_on(stages(size), make_steps(choices, lengths, 1, sizes=sizes), rows, grammars()).answers
    (end,) = tokenizer().end_tokens
    for row in set(schemas) - set(free):
        grammars().try_out(rows[row][1].grammar)
        follower = Follower(grammars().compile(rows[row][1].grammar), tokenizer().end_tokens)
        answer = answers[row][: answers[row].index(end) + 1]
        assert all(map(follower.allows, answer))
        text = b"".join(map(tokenizer().spelling, answer[:-1])).decode()
        jsonschema.validate(json.loads(text), schemas[row])
    for row in free:
        steps = make_steps(random.Random(row), {1: lengths[row]}, 1)
        assert run_on(stages(1), steps, {1: rows[row]}).answers[1][:8] == answers[row][:8]


def ids(text: str) -> list[int]:
    return tokenizer().encode_markers(text)


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def allowed(grammar: str, answer: str, end: bool = True) -> bool:
    grammars().try_out(grammar)
    follower = Follower(grammars().compile(grammar), tokenizer().end_tokens)
    tokens = [*ids(answer), *(list(tokenizer().end_tokens) if end else [])]
    return all(map(follower.allows, tokens))


@pytest.mark.parametrize(
    ("form", "held", "let_pass"),
    [
        ("date", "2021-02-30", "2021-02-29"),
        ("time", "25:00:00Z", "11:59:60Z"),
        ("hostname", "a" * 64, "a." * 140 + "com"),
    ],
)
def test_formats_are_held_as_far_as_the_docs_say(form: str, held: str, let_pass: str) -> None:
    grammar = grammar_for({"type": "string", "format": form})
    assert not allowed(grammar, json.dumps(held))
    assert allowed(grammar, json.dumps(let_pass))


def test_an_answer_goes_on_after_a_fault_where_it_was() -> None:
    """The matcher begins behind the tokens of the earlier epoch."""
    made = grammars()
    begun = ids('{"n": 1')
    matcher = made.start(grammar_for(NUMBER), begun)
    logits = mx.zeros((1, VOCABULARY))
    (left,) = np.array(Masks([(0, matcher)], 1)(logits))
    assert {tokenizer().spelling(token)[:1] for token in np.flatnonzero(np.isfinite(left))} == {
        *(b"%d" % digit for digit in range(10)),
        b"}",
    }


def test_masks_leave_other_rows_alone_and_follow_their_own() -> None:
    made, (end,) = grammars(), tokenizer().end_tokens
    matchers = [made.start(grammar_for({"const": word}), ()) for word in ("a", "b")]
    masks = Masks([(0, matchers[0]), (2, matchers[1])], 3)
    random_ones = mx.random.normal((3, VOCABULARY))
    for said in (['"', '"'], ["a", "b"], ['"', '"'], [None, None], [None, None]):
        masked = masks(random_ones)
        assert mx.array_equal(masked[1], random_ones[1])
        tokens = mx.argmax(masked, axis=-1)
        expected = [end if word is None else ids(word)[0] for word in said]
        if said[0] is not None and len(said[0]) == 1:  # a longer token may hold several
            tokens = mx.array([expected[0], 0, expected[1]], mx.uint32)
            assert np.isfinite(np.array(masked)[[0, 2], expected]).all()
        assert np.array(tokens)[[0, 2]].tolist() == expected
        masks.sampled(tokens)


def test_a_matcher_that_fails_lets_the_head_end_the_row() -> None:
    matcher = grammars().start(grammar_for(NUMBER), ids("no object"))
    (left,) = np.array(Masks([(0, matcher)], 1)(mx.zeros((1, VOCABULARY))))
    assert set(np.flatnonzero(np.isfinite(left))) == set(tokenizer().end_tokens)
    assert not allowed(grammar_for(NUMBER), "")
    assert not allowed(grammar_for(NUMBER), '{"n": 1')
    assert not allowed(grammar_for(NUMBER), "text", end=False)
    broken = grammars().start("start: %json {", ())
    assert np.isfinite(np.array(Masks([(0, broken)], 1)(mx.zeros((1, VOCABULARY))))).all()


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"enum": []}, ""),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ],
)
def test_what_cannot_be_compiled_is_refused(schema: Schema, why: str) -> None:
    with pytest.raises(InvalidInput, match="schema cannot be used") as caught:
        grammars().compile(grammar_for(schema))
    assert caught.value.reason == "BAD_GRAMMAR"
    assert why in str(caught.value)


def test_what_is_too_much_in_the_middle_ends_the_row_there() -> None:
    """A pattern of few characters may take more states than anybody has: then only the end is left."""
    made = grammars().compile(grammar_for({"type": "string", "pattern": "^.*(a|b).{300}(c|d).{300}$"}))
    follower, matcher = Follower(made, frozenset()), made.deep_copy()
    tokens = ids('"' + "abcd" * 150)
    said = 0
    while not matcher.is_error():
        matcher.consume_token(tokens[said])
        matcher.compute_bitmask()
        assert matcher.is_error() or follower.allows(tokens[said])
        said += 1
    mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert set(np.flatnonzero(mask)) == set(tokenizer().end_tokens)
    assert not follower.allows(next(iter(tokenizer().end_tokens)))


def test_grammars_are_compiled_once_and_kept_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(tokenizer, VOCABULARY)
    first = made.compile(grammar_for({"const": 0}))
    for number in range(3):
        assert made.compile(grammar_for({"const": 0})) is first
        made.compile(grammar_for({"const": number}))
    monkeypatch.setattr("sealring.node.engine.grammar._KEPT_BYTES", 2000)
    made.compile(grammar_for({"const": "x" * 4000}))
    assert made.compile(grammar_for({"const": 0})) is not first


COSTLY = [
    {"type": "integer", "multipleOf": 100_000_007},
    {
        "type": "object",
        "properties": {f"p{n}": {"type": "integer", "multipleOf": 9973 - n} for n in range(128)},
    },
    {"type": "object", "properties": {f"p{n}": {} for n in range(4900)}},
]


@pytest.mark.parametrize("schema", COSTLY, ids=["a large multiple", "many multiples", "many members"])
def test_what_costs_too_much_is_refused_without_being_compiled_here(schema: Schema) -> None:
    """However it got past the checks of schemas; and the next one is tried as if nothing had been."""
    made = grammars()
    with pytest.raises(InvalidInput) as caught:
        made.try_out(grammar_for(schema))
    assert caught.value.reason == "BAD_GRAMMAR"
    made.try_out(grammar_for(NUMBER))


def test_a_one_of_that_overlaps_is_refused_with_what_to_write_instead() -> None:
    schema = grammar_for({"oneOf": [{"type": "integer"}, {"type": "number"}]})
    for refuse in (grammars().try_out, grammars().compile):
        with pytest.raises(InvalidInput, match="oneOf") as caught:
            refuse(schema)
        assert "anyOf" in caught.value.hint
        assert "coerce" not in str(caught.value)


@pytest.mark.parametrize("schema", [{"not": {}}, {"type": "string", "pattern": "("}])
def test_a_trial_tells_why_a_schema_cannot_be_used(schema: Schema) -> None:
    said = set()
    for refuse in (grammars().try_out, grammars().compile):
        with pytest.raises(InvalidInput) as caught:
            refuse(grammar_for(schema))
        said.add(str(caught.value))
    assert len(said) == 1


def test_a_grammar_may_name_any_token_of_a_large_vocabulary() -> None:
    with contextlib.closing(trial.Trial()) as made:
        made.run("start: <[151657]> /[a-z]/ <[151658]> | <[1]>")
        with pytest.raises(InvalidInput):
            made.run("start: <[151657]> nowhere")


def test_a_trial_whose_process_is_gone_begins_another() -> None:
    before = set(psutil.Process().children())
    with contextlib.closing(trial.Trial()) as made:
        made.run(grammar_for(NUMBER))
        (child,) = set(psutil.Process().children()) - before
        child.kill()
        child.wait(200)
        made.run(grammar_for(NUMBER))
    assert set(psutil.Process().children()) <= before


def test_a_schema_that_no_process_could_try_is_not_called_costly() -> None:
    """In a process of its own, whose limit no thread of another test raises."""
    code = f"""
import resource
from sealring.mesh.errors import Unavailable
from sealring.node.engine import trial
made = trial.Trial()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
try:
    made.run({grammar_for(NUMBER)!r})
except Unavailable as error:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(bool(error.hint), made.run({grammar_for(NUMBER)!r}))
made.close()
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-2:] == ["True", "None"], found.stdout


def test_the_largest_schema_of_ordinary_use_is_not_too_much() -> None:
    members = {f"p{number}": {"type": "string"} for number in range(512)}
    grammars().try_out(grammar_for({"type": "object", "properties": members, "required": [*members]}))


def test_a_model_without_a_vocabulary_has_no_grammars() -> None:
    unreadable: Any = SimpleNamespace(vocabulary=lambda: None)
    made = Grammars(lambda: unreadable, VOCABULARY)
    made.prepare()
    for refuse in (made.try_out, made.compile):
        with pytest.raises(FailedPrecondition) as caught:
            refuse(grammar_for(NUMBER))
        assert caught.value.reason == "NO_GRAMMARS"


def test_what_a_grammar_leaves_no_choice_about_is_known_to_the_head() -> None:
    """Up to the first token at which the answer has one."""
    schema = {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    }
    follower = Follower(grammars().compile(grammar_for(schema)), frozenset({2}))
    assert follower.allows(tokenizer().encode_answer("{")[-1])
    forced = follower.forced()
    assert "".join(tokenizer().spelling(token).decode() for token in forced) == '"number":'
    for token in forced:
        assert follower.allows(token)
    assert follower.forced() == []
