"""Rings that cut a model in one place for prompts, and in another for answers."""

from __future__ import annotations

import random

import pytest
from patience import PATIENCE_SECONDS
from schedules import make_steps
from stagering import (
    FAMILIES,
    UNUSUAL,
    Prompts,
    Ring,
    combinations,
    compute_thread,
    doubled_stages_of,
    prompt_of,
    run,
    run_on,
    setting,
)

from sealring.mesh.errors import ModelError
from sealring.node.engine import RowParameters, borders_of, params
from sealring.v1 import control_pb2 as control
from sealring.v1 import inference_pb2 as inference

STAYS = "deepseek_v41"
"""Its caches are not stored on disk, and so do not travel either."""
TRAVEL = [family for family in UNUSUAL if family != STAYS]
QUICK = [("llama", 2), ("llama", 3), ("gemma3_text", 2), ("qwen3:8", 2)]


def cuts(choices: random.Random, layers: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two cuts, for prompts and for answers: some layers are held by two members, and none by three."""
    while True:
        prompts = tuple(sorted(choices.sample(range(1, layers), size - 1)))
        answers = tuple(sorted(choices.sample(range(1, layers), size - 1)))
        behind = zip(prompts, (*answers[1:], layers), strict=True)
        if (
            prompts != answers
            and all(one >= other for one, other in zip(prompts, answers, strict=True))
            and all(one <= other for one, other in behind)
        ):
            return prompts, answers


def test_a_model_whose_caches_do_not_travel_is_refused_by_name() -> None:
    stages = doubled_stages_of(STAYS, (setting(STAYS, "num_hidden_layers") - 1,), (1,))
    with pytest.raises(ModelError, match=STAYS) as caught:
        compute_thread(0).submit(borders_of, stages[0]).result(PATIENCE_SECONDS)
    assert caught.value.reason == "NOT_DOUBLED"


def test_of_a_row_that_decodes_its_prompt_alone_is_kept() -> None:
    tokens = prompt_of("llama", 1, 12)
    prompts = Prompts({1: (tokens, RowParameters())})
    ring = Ring(doubled_stages_of("llama", (4,), (1,)), prompts)
    try:
        for begin, end in ((0, 8), (8, 12)):
            chunk = control.Chunk(
                row=1, start=begin, end=end, prompt_tokens=12, params_bytes=0 if begin else params.BLOCK
            )
            ring.announce(control.Step(number=1 + begin // 8, prefill=control.Prefill(chunks=[chunk])))
        admit = control.Change(admit=control.Admit(row=1, lane=0))
        ring.announce(control.Step(number=3, changes=[admit], decode=control.Decode(lane=0)))
        for number, length in ((4, 12), (5, 13)):
            keep = control.Change(keep=control.Keep(prefix=number, row=1, tokens=length))
            ring.announce(control.Step(number=number, changes=[keep], decode=control.Decode(lane=0)))
            if number == 4:
                ring.wait_for(4)
        ring.wait_for_fault()
        assert {getattr(fault, "reason", "") for fault in ring.faults} == {"BAD_STEP"}
    finally:
        ring.close()
        for prefixes in ring.prefixes:
            prefixes.clear()


def drawn(family: str, row: int, length: int) -> tuple[list[int], RowParameters]:
    """A row whose tokens are drawn, so that they show what the logits are."""
    prompt = prompt_of(family, row, length)
    return prompt, params.from_sampling(inference.Sampling(temperature=1.0, seed=row), prompt, [])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_choices_of_one_prompt_have_the_doubled_layers_too(family: str) -> None:
    prompt, parameters = drawn(family, 1, 21)
    steps, begin = [], 0
    for end in (8, 16, 21):
        chunk = control.Chunk(row=1, start=begin, end=end, prompt_tokens=21)
        if not begin:
            chunk.choices, chunk.params_bytes = 3, len(params.encode(parameters))
        steps.append(control.Step(number=len(steps) + 1, prefill=control.Prefill(chunks=[chunk])))
        begin = end
    joining = [control.Change(admit=control.Admit(row=row, lane=0)) for row in (1, 2, 3)]
    for number in range(4, 12):
        changes = joining if number == 4 else []
        steps.append(control.Step(number=number, changes=changes, decode=control.Decode(lane=0)))
    rows = dict.fromkeys((1, 2, 3), (prompt, parameters))
    stages = doubled_stages_of(family, (setting(family, "num_hidden_layers") - 1,), (1,))
    found = run_on(stages, steps, rows).answers
    assert found == run(family, 1, steps, rows).answers
    assert found[1] != found[2]


@pytest.mark.parametrize(("family", "size"), combinations([*FAMILIES, *TRAVEL], (2, 3), always=QUICK))
def test_answers_are_those_of_the_whole_model(family: str, size: int) -> None:
    """Rows come and go by chance."""
    layers = setting(family, "num_hidden_layers")
    if layers <= size:
        pytest.skip("no layer is left to be doubled")
    for seed in range(3):
        choices = random.Random(f"{family} {size} {seed}")
        lengths = {
            row: (choices.randint(1, 30), choices.randint(1, 8)) for row in range(1, choices.randint(3, 6))
        }
        rows = {row: drawn(family, row, length) for row, (length, _) in lengths.items()}
        sizes = {row: len(params.encode(each)) for row, (_, each) in rows.items()}
        steps = make_steps(choices, lengths, 2, sizes=sizes)
        stages = doubled_stages_of(family, *cuts(choices, layers, size))
        assert run_on(stages, steps, rows).answers == run(family, 1, steps, rows).answers
