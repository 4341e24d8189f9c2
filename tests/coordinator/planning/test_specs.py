"""What operators may ask for, up to each limit and not beyond it."""

from __future__ import annotations

from typing import Any

import pytest

from sealring.coordinator.planning.specs import check_spec
from sealring.mesh.crypto import encode_base32
from sealring.mesh.errors import InvalidInput
from sealring.mesh.ring import (
    MAX_ALIASES,
    MAX_CONTEXT,
    MAX_KEEP_ALIVE,
    MAX_LAYERS,
    MAX_PREFILL_CHUNK,
    MAX_REPLICAS,
    MAX_ROWS,
    MAX_STAGES,
)
from sealring.mesh.trust.levels import MAX_SCORE
from sealring.v1 import admin_pb2

IDS = [encode_base32(bytes([number]) * 32) for number in range(6)]


def spec(**fields: Any) -> admin_pb2.DeploymentSpec:
    return admin_pb2.DeploymentSpec(**({"name": "demo", "model": "demo"} | fields))


def test_what_is_left_open_is_filled_in_and_the_rest_kept() -> None:
    found = check_spec(spec())
    assert (found.strategy, found.replicas, found.prefill_chunk) == ("pipeline", 1, 0)
    given = spec(strategy="pipeline", replicas=3, prefill_chunk=7, context=99, kv_bits=4, stages=2)
    assert check_spec(given) == given


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("context", MAX_CONTEXT),
        ("trust_floor", MAX_SCORE),
        ("replicas", MAX_REPLICAS),
        ("max_rows", MAX_ROWS),
        ("stages", MAX_STAGES),
        ("prefill_chunk", MAX_PREFILL_CHUNK),
    ],
)
def test_numbers_go_up_to_their_limit(field: str, most: int) -> None:
    assert getattr(check_spec(spec(**{field: most})), field) == most
    refused(field, **{field: most + 1})


def test_models_have_a_name_that_can_be_shown() -> None:
    for name in ("m", "m" * 256, "org/model name", " ", "a\x20b"):
        assert check_spec(spec(model=name)).model == name
    for name in ("", "m" * 257, "a\nb", "a\x1fb"):
        refused("model", model=name)
    assert check_spec(spec(adapter="tuned")).adapter == "tuned"
    for name in ("demo", "m" * 257, "a\nb"):
        refused("adapter", adapter=name)
    refused("adapter", adapter="tuned", strategy="tensor", clear_links=True, stages=2)


def test_splits_name_layers_and_are_instead_of_stages() -> None:
    for split in ([1] * MAX_STAGES, [1, MAX_LAYERS]):
        assert list(check_spec(spec(split=split)).split) == split
    for split in ([1] * (MAX_STAGES + 1), [1, MAX_LAYERS + 1], [0, 1]):
        refused("split", split=split)
    assert list(check_spec(spec(split=[1, 2])).split) == [1, 2]
    refused("split", split=[1, 2], stages=2)


def test_prompts_are_split_by_as_many_stages_and_layers_move_forward_by_one() -> None:
    for prompts in ([3, 2, 1], [2, 2, 2], [4, 1, 1]):
        assert list(check_spec(spec(split=[2, 2, 2], prompt_split=prompts)).prompt_split) == prompts
    for prompts in ([3, 3], [1, 3, 2], [5, 1, 0], [5, 0, 1], [3, 2, 2], [2, 1, 3]):
        refused("prompt_split", split=[2, 2, 2], prompt_split=prompts)
    refused("prompt_split", split=[2, 1, 1, 2], prompt_split=[4, 1, 0, 1])
    refused("prompt_split", split=[1, 1, 4], prompt_split=[3, 1, 2])
    refused("prompt_split", prompt_split=[3, 2, 1])


def test_members_are_named_once_and_as_many_as_a_split_needs() -> None:
    assert list(check_spec(spec(members=IDS)).members) == IDS
    assert check_spec(spec(split=[1, 2, 3], replicas=2, members=IDS)).replicas == 2
    refused("members", split=[1, 2, 3], members=IDS)
    refused("members", members=[IDS[0], IDS[0]])
    refused("members", members=["nobody"])
    refused("members", split=[1, 2, 3], members=IDS[:2])
    refused("members", members=["many"] * (MAX_REPLICAS * MAX_STAGES + 1))


@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "magic"},
        {"clear_links": False, "strategy": "tensor"},
        *({"kv_bits": bits} for bits in (1, 2, 3, 5, 7, 9, 16)),
    ],
)
def test_what_is_not_served_is_refused(fields: dict[str, Any]) -> None:
    refused(next(iter(fields)), **fields)


def test_a_tensor_ring_has_links_in_clear_and_so_many_nodes() -> None:
    tensor = {"strategy": "tensor", "clear_links": True}
    made = check_spec(spec(**tensor, stages=4, backend="nccl", or_pipeline=True))
    assert (made.backend, made.or_pipeline) == ("nccl", True)
    assert check_spec(spec(**tensor, stages=2)).backend == "ring"
    refused("clear_links", strategy="tensor", stages=2)
    refused("stages", **tensor, stages=3)
    refused("stages", **tensor)
    refused("stages", **tensor, split=[4, 5])
    refused("backend", **tensor, stages=2, backend="mpi")
    refused("speculate", **tensor, stages=2, speculate=True)
    for field in ({"clear_links": True}, {"backend": "ring"}, {"or_pipeline": True}):
        refused("strategy", **field)


def refused(param: str, **fields: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_spec(spec(**fields))
    assert caught.value.metadata["param"] == param


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_caches_are_kept_in_these_precisions(bits: int) -> None:
    assert check_spec(spec(kv_bits=bits)).kv_bits == bits


def test_a_deployment_on_demand_is_kept_for_as_long_as_it_says_or_a_quarter_of_an_hour() -> None:
    assert check_spec(spec(on_demand=True)).keep_alive == 900
    assert check_spec(spec(on_demand=True, keep_alive=0, pinned=True)).keep_alive == 0
    assert check_spec(spec(on_demand=True, keep_alive=MAX_KEEP_ALIVE)).keep_alive == MAX_KEEP_ALIVE
    refused("keep_alive", on_demand=True, keep_alive=MAX_KEEP_ALIVE + 1)
    refused("keep_alive", keep_alive=60)
    refused("pinned", pinned=True)


def test_aliases_are_names_that_others_use() -> None:
    aliases = ["claude-sonnet-4-5", "qwen3:8b", "meta/llama-3.2", "gpt-5*"]
    assert list(check_spec(spec(aliases=aliases)).aliases) == aliases
    for bad in (
        ["two words"],
        [""],
        ["a" * 129],
        ["demo"],
        ["a", "a"],
        [f"a{n}" for n in range(MAX_ALIASES + 1)],
    ):
        refused("aliases", aliases=bad)
