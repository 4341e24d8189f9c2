"""Answers with guesses of drafters that read hidden states are those without, the guesses are mlx-vlm's own,
and rows that do not draft send what they sent before."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest
from hiddendrafters import BLOCK, CONFIGS, TAPPED, save_drafter, save_model, target_of
from mlxvlmrounds import rounds
from patience import PATIENCE_SECONDS
from stagering import CHUNK, Prompts, Ring, compute_thread, doubled_stages_of
from tailgateway import PARAMETERS, Gateway, admit, company_leaves_prefixes_stay

from sealring.node.engine import RowParameters, load_stage
from sealring.node.engine.drafter_folder import load_drafter
from sealring.node.engine.drafts import HiddenDrafter
from sealring.node.engine.staging import Stage
from sealring.node.engine.warm_up import warm_up
from sealring.v1 import control_pb2 as control

TOKENS = 24
ROOM = 1 << 12
WIDTH = 64
HIDDEN = control.DRAFT_SOURCE_HIDDEN
KEPT = 0.003


class Made:
    def __init__(self, folder: Path, kind: str, size: int, kept: float | None) -> None:
        config = target_of(kind)
        save_model(folder / "model", config, kept=kept)
        save_drafter(folder / "drafter", kind, folder / "model", kept=kept)
        edges = [config["num_hidden_layers"] * rank // size for rank in range(size + 1)]

        def make(lo: int, hi: int) -> Stage:
            stage = load_stage(folder / "model", lo, hi)
            warm_up(stage, 512)
            stage.tap(TAPPED)
            return stage

        def drafter() -> HiddenDrafter:
            found = load_drafter(folder / "drafter", folder / "model", self.stages[-1])
            mx.eval(found.kept)
            return HiddenDrafter(found, self.stages[-1], ROOM)

        made = [compute_thread(rank).submit(make, *edges[rank : rank + 2]) for rank in range(size)]
        self.stages = [stage.result(PATIENCE_SECONDS) for stage in made]
        self.drafter = compute_thread(size - 1).submit(drafter).result(PATIENCE_SECONDS)
        self.words = config["vocab_size"]
        assert not self.drafter.failed


@cache
def made_of(kind: str, size: int, kept: float | None = KEPT) -> Made:
    """A ring of a small model with a drafter, for all tests."""
    with tempfile.TemporaryDirectory() as folder:
        return Made(Path(folder), kind, size, kept)


@pytest.fixture(autouse=True, scope="module")
def _free() -> Iterator[None]:
    yield
    made_of.cache_clear()


def text_of(made: Made, seed: int = 1, tokens: int = 2 * CHUNK + 3) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(made.words) for _ in range(tokens)]


def answered(made: Made, row: RowParameters, *, drafts: bool) -> Prompts:
    """An answer by steps with and without guesses, and with and without drafts of them or of others."""
    prompt = text_of(made)
    given = dataclasses.replace(row, prompt=tuple(prompt)) if drafts else row
    prompts = Prompts({1: (prompt, given)})
    ring = Ring(made.stages, prompts, tail_drafter=made.drafter if drafts else None)
    gateway, choices = Gateway(ring, HIDDEN, asked=drafts), random.Random(2)
    try:
        gateway.prefill()
        changes, guessed = [admit()], 0
        while len(prompts.answers[1]) < TOKENS:
            if drafts and choices.random() < 0.2:
                gateway.decode(*changes, drafts=2, source=control.DRAFT_SOURCE_LOOKUP)
                changes, guessed = [gateway.settle()], 0
                continue
            count = choices.choice([0, guessed]) if drafts else 0
            guessed = choices.choice([0, 1, BLOCK - 1, BLOCK - 1]) * drafts
            gateway.decode(*changes, drafts=count, guesses=guessed)
            changes = [gateway.settle()] if count else []
    finally:
        ring.close()
    assert not ring.faults
    return prompts


EVERY_RUN = {
    ("DFlash", 3): "greedy",
    ("DFlash:window", 2): "drawn",
    ("DFlash2", 2): "greedy",
    ("DSpark", 2): "penalties",
    ("EAGLE-3", 3): "greedy",
    ("DFlash for Gemma 4", 2): "greedy",
    ("DFlash for Laguna", 3): "drawn",
}
"""Each kind once; the tail samples what any drafter guesses for."""


@pytest.mark.parametrize(
    ("kind", "size", "name"),
    [
        pytest.param(kind, size, name, marks=[pytest.mark.sweep] * (EVERY_RUN.get((kind, size)) != name))
        for kind in CONFIGS
        for size in (2, 3)
        for name in PARAMETERS
    ],
)
def test_answers_are_the_same(kind: str, size: int, name: str) -> None:
    """With a drafter that is hardly ever right, and with one that often is."""
    rates = []
    for kept in (None, KEPT):
        made = made_of(kind, size, kept)
        plain, drafted = (answered(made, PARAMETERS[name], drafts=drafts) for drafts in (False, True))
        assert drafted.answers[1][:TOKENS] == plain.answers[1][:TOKENS]
        assert drafted.logprobs[1][:TOKENS] == plain.logprobs[1][:TOKENS] or name != "greedy"
        assert not made.drafter.failed
        rates.append(drafted.modelled[1].right())
        steps = len(plain.steps) - len(drafted.steps)
    assert rates[0] < 0.3
    often = name == "greedy" or kind.startswith(("DFlash:", "DSpark"))  # others guess by fewer tokens
    if often and not kind.endswith("Gemma 4"):  # whose output head is its embedding
        assert rates[1] > 0.3
        assert steps > 3


def guessed(
    stages: list[Stage], drafter: HiddenDrafter, prompt: list[int]
) -> tuple[int, list[tuple[int, list[int]]]]:
    """The first token of an answer, and pairs of a later one and the tokens that were guessed behind it."""
    prompts, found = Prompts({1: (prompt, RowParameters(prompt=tuple(prompt)))}), []
    ring = Ring(stages, prompts, tail_drafter=drafter)
    gateway, count = Gateway(ring, HIDDEN), BLOCK - 1
    try:
        gateway.prefill()
        gateway.decode(admit(), guesses=count)
        changes: list[control.Change] = []
        for _ in range(5):
            (offered,) = prompts.modelled.values()
            found.append((prompts.answers[1][-1], offered.taken(offered.known, count)))
            gateway.decode(*changes, drafts=count, guesses=count)
            changes = [gateway.settle()]
    finally:
        ring.close()
    assert not ring.faults
    return prompts.answers[1][0], found


@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_guesses_are_those_of_mlx_vlms_own_loop_on_a_whole_model(
    kind: str, size: int, kept: float | None, tmp_path: Path
) -> None:
    """Round by round and token by token; the ring guesses nothing behind the first token of an answer."""
    made = made_of(kind, size, kept)
    save_model(tmp_path / "model", target_of(kind), kept=kept)
    save_drafter(tmp_path / "drafter", kind, tmp_path / "model", kept=kept)
    prompt = text_of(made, 3)
    first, found = guessed(made.stages, made.drafter, prompt)
    theirs = rounds(tmp_path / "model", tmp_path / "drafter", [*prompt, first], 6 * BLOCK, BLOCK)
    assert found == theirs[: len(found)]


@pytest.mark.parametrize(("prompts", "answers"), [((3,), (1,)), ((2,), (1,)), ((2, 3), (1, 2))])
@pytest.mark.parametrize("kind", ["DFlash", "EAGLE-3"])
def test_guesses_are_the_same_where_prompts_are_cut_elsewhere(
    kind: str, prompts: tuple[int, ...], answers: tuple[int, ...], tmp_path: Path
) -> None:
    """A tapped layer lies with one member while the prompt is computed, and with another then."""
    stages = doubled_stages_of.__wrapped__("qwen3", prompts, answers)
    save_model(tmp_path / "model", target_of(kind))
    save_drafter(tmp_path / "drafter", kind, tmp_path / "model")

    def drafter() -> HiddenDrafter:
        found = load_drafter(tmp_path / "drafter", tmp_path / "model", stages[-1])
        mx.eval(found.kept)
        return HiddenDrafter(found, stages[-1], ROOM)

    for stage in stages:
        for one in (stage, stage.prefill):
            one.tap(TAPPED)
    made, own = (made_of(kind, 2, None), compute_thread(len(stages) - 1).submit(drafter))
    prompt = text_of(made, 3)
    assert guessed(stages, own.result(PATIENCE_SECONDS), prompt) == guessed(made.stages, made.drafter, prompt)


@pytest.mark.parametrize("kind", ["DFlash", "DFlash:window", "EAGLE-3"])
def test_rows_get_company_leave_begin_with_prefixes_and_outlive_an_epoch(kind: str) -> None:
    """The drafter goes on with what it has of a row, and with what it kept of the prefix."""
    made = made_of(kind, 2)
    company_leaves_prefixes_stay(made.stages, made.drafter, made.words)


@pytest.mark.parametrize("size", [2, 3])
def test_records_of_rows_that_do_not_draft_are_as_long_as_without_a_drafter(size: int) -> None:
    """And with taps each is longer by the width of the tapped layers before its link, of each token."""
    made, lengths = made_of("DFlash", size), {}
    for named, drafter, taps in (
        ("none", None, False),
        ("idle", made.drafter, False),
        ("taps", made.drafter, True),
    ):
        ring = Ring(made.stages, Prompts({1: ([1, 2, 3], RowParameters())}), tail_drafter=drafter)
        gateway = Gateway(ring, HIDDEN, asked=taps)
        try:
            gateway.prefill()
            gateway.decode(admit())
            gateway.decode()
        finally:
            ring.close()
        lengths[named] = [[header.length for header in link.seen] for link in ring.links]
    assert lengths["idle"] == lengths["none"]
    for edge, stage in enumerate(made.stages[:-1]):
        more = 4 * WIDTH * sum(layer < stage.spec.hi for layer in TAPPED)
        added = [own - plain for own, plain in zip(lengths["taps"][edge], lengths["none"][edge], strict=True)]
        assert added == [0, 3 * more, more, more]  # of the parameters, the prompt and two tokens
    assert lengths["taps"][-1] == lengths["none"][-1]


@pytest.mark.parametrize("work", ["prefill", "decode"])
def test_hidden_states_are_refused_where_no_drafter_reads_them(work: str) -> None:
    made = made_of("DFlash", 2)
    ring = Ring(made.stages, Prompts({1: ([1, 2, 3], RowParameters())}))
    gateway = Gateway(ring, HIDDEN, asked=work == "prefill")
    try:
        with pytest.raises(AssertionError):
            gateway.prefill()
            gateway.asked = True
            gateway.decode(admit())
    finally:
        ring.close()
    assert {getattr(fault, "reason", "") for fault in ring.faults} == {"BAD_STEP"}
