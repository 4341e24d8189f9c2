"""Answers with an MTP head's guesses are those without, and the guesses are right where they can be."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mtpheads import save, save_reader
from patience import PATIENCE_SECONDS
from small_models import tiny
from stagering import CHUNK, Prompts, Ring, compute_thread, config_of
from tailgateway import PARAMETERS, Gateway, admit, company_leaves_prefixes_stay, evict

from sealring.node.engine import Grammars, RowParameters, caches, load_lazily, load_stage
from sealring.node.engine.caches import Cache
from sealring.node.engine.drafts import MtpDrafter
from sealring.node.engine.staging import Prefill, Stage
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.mtp_head import FORMATS, MtpHead
from sealring.node.engine.staging.skeleton import build_skeleton
from sealring.node.engine.text import load_tokenizer
from sealring.node.engine.warm_up import warm_up
from sealring.node.engine.weights import cut_stage, load_mtp_head
from sealring.v1 import control_pb2 as control

TOKENS = 16
DATA = Path(__file__).parents[2] / "data"
ALL: dict[str, dict[str, Any]] = {
    key: config
    for file in ("archs.json", "archs-more.json")
    for key, config in json.loads((DATA / file).read_bytes()).items()
}
ROOM = 1 << 12


class Made:
    def __init__(self, folder: Path, config: dict[str, Any], size: int, doubled: bool = False) -> None:
        """`doubled`: prompts are cut as late as they can be, answers as early."""
        layers = len(build_skeleton(config).layers)
        edges = [0, 1, layers] if doubled else [layers * rank // size for rank in range(size + 1)]

        def make(lo: int, hi: int) -> Stage:
            stage = load_stage(folder, lo, hi)
            warm_up(stage, 512)
            if doubled:
                model, read = load_lazily(folder)
                cut = (layers - 1, layers) if lo else (0, layers - 1)
                prefill = cut_stage(model, dissect(model, read["model_type"]), *cut, cut=Prefill)
                assert isinstance(prefill, Prefill)
                prefill.pair(stage)
            return stage

        def head() -> MtpDrafter:
            tied = (config.get("text_config") or config).get("tie_word_embeddings", False)
            found = load_mtp_head(folder, self.stages[-1].model, shares=tied)
            mx.eval(found.kept)
            return MtpDrafter(found, self.stages[-1], ROOM)

        made = [compute_thread(rank).submit(make, *edges[rank : rank + 2]) for rank in range(size)]
        self.stages = [stage.result(PATIENCE_SECONDS) for stage in made]
        self.drafter = compute_thread(size - 1).submit(head).result(PATIENCE_SECONDS)
        self.words = self.stages[-1].spec.hands_on[0].tail[0]


@cache
def made_of(family: str, size: int, kept: float | None = None, doubled: bool = False) -> Made:
    """A ring of a small model with a head, as `save` makes it with `kept`, for all tests."""
    config = tiny(config_of(family), family)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), config, kept=kept)
        return Made(Path(folder), config, size, doubled)


@pytest.fixture(autouse=True, scope="module")
def _free() -> Iterator[None]:
    yield
    made_of.cache_clear()
    reader_of.cache_clear()


def answered(made: Made, row: RowParameters, *, mtp: bool) -> Prompts:
    """An answer by steps with and without guesses, and with and without drafts of them."""
    chance = random.Random(1)
    prompt = [chance.randrange(made.words) for _ in range(2 * CHUNK + 3)]
    given = dataclasses.replace(row, prompt=tuple(prompt)) if mtp else row
    prompts = Prompts({1: (prompt, given)})
    ring = Ring(made.stages, prompts, tail_drafter=made.drafter if mtp else None)
    gateway, choices = Gateway(ring), random.Random(2)
    try:
        gateway.prefill()
        changes, guessed = [admit()], 0
        while len(prompts.answers[1]) < TOKENS:
            drafts = choices.choice([0, guessed]) if mtp else 0
            guessed = choices.choice([0, 1, 3, 3]) * mtp
            gateway.decode(*changes, drafts=drafts, guesses=guessed)
            changes = [gateway.settle()] if drafts else []
    finally:
        ring.close()
    assert not ring.faults
    return prompts


EVERY_RUN = {("qwen3_next", 2): ("greedy", "not before", "penalties"), ("deepseek_v3", 3): ("drawn", "told")}
"""Each way of sampling once; the tail samples what any model computes."""


@pytest.mark.parametrize(
    ("family", "size", "name"),
    [
        pytest.param(*shape, name, marks=[pytest.mark.sweep] * (name not in names))
        for shape, names in EVERY_RUN.items()
        for name in PARAMETERS
    ],
)
def test_answers_are_the_same(family: str, size: int, name: str) -> None:
    """With a head that is hardly ever right, and with one that often is."""
    row = PARAMETERS[name]
    rates = []
    for kept in (None, 0.03):
        made = made_of(family, size, kept)
        plain, drafted = answered(made, row, mtp=False), answered(made, row, mtp=True)
        assert drafted.answers[1][:TOKENS] == plain.answers[1][:TOKENS]
        assert not made.drafter.failed
        rates.append(drafted.modelled[1].right())
        steps = len(plain.steps) - len(drafted.steps)
    assert rates[1] > 0.3 > rates[0]
    assert steps > 3


def test_a_head_has_seen_prompts_that_the_tail_computes_with_fewer_layers() -> None:
    plain = answered(made_of("qwen3_next", 2, 0.03), RowParameters(), mtp=False)
    made = made_of("qwen3_next", 2, 0.03, doubled=True)
    assert isinstance(made.stages[1].prefill, Prefill)
    drafted = answered(made, RowParameters(), mtp=True)
    assert drafted.answers[1][:TOKENS] == plain.answers[1][:TOKENS]
    assert not made.drafter.failed
    assert drafted.modelled[1].right() > 0.3


@pytest.mark.parametrize(("family", "size"), [("glm4_moe", 3), ("qwen3_next", 2)])
def test_rows_get_company_leave_begin_with_prefixes_and_outlive_an_epoch(family: str, size: int) -> None:
    """The head goes on with what it has of a row, and with what it kept of the prefix."""
    made = made_of(family, size, 0.03)
    company_leaves_prefixes_stay(made.stages, made.drafter, made.words)


@cache
def reader_of(size: int) -> Made:
    """A ring whose head is right if it has read what the model has read."""
    config = tiny(config_of("glm4_moe"), "glm4_moe")
    with tempfile.TemporaryDirectory() as folder:
        save_reader(Path(folder), config)
        return Made(Path(folder), config, size)


def guesses_of(made: Made, name: str, *, told: bool) -> tuple[list[int], list[int]]:
    """The tokens behind the second ones of four answers, and what was guessed of each; the head is `told`
    the prompts or not."""
    said, guessed = list[int](), list[int]()
    for seed in range(4):
        chance = random.Random(seed)
        text = [chance.randrange(made.words) for _ in range(2 * CHUNK + 3)]
        row = dataclasses.replace(PARAMETERS[name], prompt=tuple(text) * told)
        prompts = Prompts({1: (text, row)})
        ring = Ring(made.stages, prompts, tail_drafter=made.drafter)
        gateway, offered = Gateway(ring), prompts.modelled[1]
        try:
            gateway.prefill()
            gateway.decode(admit(), guesses=1)
            for _ in range(12):
                guessed += offered.taken(offered.known, 1)
                gateway.decode(guesses=1)
        finally:
            ring.close()
        assert not ring.faults
        said += prompts.answers[1][2:]
    return said, guessed


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", ["greedy", "drawn"])
def test_a_head_is_told_prompts_past_members_in_between(name: str, size: int) -> None:
    """Its guesses are those on a ring of two, and right about what follows from the prompt."""
    found, alone = guesses_of(reader_of(size), name, told=True), guesses_of(reader_of(size), name, told=False)
    assert found == guesses_of(reader_of(2), name, told=True)
    assert found[0] == alone[0]
    right, without = (sum(map(int.__eq__, *both)) for both in (found, alone))
    assert right >= 45 > 36 > without


def answered_together(
    made: Made, rows: dict[int, RowParameters], *, mtp: bool, grammars: Grammars | None = None
) -> Prompts:
    """Answers of the rows of a lane, by steps with and without guesses, and with and without drafts of them.
    Row 2 leaves, perhaps with drafts that are not settled, and the last row joins when the first has TOKENS.
    It begins with the first row's prompt, which is kept."""
    chance, last = random.Random(1), max(rows)
    texts = {row: [chance.randrange(made.words) for _ in range(CHUNK + 3 * row)] for row in rows}
    texts[last] = [*texts[1], *texts[last][:3]]
    keep = control.Change(keep=control.Keep(prefix=1, row=1, tokens=len(texts[1])))
    prompts = Prompts(
        {
            row: (texts[row], dataclasses.replace(one, prompt=tuple(texts[row])) if mtp else one)
            for row, one in rows.items()
        }
    )
    ring = Ring(made.stages, prompts, tail_drafter=made.drafter if mtp else None, grammars=grammars)
    gateway, choices, there = Gateway(ring), random.Random(2), [row for row in rows if row != last]
    try:
        for row in there:
            gateway.prefill(row)
        changes, guessed = [keep, *(admit(row) for row in there)], 0
        while min(len(prompts.answers[row]) for row in there) < 2 * TOKENS:
            drafts = choices.choice([0, guessed, guessed]) if mtp else 0
            guessed = choices.choice([0, 1, 2, 3, 3]) * mtp
            gateway.decode(*changes, drafts=drafts, guesses=guessed)
            changes = [gateway.settle(row) for row in there] if drafts else []
            if last not in there and len(prompts.answers[1]) >= TOKENS:
                gateway.prefill(last, prefix=1, start=len(texts[1]))
                there = [row for row in there if row != 2] + [last]
                changes = [*(one for one in changes if one.settle.row != 2), evict(2), admit(last)]
                guessed = 0
    finally:
        ring.close()
    assert not ring.faults
    return prompts


@pytest.mark.parametrize(("family", "size"), [("glm4_moe", 2), ("deepseek_v3", 3), ("qwen3_next", 2)])
def test_answers_of_rows_in_one_lane_are_the_same(family: str, size: int) -> None:
    """Guesses are right in one row and wrong in another; rows with penalties stand beside others, and one
    leaves and one joins while the head holds them in one batch."""
    rows = dict(enumerate([*PARAMETERS.values(), RowParameters(), RowParameters(logprobs=1)], 1))
    rates = []
    for kept in (None, 0.03):
        made = made_of(family, size, kept)
        plain, drafted = (answered_together(made, rows, mtp=mtp) for mtp in (False, True))
        for row in rows:
            few = min(len(plain.answers[row]), len(drafted.answers[row]))
            assert few >= TOKENS // 2
            assert drafted.answers[row][:few] == plain.answers[row][:few]
            for one, other in zip(drafted.logprobs[row], plain.logprobs[row], strict=False):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert not made.drafter.failed
        assert made.drafter.facts.rows > 1
        rates.append(min(drafted.modelled[row].right() for row in rows))
        steps = len(plain.steps) - len(drafted.steps)
    assert rates[1] > 0.3 > rates[0]
    assert steps > 6


def test_answers_in_one_lane_are_the_same_where_one_is_held_to_a_grammar() -> None:
    """The head guesses without the grammar's masks, so its guesses of that row are wrong more often."""
    made = made_of("glm4_moe", 2, 0.03)
    folder = Path(__file__).parents[3] / "examples" / "demo_model" / "model"
    grammars = Grammars(lambda: load_tokenizer(folder), made.words)
    held = RowParameters(temperature=1.0, seed=3, grammar="start: /[a-z ]{200,300}/")
    rows = {1: RowParameters(), 2: held, 3: held, 4: PARAMETERS["drawn"], 5: held}
    plain, drafted = (answered_together(made, rows, mtp=mtp, grammars=grammars) for mtp in (False, True))
    matcher = grammars.compile(held.grammar).deep_copy()
    assert all(matcher.consume_token(token) for token in drafted.answers[3])
    grammars.close()
    for row in rows:
        few = min(len(plain.answers[row]), len(drafted.answers[row]))
        assert few >= TOKENS // 2
        assert drafted.answers[row][:few] == plain.answers[row][:few]
    assert len(drafted.steps) < len(plain.steps)


class Raising(MtpHead):
    """A head that loads, and whose code fails when it is called."""

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: Cache) -> tuple[mx.array, mx.array]:
        raise RuntimeError("no kernel for this shape")


def test_a_head_that_fails_while_it_is_timed_is_given_up_and_nothing_else(tmp_path: Path) -> None:
    """Its stage would load no more if the error were passed on."""
    config = tiny(config_of("glm4_moe"), "glm4_moe")
    save(tmp_path, config)
    made = Made(tmp_path, config, 2)
    assert (made.drafter.failed, made.drafter.seconds > 0) == (False, True)

    def broken() -> MtpDrafter:
        head = load_mtp_head(tmp_path, made.stages[-1].model, shares=False)
        head.__class__ = Raising
        return MtpDrafter(head, made.stages[-1], ROOM)

    drafter = compute_thread(1).submit(broken).result(PATIENCE_SECONDS)
    assert (drafter.failed, drafter.seconds) == (True, 0.0)


def test_guesses_are_refused_where_no_head_makes_them() -> None:
    made = made_of("glm4_moe", 2, 0.03)
    ring = Ring(made.stages, Prompts({1: ([1, 2, 3], RowParameters())}))
    try:
        gateway = Gateway(ring)
        gateway.prefill()
        with pytest.raises(AssertionError):
            gateway.decode(admit(), guesses=1)
    finally:
        ring.close()
    assert {getattr(fault, "reason", "") for fault in ring.faults} == {"BAD_STEP"}


def cut_together(stage: Stage) -> bool:
    """Whether rows of a lane take drafts back by cutting their caches."""
    return caches.cuts_together(caches.for_one_row(stage.make_cache(), stage.batches))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.sweep
def test_answers_of_every_architecture_with_a_head_are_the_same(key: str, size: int, tmp_path: Path) -> None:
    config = tiny(ALL[key], key)
    if FORMATS[key].copied:
        config["mtp_hybrid_override_pattern"] = ["*", "-"]
    for kept in (None, 0.03):
        save(tmp_path / str(kept), config, kept=kept)
        made = Made(tmp_path / str(kept), config, size)
        for name in PARAMETERS:
            plain, drafted = (answered(made, PARAMETERS[name], mtp=mtp) for mtp in (False, True))
            assert drafted.answers[1][:TOKENS] == plain.answers[1][:TOKENS]
            assert not made.drafter.failed
        if made.drafter.facts.rows > 1 and all(map(cut_together, made.stages)):
            rows = dict(enumerate([*PARAMETERS.values(), RowParameters()], 1))
            plain, drafted = (answered_together(made, rows, mtp=mtp) for mtp in (False, True))
            for row in rows:
                few = min(len(plain.answers[row]), len(drafted.answers[row]))
                assert drafted.answers[row][:few] == plain.answers[row][:few]
