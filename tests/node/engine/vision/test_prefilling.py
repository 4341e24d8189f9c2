"""Prompts with images in epochs of rings: computed once, where they are, and never for what is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stagering import PATIENCE_SECONDS, Prompts, Ring, compute_thread

from bench.images import small_towers
from sealring.mesh.errors import Internal
from sealring.mesh.ring import MAX_CONTEXT, Origin
from sealring.node.engine import (
    Prompt,
    RowParameters,
    WholeVisionModel,
    load_lazily,
    params,
    prompts,
    random_whole,
    save,
)
from sealring.node.engine.configuration import with_parts
from sealring.node.engine.staging import Prefill, Stage, share
from sealring.node.engine.staging.anatomy import dissect
from sealring.node.engine.staging.grid import needs_grids
from sealring.node.engine.staging.splicing import embedded
from sealring.node.engine.text import Picture, grids_of
from sealring.node.engine.vision.sizes import can_see
from sealring.node.engine.vision.tower import Rows, Tower, load_tower
from sealring.node.engine.weights import cut_stage, read_weights
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

FAMILIES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "data" / "archs-images.json").read_bytes()
)
Cuts = tuple[tuple[int, ...], tuple[int, ...]]
"""The first layers of the stages behind the head, for prompts and for answers."""

ALONE: Cuts = (), ()
TWO: Cuts = (2,), (2,)
THREE: Cuts = (2, 3), (2, 3)
DOUBLED: Cuts = (3,), (1,)
DOUBLED_TWICE: Cuts = (2, 3), (1, 2)

DECODED = 5
KEPT = 1


class Counting:
    """A tower that counts, and fails on some images."""

    def __init__(self, tower: Tower) -> None:
        self._tower = tower
        self.seen: list[bytes] = []
        self.broken: set[bytes] = set()

    def rows(self, picture: Picture) -> Rows:
        self.seen.append(picture.digest)
        if picture.digest in self.broken:
            return self._tower.rows(
                Picture.of(0, 4, picture.places, b"", {"pixel_values": np.zeros((1, 2, 3))})
            )
        return self._tower.rows(picture)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_vl", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Positions of one dimension, and of three."""
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, family: dict[str, Any]) -> Path:
    made = tmp_path_factory.mktemp("model")
    save(random_whole(family["config"], 3), family["config"], made, {})
    return made


@pytest.fixture(scope="module")
def asked(family: dict[str, Any]) -> list[Prompt]:
    return prompts(family["token"] - 4, family["token"], family["images"], seed=3)


@pytest.fixture(scope="module")
def answers(family: dict[str, Any], asked: list[Prompt]) -> list[list[int]]:
    """mlx-vlm's greedy answers."""
    whole = WholeVisionModel(random_whole(family["config"], 3))
    return [whole(one, DECODED)[1] for one in asked]


Load = Callable[[Cuts], tuple[list[Stage], Counting]]


def loading(folder: Path) -> Load:
    """By cuts: the stages, which are loaded once, and their tower."""

    @cache
    def tower() -> Tower:
        found = load_tower(folder, *embedded(load_lazily(folder)[0]))
        assert found is not None
        return found

    def stage(computes: tuple[int, int], decodes: tuple[int, int]) -> Stage:
        made, prefill = cut(*decodes, Stage), cut(*computes, Prefill)
        if computes != decodes and isinstance(prefill, Prefill):
            share(prefill, made)
            made.prefill = prefill
        read_weights(made, folder, lambda done, total: None)
        if made.prefill is prefill:
            prefill.pair(made)
        if made.spec.is_head:
            made.prefill.take_images(tower().residuals)
        return made

    def cut(lo: int, hi: int, kind: type[Stage]) -> Stage:
        model, config = load_lazily(folder)
        return cut_stage(model, dissect(model, config["model_type"]), lo, hi, cut=kind)

    @cache
    def loaded(cuts: Cuts) -> list[Stage]:
        layers = len(load_lazily(folder)[0].layers)
        prompts, answers = (pairwise([0, *one, layers]) for one in cuts)
        return [
            compute_thread(rank).submit(stage, *both).result(PATIENCE_SECONDS)
            for rank, both in enumerate(zip(prompts, answers, strict=True))
        ]

    return lambda cuts: (loaded(cuts), Counting(tower()))


@pytest.fixture(scope="module")
def load(folder: Path) -> Load:
    return loading(folder)


class Steps:
    """Announces steps of a ring, one after another."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.number = 0

    def announce(self, **step: Any) -> None:
        self.number += 1
        self.ring.announce(control.Step(number=self.number, **step))

    def prefill(
        self,
        row: int,
        prompt: Prompt,
        *,
        begin: int = 0,
        prefix: int = 0,
        choices: int = 1,
        keep: int = 0,
        until: int = MAX_CONTEXT,
    ) -> None:
        """With `keep` that many tokens are kept as KEPT, before the chunk that begins behind them.
        Chunks that begin behind `until` tokens are left out."""
        for start, end in prompt.chunks():
            if end <= begin or start > until:
                continue
            first = max(start, begin) == begin
            size = len(self.ring.prompts.parameters(row)) * first
            chunk = control.Chunk(
                row=row, start=max(start, begin), end=end, prompt_tokens=len(prompt.tokens), params_bytes=size
            )
            if first and prefix:
                chunk.prefix = prefix
            if first and choices > 1:
                chunk.choices = choices
            change = control.Change(keep=control.Keep(row=row, prefix=KEPT, tokens=keep))
            changes = [change] if keep and start == keep else []
            self.announce(changes=changes, prefill=control.Prefill(chunks=[chunk]))

    def decode(self, rows: list[int], count: int) -> None:
        admit = [control.Change(admit=control.Admit(row=row, lane=0)) for row in rows]
        for step in range(count):
            self.announce(changes=admit if step == 0 else [], decode=control.Decode(lane=0))
        self.ring.wait_for(self.number)


def greedy(prompt: Prompt) -> RowParameters:
    grids = grids_of(one for one in prompt.pictures if one.patches)
    return params.from_sampling(inference.Sampling(), prompt.tokens.tolist(), [], grids=grids)


@pytest.mark.parametrize("cuts", [ALONE, TWO, THREE, DOUBLED, DOUBLED_TWICE])
def test_a_rings_answers_are_mlx_vlms_and_each_image_is_computed_once(
    load: Load, asked: list[Prompt], answers: list[list[int]], cuts: Cuts
) -> None:
    stages, tower = load(cuts)
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row, one in enumerate(asked, 1)})
    head.images = {row: one.pictures for row, one in enumerate(asked, 1)}
    ring = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        for row, one in enumerate(asked, 1):
            steps.prefill(row, one)
        steps.decode(list(head.images), DECODED)
    finally:
        ring.close()
    assert [head.answers[row] for row in head.images] == answers
    assert len(tower.seen) == sum(len(one.pictures) for one in asked)


@pytest.mark.parametrize("cuts", [TWO, DOUBLED])
def test_answers_of_one_prompt_go_on_behind_its_images(
    load: Load, asked: list[Prompt], answers: list[list[int]], cuts: Cuts
) -> None:
    stages, tower = load(cuts)
    one = asked[1]
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row in (1, 2)})
    head.images = {1: one.pictures}
    ring = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        steps.prefill(1, one, choices=2)
        steps.decode([2, 1], DECODED)
    finally:
        ring.close()
    assert head.answers == {1: answers[1], 2: answers[1]}


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("cuts", [TWO, DOUBLED])
def test_drafts_of_a_prompt_with_images_are_verified_where_they_are(
    load: Load, asked: list[Prompt], answers: list[list[int]], right: bool, cuts: Cuts
) -> None:
    stages, tower = load(cuts)
    one, answer = asked[1], answers[1]
    head = Prompts({1: (one.tokens.tolist(), greedy(one))})
    head.images = {1: one.pictures}
    head.guess = lambda last, count: [*answer[1:], *[0] * count][:count] if right else [0] * count
    ring = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        steps.prefill(1, one)
        admit = control.Change(admit=control.Admit(row=1, lane=0))
        work = control.Decode(lane=0, drafts=3, source=control.DRAFT_SOURCE_LOOKUP)
        steps.announce(changes=[admit], decode=work)
        ring.wait_for(steps.number)
        tokens = len(one.tokens) + len(head.answers[1]) - 1
        settle = control.Change(settle=control.Settle(row=1, tokens=tokens))
        steps.announce(changes=[settle], decode=control.Decode(lane=0))
        ring.wait_for(steps.number)
    finally:
        ring.close()
    assert head.answers[1] == answer[: len(head.answers[1])]
    assert (len(head.answers[1]) == 6) == right


def test_a_chunk_that_divides_an_image_ends_the_epoch(load: Load, asked: list[Prompt]) -> None:
    """A gateway may ignore the spans that the head reports."""
    stages, tower = load(TWO)
    one = asked[0]
    head = Prompts({1: (one.tokens.tolist(), greedy(one))})
    head.images = {1: one.pictures}
    ring = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        chunk = control.Chunk(row=1, end=one.pictures[0].end - 1, prompt_tokens=len(one.tokens))
        chunk.params_bytes = len(head.parameters(1))
        Steps(ring).announce(prefill=control.Prefill(chunks=[chunk]))
        ring.wait_for_fault()
    finally:
        ring.close()
    assert [error.reason for error in ring.faults[:1]] == ["BAD_STEP"]
    assert not tower.seen


def test_an_image_on_which_the_tower_fails_ends_its_own_row_only(
    load: Load, asked: list[Prompt], answers: list[list[int]]
) -> None:
    stages, tower = load(TWO)
    broken, whole = asked[0], asked[1]
    tower.broken = {broken.pictures[0].digest}
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row, one in ((1, broken), (2, whole))})
    head.images = {1: broken.pictures, 2: whole.pictures}
    ring = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        steps.prefill(1, broken)
        steps.prefill(2, whole)
        steps.announce(changes=[control.Change(evict=control.Evict(row=1))])
        steps.decode([2], DECODED)
        assert not ring.faults
    finally:
        ring.close()
    assert {row: error.reason for row, error in head.failed.items()} == {1: "TOWER_FAILED"}
    assert isinstance(head.failed[1], Internal)
    assert head.answers[2] == answers[1]


@pytest.mark.parametrize("cuts", [TWO, DOUBLED])
def test_images_of_a_kept_prefix_are_not_computed_again(
    load: Load, asked: list[Prompt], answers: list[list[int]], cuts: Cuts
) -> None:
    stages, tower = load(cuts)
    one = asked[1]
    first, second = one.pictures
    cut = next(end for _, end in one.chunks() if end >= first.end)
    assert cut <= second.start
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row in (1, 2)})
    head.images = {1: one.pictures, 2: one.pictures}
    ring = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        steps.prefill(1, one, keep=cut)
        steps.prefill(2, one, begin=cut, prefix=KEPT)
        steps.decode([1, 2], DECODED)
    finally:
        ring.close()
    assert head.answers == {1: answers[1], 2: answers[1]}
    assert tower.seen == [first.digest, second.digest, second.digest]


@pytest.mark.parametrize("cuts", [TWO, DOUBLED])
def test_a_prompt_goes_on_behind_its_images_in_the_next_epoch(
    load: Load, asked: list[Prompt], answers: list[list[int]], cuts: Cuts
) -> None:
    """Positions come with the row, and nothing of them is kept with a prefix."""
    stages, tower = load(cuts)
    one = asked[1]
    cut = one.chunks()[-1][0]
    assert cut > one.pictures[-1].end
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row in (1, 2)})
    head.images = {1: one.pictures, 2: one.pictures}
    first = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(first)
        steps.prefill(1, one, keep=cut)
        first.wait_for(steps.number)
        first.break_off()
    finally:
        first.close()
    assert [each.turn_over("") for each in first.prefixes] == [{Origin(1, 1, cut): ()}] * 2
    seen = len(tower.seen)
    head.steps.clear()
    ring = Ring(stages, head, tower=tower, number=2, prefixes=first.prefixes)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        adopt = control.Change(adopt=control.Adopt(prefix=KEPT, epoch=1, row=1, tokens=cut))
        chunk = control.Chunk(
            row=2, start=cut, end=len(one.tokens), prompt_tokens=len(one.tokens), prefix=KEPT
        )
        chunk.params_bytes = len(head.parameters(2))
        steps.announce(changes=[adopt], prefill=control.Prefill(chunks=[chunk]))
        steps.decode([2], DECODED)
    finally:
        ring.close()
    assert head.answers[2] == answers[1]
    assert len(tower.seen) == seen, "no image is computed again"


@pytest.mark.parametrize("cuts", [TWO, DOUBLED, DOUBLED_TWICE])
def test_answers_that_a_fault_cut_off_go_on_beside_others(
    load: Load, asked: list[Prompt], answers: list[list[int]], cuts: Cuts
) -> None:
    """Each begins again as a prompt with what was answered, also where the prompt was not yet computed."""
    stages, tower = load(cuts)
    rows = dict(enumerate(asked, 1))
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row, one in rows.items()})
    head.images = {row: one.pictures for row, one in rows.items()}
    first = Ring(stages, head, tower=tower)  # type: ignore[arg-type]
    try:
        steps = Steps(first)
        for row in (1, 2, 3):
            steps.prefill(row, rows[row])
        steps.decode([1, 2, 3], 2)
        steps.prefill(4, rows[4], until=rows[4].pictures[0].end)
        steps.decode([], 1)
        first.break_off()
    finally:
        first.close()
    before = {row: head.answers[row] for row in rows}
    assert [len(before[row]) for row in rows] == [4, 4, 4, 0, 0]
    again = {
        row: dataclasses.replace(one, tokens=np.append(one.tokens, np.array(before[row], np.uint32)))
        for row, one in rows.items()
    }
    head = Prompts({row: (one.tokens.tolist(), greedy(one)) for row, one in again.items()})
    head.images = {row: one.pictures for row, one in again.items()}
    ring = Ring(stages, head, tower=tower, number=2, prefixes=first.prefixes)  # type: ignore[arg-type]
    try:
        steps = Steps(ring)
        joining = [(5, 1), (2, 1), (1, 0), (4, 2), (3, 5)]
        for row, count in joining:
            steps.prefill(row, again[row])
            steps.decode([row], count)
    finally:
        ring.close()
    for row, found in before.items():
        told = found + head.answers[row]
        assert len(told) > len(found)
        assert told[: len(answers[row - 1])] == answers[row - 1][: len(told)]


@pytest.mark.sweep
@pytest.mark.parametrize("key", sorted(key for key in FAMILIES if can_see(FAMILIES[key]["config"])))
def test_every_family_answers_alike_where_prompts_are_cut_elsewhere(key: str, tmp_path: Path) -> None:
    """Tokens are drawn, so that they show what the logits are."""
    family = FAMILIES[key]
    placed = needs_grids(family["config"])
    parts, also = with_parts(family["config"]), family.get("also", ())
    words = parts.get("text_config", parts).get("vocab_size") or parts["vocab_size"]
    asked = dict(enumerate(prompts(words, family["token"], family["images"], seed=3, also=also), 1))
    found = []

    def drawn(prompt: Prompt, row: int) -> RowParameters:
        grids = grids_of(prompt.pictures) if placed else []
        sampling = inference.Sampling(temperature=1.0, seed=row)
        return params.from_sampling(sampling, prompt.tokens.tolist(), [], grids=grids)

    with small_towers():
        made = random_whole(family["config"], 3, language=family.get("language", ""))
        save(made, family["config"], tmp_path, family.get("names", {}))
        load, layers = loading(tmp_path), len(load_lazily(tmp_path)[0].layers)
        for cuts in (ALONE, ((layers - 1,), (1,))):
            stages, tower = load(cuts)
            head = Prompts({row: (one.tokens.tolist(), drawn(one, row)) for row, one in asked.items()})
            head.images = {row: one.pictures for row, one in asked.items()}
            ring = Ring(stages, head, tower=tower, chunk=512)  # type: ignore[arg-type]
            try:
                steps = Steps(ring)
                for row, one in asked.items():
                    steps.prefill(row, one)
                    steps.decode([row], 2)
            finally:
                ring.close()
            found.append(head.answers)
    assert found[0] == found[1]
