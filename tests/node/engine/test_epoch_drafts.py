"""Answers with drafts are those without, whatever is guessed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from small_models import tiny
from stagering import (
    CHUNK,
    PATIENCE_SECONDS,
    SEED,
    Prompts,
    Ring,
    combinations,
    compute_thread,
    config_of,
    expected,
    kv_bits_of,
    made_stages,
    prompt_of,
    setting,
    stages_of,
)

from sealring.mesh.errors import InvalidInput
from sealring.node.engine import Grammars, RowParameters, load_stage, params
from sealring.node.engine.drafts import Drafter, Guesses, Lookup, ModelAtHead
from sealring.node.engine.staging import Stage, build_skeleton, random_stage
from sealring.node.engine.text import as_json, load_tokenizer
from sealring.v1 import control_pb2 as control

TOKENS = 14
PARAMETERS = {
    "greedy": RowParameters(),
    "drawn": RowParameters(temperature=1.0, top_p=0.9, seed=5),
    "told": RowParameters(temperature=0.7, top_k=20, seed=3, logprobs=2),
    "not before": RowParameters(masked_until=9, masked=tuple(range(0, 300, 2)), masked_always=(1, 3)),
    "penalties": RowParameters(
        temperature=0.8,
        seed=9,
        repetition_penalty=1.5,
        repetition_context_size=6,
        frequency_penalty=0.5,
        logprobs=0,
    ),
}


class Gateway:
    """Steps one row as a gateway would, one step after the other; first row 1."""

    def __init__(self, ring: Ring) -> None:
        self._ring, self._number = ring, 0
        self.follow(1)

    def follow(self, row: int) -> None:
        """From now on it is this row that may have drafts."""
        self._row, self._prompt = row, len(self._ring.prompts.prompt(row))
        self.answer = self._ring.prompts.answers[row]

    def step(self, *changes: control.Change, **work: object) -> None:
        self.announce(*changes, **work)
        self._ring.wait_for(self._number)

    def announce(self, *changes: control.Change, **work: object) -> None:
        self._number += 1
        self._ring.announce(control.Step(number=self._number, changes=changes, **work))  # type: ignore[arg-type]

    def prefill(self, row: int = 1) -> None:
        record, prompt = len(self._ring.prompts.parameters(row)), len(self._ring.prompts.prompt(row))
        chunk = control.Chunk(row=row, end=prompt, prompt_tokens=prompt, params_bytes=record)
        self.step(prefill=control.Prefill(chunks=[chunk]))

    def decode(
        self,
        *changes: control.Change,
        drafts: int = 0,
        runs: int = 1,
        at_once: int = 1,
        source: control.DraftSource.ValueType = control.DRAFT_SOURCE_LOOKUP,
        asks: bool = False,
    ) -> None:
        """Announces `runs` steps, at most `at_once` before one is back; ends when one of them brings fewer
        tokens than it computes, or when the head says that what is guessed behind it is wrong."""
        before, first = len(self.answer), self._number + 1
        for number in range(runs + at_once):
            if number >= at_once:
                done = number - at_once
                self._ring.wait_for(first + done)
                few = len(self.answer) < before + (done + 1) * (1 + drafts)
                if few or first + done in self._ring.prompts.refuted:
                    return
            if number < runs:
                decode = control.Decode(lane=0, drafts=drafts, source=source, asks=asks)
                self.announce(*(() if number else changes), decode=decode)

    def settle(self) -> control.Change:
        tokens = self._prompt + len(self.answer) - 1
        return control.Change(settle=control.Settle(row=self._row, tokens=tokens))


def source_of(model: Drafter | None) -> control.DraftSource.ValueType:
    return control.DRAFT_SOURCE_LOOKUP if model is None else control.DRAFT_SOURCE_MODEL


def drafted(drafts: int) -> control.Decode:
    """A step with drafts that the head has looked up."""
    return control.Decode(drafts=drafts, source=control.DRAFT_SOURCE_LOOKUP)


ADMIT = control.Change(admit=control.Admit(row=1, lane=0))


Guess = Callable[[Sequence[int], int], list[int]]
"""A source of drafts: of the answer so far and the number of drafts, what comes next."""


def by_chance(coming: list[int], right: float, words: int) -> Guess:
    """Drafts of an answer that is known; each is right with this probability."""
    choices = random.Random(2)

    def guess(answer: Sequence[int], count: int) -> list[int]:
        found = coming[len(answer) :][:count]
        found += [0] * (count - len(found))
        return [token if choices.random() < right else (token + 1) % words for token in found]

    return guess


def looked_up(prompt: Sequence[int], predicted: Sequence[int] = ()) -> Guess:
    """Drafts as a head looks them up, in prompt and answer, and in a prediction."""
    lookup, heard = Lookup(np.array(prompt, np.uint32), predicted), 0

    def guess(answer: Sequence[int], count: int) -> list[int]:
        nonlocal heard
        for token in answer[heard:]:
            lookup.heard(token)
        heard = len(answer)
        return lookup.drafts(answer[-1], count)

    return guess


def prompt_for(stages: list[Stage], seed: int = 1) -> list[int]:
    """A prompt of a chunk, some of whose tokens come twice."""
    chance, words = random.Random(seed), stages[-1].spec.hands_on[0].tail[0]
    return [chance.randrange(words) for _ in range(CHUNK - 1)]


def answered(
    stages: list[Stage],
    row: RowParameters,
    guess: Guess | None = None,
    *,
    drafter: Drafter | None = None,
    grammars: Grammars | None = None,
    seed: int = 1,
) -> Prompts:
    """An answer by chains of steps with drafts, and steps without, in an order that `seed` chooses; without
    drafts if there is neither a `guess` nor a draft model."""
    size = len(stages)
    prompts = Prompts({1: (prompt_for(stages, seed), row)})
    ring = Ring(stages, prompts, drafter=drafter, grammars=grammars)
    gateway, choices = Gateway(ring), random.Random(1 + seed)

    def drafts(last: int, count: int) -> list[int]:
        assert guess is not None
        assert last == gateway.answer[-1]
        return guess(gateway.answer, count)

    prompts.guess = drafts
    try:
        gateway.prefill()
        gateway.decode(ADMIT, asks=drafter is not None)
        settling: list[control.Change] = []
        while len(gateway.answer) < TOKENS:
            many = choices.choice([0, 1, 3, 3]) if guess is not None or drafter is not None else 0
            runs = choices.choice([1, 2, 3, 4]) if many else 1
            source, at_once = source_of(drafter), min(runs, size)
            asks = drafter is not None
            gateway.decode(*settling, drafts=many, runs=runs, at_once=at_once, source=source, asks=asks)
            settling = [gateway.settle()] if many else []
    finally:
        ring.close()
    assert not ring.faults
    return prompts


CUT = [
    pytest.param("llama", 3, name, marks=[pytest.mark.sweep] * (name not in ("greedy", "not before")))
    for name in PARAMETERS
]
"""Models whose caches are cut; the other ways of sampling are tried with windows and states in every run."""

WINDOWS = [("gpt_oss", 2, "penalties"), ("gemma3n", 3, "told"), ("llama4", 2, "drawn")]
STATES = [("mamba2", 2, "drawn"), ("kimi_k3", 3, "penalties"), ("deepseek_v41", 2, "told")]


@pytest.mark.parametrize(
    ("family", "size", "name"),
    [*CUT, ("qwen3:8", 2, "drawn"), *WINDOWS, *STATES],
)
def test_answers_are_the_same(family: str, size: int, name: str) -> None:
    """Also where caches cannot be cut: windows that have slid, recurrent states, and both beside keys and
    values."""
    check_answers(stages_of(family, size), PARAMETERS[name])


def check_answers(
    stages: list[Stage], row: RowParameters, drafters: Mapping[str, Drafter] | None = None, seed: int = 1
) -> None:
    """The answer is the same with drafts of every source, right and wrong; `drafters` are draft models."""
    plain, prompt = answered(stages, row, seed=seed), prompt_for(stages, seed)
    wanted, words = plain.answers[1][:TOKENS], stages[-1].spec.hands_on[0].tail[0]
    edited = [*wanted[:4], 1, *wanted[5:]]
    guesses = {f"{right} right": by_chance(wanted, right, words) for right in (0.0, 0.7, 1.0)}
    guesses |= {"looked up": looked_up(prompt), "predicted": looked_up(prompt, edited)}
    found = {name: answered(stages, row, guess, seed=seed) for name, guess in guesses.items()}
    for name, drafter in (drafters or {}).items():
        found[name] = answered(stages, row, drafter=drafter, seed=seed)
        assert not drafter.failed
    assert {name: drafted.answers[1][:TOKENS] for name, drafted in found.items()} == dict.fromkeys(
        found, wanted
    )
    assert len(found["1.0 right"].steps) < len(plain.steps)
    for drafted in found.values():
        for one, other in zip(drafted.logprobs[1][:TOKENS], plain.logprobs[1], strict=False):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize(
    ("family", "size"),
    combinations(
        ["llama", "gpt_oss", "gemma3n", "llama4", "mamba2", "kimi_k3", "deepseek_v41"],
        [2, 3],
        always=[("gpt_oss", 2), ("kimi_k3", 3), ("llama4", 2)],
    ),
)
def test_a_row_with_drafts_gets_company_is_alone_again_and_leaves_with_drafts_open(
    family: str, size: int
) -> None:
    texts = {row: prompt_of(family, row, 9 - row) for row in (1, 2, 3)}
    prompts = Prompts({row: (text, RowParameters()) for row, text in texts.items()})
    coming = {row: expected(family, tuple(text), 40) for row, text in texts.items()}
    ring = Ring(stages_of(family, size), prompts)
    gateway, words, row = Gateway(ring), setting(family, "vocab_size"), 1

    def guess(last: int, count: int) -> list[int]:
        """The fourth draft is wrong."""
        found = coming[row][len(prompts.answers[row]) :][:count]
        return [token if place != 3 else (token + 1) % words for place, token in enumerate(found)]

    def admit(row: int) -> control.Change:
        return control.Change(admit=control.Admit(row=row, lane=0))

    def evict(row: int) -> control.Change:
        return control.Change(evict=control.Evict(row=row))

    prompts.guess = guess
    try:
        gateway.prefill()
        gateway.decode(ADMIT)
        gateway.decode(drafts=2, runs=2, at_once=2)
        gateway.prefill(2)
        gateway.decode(gateway.settle(), admit(2))
        gateway.decode()
        gateway.decode(evict(2), drafts=1, runs=3, at_once=2)
        gateway.decode(gateway.settle())
        gateway.prefill(3)
        gateway.decode(drafts=3, runs=2, at_once=2)
        row = 3
        gateway.follow(3)
        gateway.decode(evict(1), admit(3))
        gateway.decode(drafts=4, runs=2, at_once=2)
        gateway.decode(gateway.settle())
    finally:
        ring.close()
    assert ring.faults == []
    assert [len(prompts.answers[row]) for row in (1, 2, 3)] == [17, 3, 7]
    assert all(answer == coming[row][: len(answer)] for row, answer in prompts.answers.items())


@pytest.mark.parametrize("row", [RowParameters(seed=2, temperature=1.0), PARAMETERS["penalties"]])
def test_answers_that_are_held_to_a_grammar_are_the_same(row: RowParameters) -> None:
    """They end with the first whole number of digits, or go on within the bounds."""
    model = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
    edges = [0, 4, 9]
    loads = [
        compute_thread(rank).submit(load_stage, model, *edges[rank : rank + 2], kv_bits=0) for rank in (0, 1)
    ]
    stages = [load.result(PATIENCE_SECONDS) for load in loads]
    grammars = Grammars(lambda: load_tokenizer(model), stages[-1].spec.hands_on[0].tail[0])
    schema = {
        "type": "object",
        "properties": {
            "number": {"type": "integer"},
            "names": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["number", "names"],
    }
    held = dataclasses.replace(row, grammar=f"start: {as_json(schema)}")
    plain = answered(stages, held, grammars=grammars)
    for right in (0.0, 0.6, 1.0):
        guess = by_chance(plain.answers[1], right, stages[-1].spec.hands_on[0].tail[0])
        drafted = answered(stages, held, guess, grammars=grammars)
        assert drafted.answers[1][:TOKENS] == plain.answers[1][:TOKENS]
    matcher = grammars.compile(held.grammar).deep_copy()
    assert all(matcher.consume_token(token) for token in plain.answers[1])
    grammars.close()


class Several(Prompts):
    """Prompts that guess for each row by itself."""

    def __init__(
        self, rows: dict[int, tuple[list[int], RowParameters]], guess: Callable[[int], list[int]]
    ) -> None:
        super().__init__(rows)
        self._guess = guess

    def looked_up(self, row: int, last: int, count: int) -> list[int]:
        return (self._guess(row) + [0] * count)[:count]


def together(
    family: str,
    size: int,
    rows: dict[int, RowParameters],
    right: float | None = None,
    model: Drafter | None = None,
) -> Several:
    """Answers of rows in one lane, with drafts that are right with this probability, with those of a draft
    model, or without. The second row leaves in the middle."""
    words, chance = setting(family, "vocab_size"), random.Random(3)
    plain = {} if right is None else together(family, size, rows, None).answers

    def guess(row: int) -> list[int]:
        coming = plain[row][len(prompts.answers[row]) :]
        return [token if chance.random() < (right or 0) else (token + 1) % words for token in coming]

    prompts = Several({row: (prompt_of(family, row, 3 + row), each) for row, each in rows.items()}, guess)
    ring = Ring(stages_of(family, size), prompts, drafter=model)
    gateway, number, without = Gateway(ring), 0, right is None and model is None
    changes = [control.Change(admit=control.Admit(row=row, lane=0)) for row in rows]
    there, pattern = list(rows), [0, 1, 3, 2, 0, 3, 1]
    try:
        for row in rows:
            gateway.prefill(row)
        while min(len(prompts.answers[row]) for row in there) < TOKENS:
            drafts = 0 if without else pattern[number % len(pattern)]
            number += 1
            work = control.Decode(lane=0, drafts=drafts, source=source_of(model), asks=model is not None)
            gateway.step(*changes, decode=work)
            changes = []
            if 2 in there and len(prompts.answers[2]) >= TOKENS // 2:
                there.remove(2)
                changes = [control.Change(evict=control.Evict(row=2))]
            for row in there if drafts else ():
                gateway.follow(row)
                changes.insert(0, gateway.settle())
    finally:
        ring.close()
    assert ring.faults == []
    return prompts


MASKED = combinations(
    ["bailing_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next"],
    [2, 3],
    always=[("qwen3_next", 2), ("bailing_hybrid", 3)],
)


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("qwen3:8", 2), *MASKED])
def test_rows_in_one_lane_have_drafts_together(family: str, size: int) -> None:
    """Some are right in one row and wrong in another; rows with penalties stand beside others. Where there
    are states, the run is computed again, of each row as many tokens as count."""
    rows = {
        1: PARAMETERS["drawn"],
        2: PARAMETERS["penalties"],
        3: PARAMETERS["told"],
        4: PARAMETERS["penalties"],
    }
    plain = together(family, size, rows, None)
    for right in (0.0, 0.6, 1.0):
        drafted = together(family, size, rows, right)
        for row in rows:
            few = min(len(drafted.answers[row]), len(plain.answers[row]))
            assert few >= TOKENS // 2
            assert drafted.answers[row][:few] == plain.answers[row][:few]
        if right == 1.0:
            assert len(drafted.steps) < len(plain.steps)
        for one, other in zip(drafted.logprobs[3], plain.logprobs[3], strict=False):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), pytest.param("qwen3:8", 2, marks=pytest.mark.sweep)]
)
def test_rows_in_one_lane_have_a_draft_models_guesses_together(family: str, size: int) -> None:
    """Answers are those without; and the same model guesses nearly always right."""
    rows = {row: PARAMETERS[name] for row, name in enumerate(("drawn", "penalties", "told", "greedy"), 1)}
    plain = together(family, size, rows)
    same, other = (together(family, size, rows, model=drafter(family, SEED + one)) for one in (0, 1))
    for drafted in (same, other):
        for row in rows:
            few = min(len(drafted.answers[row]), len(plain.answers[row]))
            assert few >= TOKENS // 2
            assert drafted.answers[row][:few] == plain.answers[row][:few]
    assert not drafter(family, SEED).failed
    assert len(same.steps) < 0.6 * len(plain.steps)
    assert min(same.modelled[row].right() for row in rows) > 0.5


def test_rows_whose_caches_cannot_be_cut_have_no_drafts_together() -> None:
    prompts = Prompts({row: (prompt_of("gpt_oss", row, 5), RowParameters()) for row in (1, 2)})
    ring = Ring(stages_of("gpt_oss", 2), prompts)
    gateway = Gateway(ring)
    try:
        for row in (1, 2):
            gateway.prefill(row)
        admits = [control.Change(admit=control.Admit(row=row, lane=0)) for row in (1, 2)]
        gateway.announce(*admits, decode=drafted(1))
        ring.wait_for_fault()
    finally:
        ring.close()
    assert all(getattr(fault, "reason", "") == "BAD_STEP" for fault in ring.faults)


DATA = Path(__file__).parents[2] / "data"
ALL: dict[str, dict[str, Any]] = {
    key: config
    for file in ("archs.json", "archs-more.json")
    for key, config in json.loads((DATA / file).read_bytes()).items()
}
SERVED = [
    key
    for key, found in json.loads((DATA.parents[1] / "docs" / "models.json").read_bytes()).items()
    if found.get("drafts")
]
WINDOWED = {"sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"}
WINDOW = 8
"""Tokens: prompt and answer are longer, so every window slides."""


def narrow(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with windows of at most WINDOW tokens."""
    return {
        name: narrow(value)
        if isinstance(value, dict)
        else min(value, WINDOW)
        if name in WINDOWED and value
        else value
        for name, value in config.items()
    }


@pytest.mark.parametrize(("seed", "size", "name"), [(1, 2, "greedy"), (2, 3, "told"), (3, 2, "penalties")])
@pytest.mark.parametrize("key", SERVED)
@pytest.mark.sweep
def test_answers_of_every_architecture_are_the_same(key: str, seed: int, size: int, name: str) -> None:
    """By drafts of every source. The draft models are of the same architecture, so that their caches are of
    every kind as well."""
    config = narrow(tiny(ALL[key], key))
    layers = len(build_skeleton(config).layers)
    stages = made_stages(config, layers, size, seed=seed)
    words = stages[-1].spec.hands_on[0].tail[0]
    drafters = {
        name: draft_model(config, layers, words, of)
        for name, of in (("the same model", seed), ("another model", seed + 1))
    }
    check_answers(stages, PARAMETERS[name], drafters, seed)
    same = answered(stages, PARAMETERS[name], drafter=drafters["the same model"], seed=seed)
    assert same.modelled[1].right() > 0.9


@pytest.mark.parametrize("key", SERVED)
@pytest.mark.sweep
def test_two_rows_of_every_architecture_have_the_guesses_together_that_each_has_alone(key: str) -> None:
    config = narrow(tiny(ALL[key], key))
    layers = len(build_skeleton(config).layers)
    words = made_stages(config, layers, 1, seed=1)[-1].spec.hands_on[0].tail[0]
    model = draft_model(config, layers, words, 1)

    def guessed(*, together: bool) -> list[list[int]]:
        desks, chance = ModelAtHead(model), random.Random(1)
        rows = {
            number: Guesses(np.array([chance.randrange(words) for _ in range(length)], np.uint32))
            for number, length in ((1, 5), (2, 9))
        }
        for number, guesses in rows.items():
            desks.follow(number, guesses, lambda: params.encode(RowParameters()))
            while desks.work(1.0):
                pass
        if together:
            desks.in_one_lane([1, 2])
            desks.guess([1, 2], 4)
        found = [desks.taken(number, guesses.known, 4, lambda: True) for number, guesses in rows.items()]
        desks.drop()
        return found

    alone, both = (
        compute_thread(0).submit(partial(guessed, together=one)).result(PATIENCE_SECONDS)
        for one in (False, True)
    )
    assert both == alone
    assert not model.failed


@pytest.mark.parametrize("name", ["greedy", "told"])
def test_lengths_of_records_do_not_depend_on_what_was_guessed(name: str) -> None:
    """Neither on what was right: steps alone set them, which a gateway announces before it knows. A step with
    drafts has records of the length that as many steps without have together."""
    stages = stages_of("llama", 3)
    words, plain = setting("llama", "vocab_size"), answered(stages, PARAMETERS[name])
    seen = []
    for right in (0.0, 0.5, 1.0, None):
        prompts = Prompts({1: (prompt_for(stages), PARAMETERS[name])})
        ring = Ring(stages, prompts, drafter=drafter("llama") if right is None else None)
        gateway, guess = Gateway(ring), by_chance(plain.answers[1], right or 0.0, words)
        prompts.guess = lambda last, count, guess=guess, prompts=prompts: guess(prompts.answers[1], count)
        try:
            gateway.prefill()
            gateway.decode(ADMIT)
            for drafts in (1, 3, 2):
                settling = [gateway.settle()] if drafts > 1 else []
                source = control.DRAFT_SOURCE_MODEL if right is None else control.DRAFT_SOURCE_LOOKUP
                decode = control.Decode(lane=0, drafts=drafts, source=source)
                gateway.step(*settling, decode=decode)
        finally:
            ring.close()
        seen.append(
            [[(one.kind, one.step, one.shape, one.length) for one in link.seen] for link in ring.links]
        )
    assert all(one == seen[0] for one in seen)
    for records in seen[0]:
        *_, alone, two, four, three = [length for *_, length in records]
        assert (two, four, three) == (2 * alone, 4 * alone, 3 * alone)


def faults_of(stages: list[Stage], work: control.Decode, *, speculate: bool = True) -> list[BaseException]:
    """What the members say of a step that comes once a row decodes."""
    ring = Ring(stages, Prompts({1: ([1, 2, 3], RowParameters())}), speculate=speculate)
    try:
        gateway = Gateway(ring)
        gateway.prefill()
        gateway.decode(ADMIT)
        ring.announce(control.Step(number=3, decode=work))
    finally:
        ring.close()
    return ring.faults


@pytest.mark.parametrize("work", [drafted(1), control.Decode(asks=True)])
def test_without_speculate_every_member_refuses_drafts_and_to_say_what_repeats(work: control.Decode) -> None:
    """Also where a gateway has no business to do so: no member trusts it."""
    faults = faults_of(stages_of("llama", 3), work, speculate=False)
    assert len(faults) == 3
    assert {fault.reason for fault in faults if isinstance(fault, InvalidInput)} == {"BAD_STEP"}


@pytest.mark.parametrize("work", [drafted(1), control.Decode(asks=True)])
def test_members_that_cannot_take_drafts_back_refuse_them(
    work: control.Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They said so when they attached; a wrong draft would stay in their caches."""
    monkeypatch.setattr(ArraysCache, "__module__", "elsewhere")  # a kind that nobody knows
    faults = faults_of(stages_of("mamba2", 2), work)
    assert len(faults) == 2
    assert all("be taken back" in str(fault) for fault in faults if isinstance(fault, InvalidInput))
    assert {getattr(fault, "reason", "") for fault in faults} == {"BAD_STEP"}


def test_a_gateway_that_goes_back_too_far_ends_the_epoch() -> None:
    """More runs are under way than members keep what takes them back for."""
    prompts = Prompts({1: ([1, 2, 3], RowParameters())})
    prompts.guess = lambda last, count: [(last + 1) % 300] * count
    ring = Ring(stages_of("gpt_oss", 2), prompts)
    gateway = Gateway(ring)
    try:
        gateway.prefill()
        gateway.decode(ADMIT)
        gateway.decode(drafts=1, runs=3, at_once=3)
        with pytest.raises(AssertionError):
            gateway.decode(gateway.settle())
    finally:
        ring.close()
    assert any("further than this member can" in str(fault) for fault in ring.faults)


@pytest.mark.parametrize(("family", "size"), [("gpt_oss", 2), ("mamba2", 2), ("kimi_k3", 3)])
@pytest.mark.parametrize("tokens", [4, 6, 8])
def test_an_answer_that_ended_within_a_run_is_kept_as_it_was_at_its_end(
    family: str, size: int, tokens: int
) -> None:
    """Runs behind its end are under way, and are taken back before it is kept."""
    prompt = prompt_of(family, 0, 7)
    said = expected(family, (*prompt,), 16)
    follow = prompt + said[:tokens] + prompt_of(family, 1, 3)
    prompts = Prompts({1: (prompt, RowParameters()), 2: (follow, RowParameters())})
    ring = Ring(stages_of(family, size), prompts)
    gateway = Gateway(ring)
    prompts.guess = lambda last, count: said[len(gateway.answer) :][:count]
    held = len(prompt) + tokens - 1
    try:
        gateway.prefill()
        gateway.decode(ADMIT)
        gateway.announce(decode=drafted(3))
        gateway.announce(decode=drafted(2))
        ring.wait_for(3 if tokens <= 6 else 4)  # that brings the last token of the answer
        prompts.over.add(1)
        chunk = control.Chunk(
            row=2,
            start=held,
            end=len(follow),
            prompt_tokens=len(follow),
            params_bytes=len(prompts.parameters(2)),
            prefix=1,
        )
        gateway.step(
            control.Change(settle=control.Settle(row=1, tokens=held)),
            control.Change(keep=control.Keep(prefix=1, row=1, tokens=held)),
            control.Change(evict=control.Evict(row=1)),
            prefill=control.Prefill(chunks=[chunk]),
        )
        gateway.follow(2)
        gateway.decode(control.Change(admit=control.Admit(row=2, lane=0)))
        for _ in range(3):
            gateway.decode()
    finally:
        ring.close()
    assert ring.faults == []
    assert prompts.answers[1][:tokens] == said[:tokens]
    assert prompts.reused == [held]
    assert prompts.answers[2] == expected(family, (*follow,), 5)


def test_a_gateway_that_miscounts_ends_the_epoch() -> None:
    prompts = Prompts({1: ([1, 2, 3], RowParameters())})
    ring = Ring(stages_of("llama", 2), prompts)
    gateway = Gateway(ring)
    prompts.guess = lambda last, count: [(last + 1) % 300] * count
    try:
        gateway.prefill()
        gateway.decode(ADMIT)
        before = len(gateway.answer)
        gateway.decode(drafts=3)
        right = len(gateway.answer) - before
        wrong = gateway.settle()
        wrong.settle.tokens += -1 if right == 4 else 1
        with pytest.raises(AssertionError):
            gateway.decode(wrong)
    finally:
        ring.close()
    assert isinstance(ring.faults[0], InvalidInput)
    assert ring.faults[0].reason == "BAD_STEP"


DRAFT_ROOM = 1 << 12


@cache
def drafter(family: str, seed: int = SEED) -> Drafter:
    """A whole model at the head: of the ring's own seed it guesses what the ring will say."""
    layers, bits = setting(family, "num_hidden_layers"), kv_bits_of(family)[1]
    return draft_model(config_of(family), layers, setting(family, "vocab_size"), seed, bits)


def draft_model(config: dict[str, Any], layers: int, words: int, seed: int, kv_bits: int = 0) -> Drafter:
    """A whole model of random weights that guesses."""

    def make() -> Drafter:
        stage = random_stage(config, 0, layers, seed=seed, kv_bits=kv_bits)
        times = [control.StepTime(rows=1, tokens=tokens, microseconds=100 * tokens) for tokens in (1, 64)]
        return Drafter(stage, words, DRAFT_ROOM, times)

    return compute_thread(0).submit(make).result(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("family", "size", "name"),
    [
        *(
            pytest.param("llama", 3, name, marks=[pytest.mark.sweep] * (name != "greedy"))
            for name in PARAMETERS
        ),
        ("qwen3:8", 2, "drawn"),
        ("gemma3_text", 2, "penalties"),
        ("mamba2", 2, "drawn"),
        pytest.param("kimi_k3", 2, "greedy", marks=pytest.mark.sweep),
    ],
)
def test_answers_are_the_same_with_a_draft_model(family: str, size: int, name: str) -> None:
    """One that is right nearly always, since it is the same model, and one that is hardly ever. Also where
    its own caches cannot be cut behind a wrong guess."""
    row, stages = PARAMETERS[name], stages_of(family, size)
    plain = answered(stages, row)
    same, other = (answered(stages, row, drafter=drafter(family, seed)) for seed in (SEED, SEED + 1))
    for prompts in (same, other):
        assert prompts.answers[1][:TOKENS] == plain.answers[1][:TOKENS]
        assert not drafter(family, SEED).failed
    assert len(same.steps) < 0.75 * len(plain.steps)
    assert len(same.refuted) < len(other.refuted)
    assert same.modelled[1].right() > other.modelled[1].right()


@pytest.mark.parametrize("gone", [True, False])
def test_a_row_of_which_nothing_may_be_guessed_has_no_drafts_unless_it_is_gone(
    gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is right would tell the gateway what it is not to know. A row that a client has cancelled may be
    forgotten before its last steps, and ends no epoch."""
    prompts = Prompts({1: ([1, 2, 3], RowParameters())})
    monkeypatch.setattr(prompts, "source", lambda row, source: None)
    monkeypatch.setattr(prompts, "gone", lambda row: gone)
    ring = Ring(stages_of("llama", 2), prompts)
    try:
        gateway = Gateway(ring)
        gateway.prefill()
        gateway.decode(ADMIT)
        gateway.announce(decode=drafted(1))
        if gone:
            ring.wait_for(3)
        else:
            ring.wait_for_fault()
    finally:
        ring.close()
    assert [fault.reason for fault in ring.faults[:1] if isinstance(fault, InvalidInput)] == ["BAD_STEP"] * (
        not gone
    )


def test_a_head_without_a_draft_model_refuses_its_guesses() -> None:
    ring = Ring(stages_of("llama", 2), Prompts({1: ([1, 2, 3], RowParameters())}))
    try:
        gateway = Gateway(ring)
        gateway.prefill()
        gateway.decode(ADMIT)
        gateway.announce(decode=control.Decode(drafts=1, source=control.DRAFT_SOURCE_MODEL))
        ring.wait_for_fault()
    finally:
        ring.close()
    assert isinstance(ring.faults[0], InvalidInput)
    assert ring.faults[0].reason == "BAD_STEP"
