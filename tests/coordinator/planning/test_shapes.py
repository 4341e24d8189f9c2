"""Which shapes a plan is compared with, over clusters from files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sealring.coordinator.planning.arrangement import Candidate
from sealring.coordinator.planning.costs import Model
from sealring.coordinator.planning.links import ASSUMED, Network
from sealring.coordinator.planning.shapes import (
    shape_table,
)
from sealring.coordinator.planning.simulation import MAX_MACHINES, simulate
from sealring.coordinator.planning.speeds import Rate
from sealring.mesh.errors import InvalidInput, ResourceExhausted
from sealring.v1 import admin_pb2, model_pb2

GIB = 1 << 30
MODEL = {
    "layers": 32,
    "layer_bytes": GIB // 4,
    "kv_bytes_per_token": 4096,
    "handoff_bytes_per_token": 8192,
    "max_context": 8192,
}
MAC = {"name": "mac", "usable_gib": 40, "gb_per_s": 400, "rows": [[1, 1], [21, 2]]}
FAST = {"gbit_per_s": 60, "latency_us": 10}
SLOW = {"gbit_per_s": 10, "latency_us": 500}


def asked(changes: dict[str, Any], **spec: Any) -> admin_pb2.PlanDeploymentResponse:
    content = {"model": MODEL, "machines": [MAC | {"count": 4}]} | changes
    named = admin_pb2.DeploymentSpec(name="demo", model="simulated", **spec)
    return simulate(json.dumps(content).encode(), named)


def shapes(answer: admin_pb2.PlanDeploymentResponse) -> dict[str, admin_pb2.ShapeEstimate]:
    """By strategy, the fastest for one request."""
    found: dict[str, admin_pb2.ShapeEstimate] = {}
    for one in answer.shapes.shapes:
        if one.strategy not in found or one.one_request > found[one.strategy].one_request:
            found[one.strategy] = one
    return found


def machines(one: admin_pb2.ShapeEstimate) -> list[list[str]]:
    return [[each.name for each in group.machines] for group in one.groups]


PAIRS = [FAST | {"between": ["mac-1", "mac-2"]}, FAST | {"between": ["mac-3", "mac-4"]}]


def test_ranks_of_a_tensor_ring_are_machines_that_links_join() -> None:
    answer = asked({"links": PAIRS[1:], "network": SLOW})
    assert machines(shapes(answer)["tensor"]) == [["mac-3", "mac-4"]], (
        "four would add up over the slow network"
    )
    assert [one.planned for one in answer.shapes.shapes] == [True] + [False] * (len(answer.shapes.shapes) - 1)
    told = [(one.strategy, machines(one)) for one in answer.shapes.shapes]
    assert told == sorted(told, key=lambda one: ("pipeline", "tensor").index(one[0]))
    assert all(told.count(one) == 1 for one in told)
    assert machines(shapes(asked({"network": SLOW}))["tensor"]) == [["mac-1", "mac-2"]], "none are joined"


def test_what_a_better_cable_brings_is_told_with_how_to_have_it() -> None:
    """Tensor over what is fast; nothing over what is slow, with where the time would go."""
    why = "\n".join(asked({"links": PAIRS, "network": SLOW}).shapes.reasons)
    assert re.search(
        r"for one request tensor over 2 would be fastest, 1\.\d times the plan: --strategy tensor", why
    )
    assert "--clear-links" in why
    assert "assumed" not in why
    why = "\n".join(asked({"network": SLOW}).shapes.reasons)
    assert "for one request nothing is faster than the plan" in why
    assert re.search(r"tensor over 2 would have 0\.\d+ of that: .* adds up for 6\d\.\d", why)
    assert "assumed of links" in "\n".join(asked({}).shapes.reasons)


def test_a_tensor_ring_of_macs_over_tcp_is_warned_of_with_what_a_pipeline_would_bring() -> None:
    tensor = {"strategy": "tensor", "stages": 2, "clear_links": True}
    macs = {"machines": [MAC | {"count": 2, "metal": True}], "network": {"gbit_per_s": 24, "latency_us": 250}}
    answer = asked(macs, **tensor)
    (warning,) = [line for line in answer.shapes.reasons if line.startswith("warning")]
    planned = answer.shapes.shapes[0]
    pipeline = shapes(answer)["pipeline"]
    assert planned.one_request < pipeline.one_request
    assert f"{planned.sums_ms:.0f} ms beside" in warning
    assert f"{pipeline.one_request:.1f} tokens/s" in warning
    for other in (asked(macs), asked(macs, backend="jaccl", **tensor), asked({"network": SLOW}, **tensor)):
        assert not any(line.startswith("warning") for line in other.shapes.reasons)


def test_each_shape_says_what_one_request_and_eight_would_have() -> None:
    for one in asked({"network": SLOW}, max_rows=16).shapes.shapes:
        assert one.one_request < one.eight_requests < one.full_batch
    for one in asked({"network": SLOW}, max_rows=4).shapes.shapes:
        assert one.eight_requests == one.full_batch


def test_more_machines_are_told_to_serve_more_rows() -> None:
    """If memory bounds the rows. The plan itself takes as few machines as hold the model."""
    answer = asked({"machines": [MAC | {"count": 4, "usable_gib": 12}], "network": SLOW})
    one, wide = answer.shapes.shapes[0], max(answer.shapes.shapes, key=lambda each: each.full_batch)
    assert (one.planned, len(one.groups)) == (True, 1)
    assert wide.rows > one.rows
    assert wide.full_batch > 2 * one.full_batch
    assert "for a full batch a pipeline over 4" in "\n".join(answer.shapes.reasons)
    for each in answer.shapes.shapes:
        assert all(each.memory <= 0.9 * 12 * GIB for group in each.groups for each in group.machines)


def test_a_shape_is_what_the_plan_says() -> None:
    split = asked({"network": SLOW}, split=[20, 12]).shapes.shapes[0]
    assert (split.planned, [group.layers for group in split.groups]) == (True, [20, 12])
    tensor = asked({"network": SLOW}, strategy="tensor", stages=4, clear_links=True).shapes.shapes[0]
    assert (tensor.strategy, tensor.planned, [group.layers for group in tensor.groups]) == (
        "tensor",
        True,
        [32],
    )
    rows = asked({"network": SLOW}, max_rows=3).shapes.shapes
    assert {one.rows for one in rows} == {3}


def test_a_tied_head_is_read_where_it_is() -> None:
    large = MODEL | {"embed_bytes": 8 * GIB, "kv_bytes_per_token": 0}
    loose, tied = asked({"model": large}), asked({"model": large | {"tied": True}})
    assert tied.shapes.shapes[0].compute_ms == pytest.approx(2 * loose.shapes.shapes[0].compute_ms, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": MODEL | {"layer_bytes": [1, 2]}}, "2 sizes for 32 layers"),
        ({"model": MODEL | {"state_bytes": [1]}}, "1 sizes for 32 layers"),
        ({"machines": [MAC, MAC]}, "same name"),
        ({"machines": [MAC | {"gb_per_s": 1e-320}]}, "machines.0.gb_per_s"),
        ({"machines": [MAC | {"gb_per_s": float("inf")}]}, "machines.0.gb_per_s"),
        ({"machines": [MAC | {"count": 40}, MAC | {"name": "b", "count": 40}]}, f"more than {MAX_MACHINES}"),
        ({"links": [FAST | {"between": ["mac-1", "mac-9"]}]}, "mac-9, which is no machine"),
        ({"links": [FAST | {"between": ["mac-1", "mac-2"], "gbit_per_s": -1}]}, "links.0.gbit_per_s"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(told)) as caught:
        asked(changes)
    assert caught.value.reason == "BAD_SIMULATION"


def test_a_file_that_is_not_json_or_does_not_fit_is_refused() -> None:
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 5000):
        with pytest.raises(InvalidInput) as caught:
            simulate(content, admin_pb2.DeploymentSpec(name="demo", model="simulated"))
        assert caught.value.reason == "BAD_SIMULATION"
    with pytest.raises(ResourceExhausted) as large:
        asked({"machines": [MAC | {"usable_gib": 1}]})
    assert large.value.reason == "DOES_NOT_FIT"
    with pytest.raises(InvalidInput) as mixed:
        asked({}, strategy="mixed")
    assert (mixed.value.reason, mixed.value.metadata["param"]) == ("BAD_DEPLOYMENT", "strategy")
    with pytest.raises(InvalidInput, match="one ring"):
        asked({}, replicas=2)


def test_windows_states_and_vocabulary_of_a_profile_count() -> None:
    """As in a cluster: of a window no more is held than it has, and a state whatever the context is."""
    mac = {"machines": [MAC | {"usable_gib": 17}], "model": MODEL}
    whole, windows, states, logits = (
        asked(mac | {"model": MODEL | changes}).shapes.shapes[0]
        for changes in (
            {},
            {"kv_max_tokens": [1024] * 32},
            {"state_bytes": [1 << 30] + [0] * 31},
            {"vocab_size": 1 << 23},
        )
    )
    assert windows.rows >= 4 * whole.rows
    assert states.rows < whole.rows
    assert logits.rows < whole.rows


def test_a_model_of_which_nothing_is_read_has_no_rate() -> None:
    """As a node might report one."""
    empty = {"layer_bytes": 0, "head_bytes": 0, "embed_bytes": 0, "kv_bytes_per_token": 0, "tied": False}
    (first, *_) = asked({"model": MODEL | empty}).shapes.shapes
    assert (first.planned, first.one_request, first.full_batch) == (True, 0, 0)


def test_the_example_of_the_manual_is_simulated() -> None:
    page = (Path(__file__).parents[3] / "docs/operators.md").read_text("utf-8")
    (example,) = re.findall(r"```json\n(\{\n \"model\".*?)```", page, re.DOTALL)
    answer = simulate(example.encode(), admin_pb2.DeploymentSpec(name="demo", model="simulated"))
    assert {one.strategy for one in answer.shapes.shapes} == {"pipeline", "tensor"}


# Without the planner


def model(layers: int, *ranks: int) -> Model:
    """Layers of 10 bytes, which `ranks` ranks share."""
    return Model(
        {
            count: model_pb2.ModelProfile(
                layers=layers,
                layer_bytes=[10 // count] * layers,
                kv_bytes_per_token=[0] * layers,
                kv_max_tokens=[0] * layers,
                state_bytes=[0] * layers,
            )
            for count in (1, *ranks)
        },
        64,
    )


def table(*rates: float | None, room: int = 90) -> admin_pb2.ShapeTable:
    """A plan of four layers on the first."""
    found = [
        Candidate(f"n{place}", f"n{place}", 10_000, 10, rate=rate and Rate(rate), taken=9000 - room)
        for place, rate in enumerate(rates)
    ]
    made = model(4)
    plan = admin_pb2.DeploymentPlan(
        spec=admin_pb2.DeploymentSpec(context=64),
        profile=made.parts[1],
        rings=[admin_pb2.RingPlan(stages=[admin_pb2.StagePlan(member="n0", end_layer=4)])],
    )
    return shape_table(admin_pb2.DeploymentSpec(), made.parts, found, Network(), plan)


@pytest.mark.parametrize(
    ("count", "names"),
    [(1, "n0"), (8, "n0, n1, n2, n3, n4, n5, n6, n7"), (10, "n0, n1, n2, n3, n4, n5, n6, n7 and 2 more")],
)
def test_who_was_never_timed_is_told_up_to_eight(count: int, names: str) -> None:
    """And nothing else, where it is nobody."""
    assert list(table(*[None] * count).reasons) == [
        f"the speed of {names} with this model is not known before a part of it was loaded there"
    ]


ALL = ("one request", "a full batch")


def test_what_is_assumed_of_links_is_told_where_there_are_any() -> None:
    same = [f"for {what} nothing is faster than the plan, as far as an estimate tells" for what in ALL]
    alone = table(1000.0)
    assert list(alone.reasons) == same
    assert [len(one.groups) for one in alone.shapes] == [1]
    assert list(table(1000.0, 1000.0).reasons)[2:] == [
        "assumed of links of which nothing is known: 10 Gbit/s, and 0.1 ms one way"
    ]
    assert Network().other is ASSUMED


def test_a_plan_that_does_not_fit_any_more_has_no_table() -> None:
    assert table(1000.0, room=39) == admin_pb2.ShapeTable()
